"""Saving a whole run, and going on from what was saved.

    save:     the tree as data → a folder aside → tensors, random states, facts → manifest → rename → older ones go
    restore:  the newest whole one → same model, same structure? → engine to rest → install → roles to their places

A save touches nothing but the disk. A restore touches nothing until the checkpoint is known to be whole and to fit.
"""

import contextlib
import dataclasses as dc
import json
import logging
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from rft.checkpoint import folder as folders
from rft.checkpoint import manifest, randomness, tensors, values
from rft.effects.alike import require_alike, require_one_tree
from rft.effects.runtime import Runtime, runtime_of
from rft.errors import BadInput, CheckpointFailed, RoleError
from rft.state import ACTOR_OPTIMIZER, CRITIC, CRITIC_OPTIMIZER, EMA, OnDevice, PolicyVersion, RuntimeState
from rft.trainers.protocol import Adapted, Saved

log = logging.getLogger("rft")

T = TypeVar("T")
Run = TypeVar("Run")
FACTS = "facts.json"
FORMAT = 2
SAVE, RESTORE = "save(state, folder, run)", "restore(state, folder, run)"
UNWRITTEN = "the checkpoint could not be written; older ones are as they were, and the state lives on"
UNREAD = "the checkpoint could not be read; nothing was touched"


@dc.dataclass(frozen=True, kw_only=True)
class Restored(Generic[Run]):
    """What a restored state is made of."""

    actor: OnDevice
    version: PolicyVersion
    generation: int
    run: Run


# ---- saving ----


def save(state: RuntimeState[Any, Any, Any, Any], folder: Path, run: object, keep: int) -> Path:
    """Writes a checkpoint, and removes those older than the newest `keep`."""
    runtime = runtime_of(state)
    with runtime.lockstep.agreement() as exchange:
        if type(keep) is not int or keep < 1:
            raise BadInput(f"{SAVE}: keep must be an int of at least 1, got {keep!r}")
        plain = values.to_plain(run)
        exchange.own = {"folder": str(folder), "keep": keep}
    require_alike(SAVE, exchange.everywhere)
    require_one_tree(SAVE, runtime, plain)
    partial = _on_rank_0(runtime, f"{SAVE}: {UNWRITTEN}", lambda: folders.begin(folder, state.version))
    try:
        named = _saved(runtime)
        path = _written(runtime, state, partial, named, plain)
    except BaseException:
        if runtime.world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # what stays, the next save removes
        raise
    if runtime.world.rank == 0:
        folders.keep_newest(folder, keep, runtime.damaged)
    return path


def _saved(runtime: Runtime) -> dict[str, Tensor]:
    """Everything that models and optimizers go on from, on the host. Collective."""
    return {f"{part}.{name}": tensor for part, of in _parts(runtime).items() for name, tensor in of.saved().items()}


def _parts(runtime: Runtime) -> Mapping[str, Saved]:
    """What changes in a run. A Reference and reward models stay what they are loaded as."""
    average, critic = runtime.beside.frozen.get(EMA), runtime.beside.critic
    others: dict[str, Saved | None] = {"critic": critic, "ema": average}
    return {"actor": runtime.trainer, **{name: part for name, part in others.items() if part is not None}}


def _written(
    runtime: Runtime, state: RuntimeState[Any, Any, Any, Any], partial: Path, named: Mapping[str, Tensor], plain: values.Plain
) -> Path:
    rank, world = runtime.world.rank, runtime.world
    tensors.write(partial, named, world.size, world.host)
    own = [*tensors.own_files(partial, rank), randomness.file_of(rank)]
    with runtime.lockstep.agreement(), _named_failure(f"{SAVE}: {UNWRITTEN}"):
        randomness.write(partial, rank, world.device)
        if rank == 0:
            manifest.write_json(partial / FACTS, _facts(runtime, state, named))
            values.write(partial, plain)
            own += [FACTS, values.STRUCTURE, values.TENSORS]
        described = manifest.describe(partial, own)
    files = {name: file for part in runtime.lockstep.gather(described) for name, file in part.items()}
    return _on_rank_0(runtime, f"{SAVE}: {UNWRITTEN}", lambda: _completed(partial, files))


def _completed(partial: Path, files: dict[str, manifest.File]) -> Path:
    """Rank 0 alone: the manifest, and the rename."""
    unseen = sorted(files.keys() ^ manifest.files_below(partial))
    if unseen:
        raise CheckpointFailed(
            f"{SAVE}: rank 0 does not see what other ranks have written below {partial} ({tensors.some(unseen)}); the folder must be on a "
            "file system that all nodes share"
        )
    manifest.write(partial, files)
    return folders.finish(partial)


def _facts(runtime: Runtime, state: RuntimeState[Any, Any, Any, Any], named: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": state.version,
        "generation": state.generation,
        "generated": runtime.lineage.count,
        "branches": runtime.lineage.at(state.version),
        "ranks": runtime.world.size,
        "seed": runtime.spec.seed,
        "backend": runtime.trainer.name,
        "model": runtime.spec.model,
        "model_type": _model_type(runtime),
        "lora": _lora(runtime),
        "watch": runtime.watch.memory(),
        "tensors": tensors.facts_of(named),
    }


def _lora(runtime: Runtime) -> dict[str, float] | None:
    """What the saved adapter is scaled by, and the base that it is of."""
    lora = getattr(runtime.spec.trainer, "lora", None)
    if lora is None or not isinstance(runtime.trainer, Adapted):
        return None
    return {"rank": lora.rank, "alpha": lora.alpha, "base": runtime.trainer.base_fingerprint}


def _model_type(runtime: Runtime) -> str | None:
    return getattr(runtime.model.config, "model_type", None)


# ---- restoring ----


def restore(state: RuntimeState[Any, Any, Any, Any], folder: Path, run: Run) -> Restored[Run]:
    """Goes on from the newest whole checkpoint: engine at rest, Actor on the device, other roles where `state` has them."""
    runtime = runtime_of(state)
    require_alike(RESTORE, runtime.lockstep.gather({"folder": str(folder)}))
    path = _newest_whole(runtime, folder)
    with runtime.lockstep.agreement(), _named_failure(f"{RESTORE}: {UNREAD}"):
        facts: dict[str, Any] = json.loads((path / FACTS).read_bytes())
        _require_this_model(runtime, path, facts)
        tree: Run = values.from_plain(values.read(path), run)
        random = _random_states(runtime, path, facts)
    named = _fitting(runtime, path, facts)
    with runtime.ledger.irreversible("runtime"), runtime.lockstep.agreement():
        if runtime.has_engine:
            runtime.engine.sleep("release")
        named = named or _read_with_all_there(runtime, path, facts)
        for part, of in _parts(runtime).items():
            of.install({name.removeprefix(f"{part}."): tensor for name, tensor in named.items() if name.startswith(f"{part}.")})
        runtime.lineage.go_on(facts["branches"], runtime.lockstep.gather(secrets.token_hex(4))[0], facts["generated"])
        runtime.watch.remember(facts["watch"])
        _to_places(state, runtime)
        if random is not None:
            randomness.install(random, runtime.world.device)
    if runtime.world.rank == 0:
        log.info("restored %s: version %d, saved by %d ranks", path, facts["version"], facts["ranks"])
    version, generation = PolicyVersion(facts["version"]), facts["generation"]
    return Restored(actor=OnDevice(runtime.trainer.managed), version=version, generation=generation, run=tree)


def _newest_whole(runtime: Runtime, folder: Path) -> Path:
    """The newest checkpoint with nothing missing or damaged. Those that are passed over are said. Raises `BadInput` where none is left."""
    found = _on_rank_0(runtime, f"{RESTORE}: {UNREAD}", lambda: _looked_through(folder))
    passed = list[str]()
    for path, problem in found:
        damage = _damage(runtime, path) if problem is None else None
        (runtime.damaged.discard if damage is None else runtime.damaged.add)(path)
        problem = problem or damage
        if problem is None:
            return path
        passed.append(f"{path} is not whole: {problem}")
        if runtime.world.rank == 0:
            log.warning("%s; passing over it, for an older one: remove it, or bring its files back", passed[-1])
    raise BadInput(f"{RESTORE}: there is no whole checkpoint in {folder}" + "".join(f"\n  {each}" for each in passed))


def _looked_through(folder: Path) -> list[tuple[Path, str | None]]:
    """Rank 0 alone: all checkpoints, the newest first, with what can be seen to be wrong without reading them."""
    for path in folders.interrupted(folder):
        log.warning("ignoring %s, which an interrupted save has left behind; the next save removes it", path)
    return [(found.path, manifest.problem(found.path)) for found in folders.checkpoints(folder)]


def _damage(runtime: Runtime, path: Path) -> str | None:
    """What the checksums say; each rank reads its share of the files."""
    files = _on_rank_0(runtime, f"{RESTORE}: {UNREAD}", lambda: manifest.read(path))
    share = sorted(files)[runtime.world.rank :: runtime.world.size]
    found = runtime.lockstep.gather(manifest.damaged(path, {name: files[name] for name in share}))
    return tensors.some(sorted({problem for part in found for problem in part})) or None


def _require_this_model(runtime: Runtime, path: Path, facts: dict[str, Any]) -> None:
    """What can be told before any tensor is looked at: the format, and the kind of model. What may be meant is said."""
    if facts["format"] != FORMAT:
        raise BadInput(f"{RESTORE}: {path} has format {facts['format']}, and this version of rft reads {FORMAT}")
    if facts["model_type"] != _model_type(runtime):
        raise BadInput(f"{RESTORE}: {path} is of a {facts['model_type']} model, and this launch has a {_model_type(runtime)} one")
    if facts["lora"] != _lora(runtime):
        both = f"was saved with LoRA {facts['lora']}, and this launch has {_lora(runtime)}"
        raise BadInput(f"{RESTORE}: {path} {both}; rank, alpha and base model must be the same")
    seed, model = runtime.spec.seed, runtime.spec.model
    if facts["seed"] != seed and runtime.world.rank == 0:
        log.warning("%s was saved by a run of seed %d, and this one has %d: it will sample otherwise", path, facts["seed"], seed)
    whole = all(f"actor.model.{tensor.name}" in facts["tensors"] for tensor in runtime.trainer.manifest())
    if not whole and facts["model"] != model and runtime.world.rank == 0:
        log.warning("%s is what was trained on top of %s, and this launch has %s; they must be the same model", path, facts["model"], model)


def _random_states(runtime: Runtime, path: Path, facts: dict[str, Any]) -> dict[str, Any] | None:
    rank, ranks = runtime.world.rank, facts["ranks"]
    if rank < ranks:
        return randomness.read(path, rank)
    log.warning("%s was saved by %d ranks: the random states of rank %d are not in it, and stay as they are", path, ranks, rank)
    return None


def _fitting(runtime: Runtime, path: Path, facts: dict[str, Any]) -> dict[str, Tensor] | None:
    """The checkpoint's tensors on the host, or None where that they fit can be told only when everything is on the device."""
    if runtime.ledger.fault() == "runtime":
        return None
    try:
        return _read(runtime, path, facts)
    except RoleError:
        return None


def _read(runtime: Runtime, path: Path, facts: dict[str, Any]) -> dict[str, Tensor]:
    """What was saved, in tensors like those that there are. Raises `BadInput` with the names where they are others. Collective."""
    named = _saved(runtime)
    problems = tensors.differences(facts["tensors"], tensors.facts_of(named))
    if problems:
        raise BadInput(f"{RESTORE}: {path} is of other tensors than this launch has; nothing was installed: {tensors.some(problems)}")
    tensors.read(path, named, runtime.world.host)
    return named


def _read_with_all_there(runtime: Runtime, path: Path, facts: dict[str, Any]) -> dict[str, Tensor]:
    """As `_read`, after moving what is read into to the device, if the backend must have it there."""
    try:
        return _read(runtime, path, facts)
    except RoleError:
        runtime.trainer.reload("model")
        for role in (ACTOR_OPTIMIZER, CRITIC, CRITIC_OPTIMIZER, EMA):
            if role in runtime.movable:
                runtime.movable[role].reload()
        return _read(runtime, path, facts)


def _to_places(state: RuntimeState[Any, Any, Any, Any], runtime: Runtime) -> None:
    """The Actor on the device, every other role where `state` has it; what is there already stays."""
    runtime.trainer.reload("model")
    for placement in sorted(state.roles.placements, key=lambda placement: placement.where == "device"):
        role = runtime.movable[placement.role]
        if placement.where == "host":
            role.offload()
        else:
            role.reload()


# ---- on all ranks alike ----


def _on_rank_0(runtime: Runtime, failing: str, act: Callable[[], T]) -> T:
    """What rank 0 finds or does on the disk, on every rank. Its failure is `CheckpointFailed` there, and `PeerFailed` elsewhere."""
    made: list[T] = []
    with runtime.lockstep.agreement(), _named_failure(failing):
        if runtime.world.rank == 0:
            made = [act()]
    return runtime.lockstep.gather(made)[0][0]


@contextlib.contextmanager
def _named_failure(what: str) -> Generator[None]:
    """Turns what the system says of files into an error of ours."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointFailed(f"{what}: {error}") from error
