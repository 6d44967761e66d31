"""The Actor, or a frozen model beside it, as a folder that others load."""

from pathlib import Path
from typing import Any

from rft.effects.runtime import runtime_of
from rft.errors import BadInput, RoleError
from rft.state import Role, RuntimeState, spelled
from rft.trainers.protocol import Adapted


def export(state: RuntimeState[Any, Any, Any, Any], path: Path, role: Role | None) -> Path:
    """Writes an ordinary Hugging Face folder; rank 0 writes. Raises `BadInput` where something else lies there already."""
    runtime = runtime_of(state)
    if role is not None and role not in runtime.beside.frozen:
        there = ", ".join(map(spelled, runtime.beside.frozen)) or "no other model"
        raise RoleError(f"export(state, {str(path)!r}, role={spelled(role)}): besides the Actor (no role) there is {there} to be exported")
    if path.is_file():
        raise BadInput(f"export(state, {str(path)!r}): there is a file of that name; name a folder")
    (runtime.trainer if role is None else runtime.beside.frozen[role]).export(path)
    return path


def export_adapter(state: RuntimeState[Any, Any, Any, Any], path: Path) -> Path:
    """Writes the Actor's adapter as a peft folder; rank 0 writes. Raises `BadInput` where it has none."""
    trainer = runtime_of(state).trainer
    if not isinstance(trainer, Adapted):
        raise BadInput("export_adapter(state, path): this Actor has no adapter; launch with FSDP2Trainer(lora=LoRA())")
    if path.is_file():
        raise BadInput(f"export_adapter(state, {str(path)!r}): there is a file of that name; name a folder")
    trainer.export_adapter(path)
    return path
