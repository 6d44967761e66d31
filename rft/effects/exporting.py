"""The Actor, or a frozen model beside it, as a folder that others load."""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

from rft.effects.alike import require_alike
from rft.effects.runtime import Runtime, runtime_of
from rft.errors import BadInput, RoleError
from rft.state import Role, RuntimeState, spelled
from rft.trainers.protocol import Adapted


def export(state: RuntimeState[Any, Any, Any, Any], path: Path, role: Role | None) -> Path:
    """Writes an ordinary Hugging Face folder; rank 0 writes. Raises `BadInput` where something else lies there that would be lost."""
    runtime = runtime_of(state)
    with _one_folder(runtime, "export", path):
        if role is not None and role not in runtime.beside.frozen:
            there = ", ".join(map(spelled, runtime.beside.frozen)) or "no other model"
            call = f"export(state, {str(path)!r}, role={spelled(role)})"
            raise RoleError(f"{call}: besides the Actor (no role) there is {there} to be exported")
    (runtime.trainer if role is None else runtime.beside.frozen[role]).export(path)
    return path


def export_adapter(state: RuntimeState[Any, Any, Any, Any], path: Path) -> Path:
    """Writes the Actor's adapter as a peft folder; rank 0 writes. Raises `BadInput` where it has none."""
    runtime = runtime_of(state)
    trainer = runtime.trainer
    with _one_folder(runtime, "export_adapter", path):
        if not isinstance(trainer, Adapted):
            raise BadInput("export_adapter(state, path): this Actor has no adapter; launch with FSDP2Trainer(lora=LoRA())")
    trainer.export_adapter(path)
    return path


@contextlib.contextmanager
def _one_folder(runtime: Runtime, call: str, path: Path) -> Generator[None]:
    """All ranks hear of what one of them refuses inside, and are refused where they name different folders. Collective when it is left."""
    with runtime.lockstep.agreement() as exchange:
        yield
        try:
            is_file = path.is_file()
        except OSError as error:  # such as a name that is too long
            raise BadInput(f"{call}(state, path): path names no folder: {error}") from error
        if path.resolve() == runtime.model.path.resolve():
            raise BadInput(f"{call}(state, {str(path)!r}): the model that was launched lies there, and would be lost; name another folder")
        if is_file:
            raise BadInput(f"{call}(state, {str(path)!r}): there is a file of that name; name a folder")
        exchange.own = {"path": str(path)}
    require_alike(f"{call}(state, path)", exchange.everywhere)
