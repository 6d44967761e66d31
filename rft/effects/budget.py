"""What lies on a device, in bytes, and whether more fits: asked before a step maps, moves or computes anything there.

What a step computes with is added up by the functions of the memory plan (`rft.memory`), so that both say the same.
"""

import os
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rft.effects.runtime import Runtime, runtime_of
from rft.errors import DoesNotFit
from rft.memory import needs
from rft.memory.plan import PROBE
from rft.memory.steps import streamed
from rft.state import CRITIC, EMA, REFERENCE, Awake, OnDevice, Role, RuntimeState, reward_model

MIB = 1 << 20


def on_device(state: RuntimeState[Any, Any, Any, Any]) -> dict[str, int]:
    """Bytes on this rank's device by what they are for: the Actor, the roles that are there, the engine's weights and cache."""
    runtime = runtime_of(state)
    there = {"actor": runtime.trainer.bytes("model")} if type(state.actor) is OnDevice else {}
    there |= {placement.role: placement.bytes for placement in state.roles.placements if placement.where == "device"}
    if runtime.has_engine:
        memory = runtime.engine.memory()
        awake = type(state.engine) is Awake
        there |= {"engine weights": memory.mapped - memory.cache * awake, "engine cache": memory.cache * awake}
    return {name: size for name, size in there.items() if size}


def sync_bucket(runtime: Runtime) -> int:
    """Bytes of the weight stream that are on their way to the engine at most: see `rft.memory.steps.streamed`."""
    manifest = runtime.trainer.manifest(runtime.engine.casts_to)
    return streamed([_bytes(spec.shape, spec.dtype) for spec in manifest], runtime.world.size)


def require_room(call: str, state: RuntimeState[Any, Any, Any, Any], adding: Mapping[str, int]) -> None:
    """Collective: raises `DoesNotFit`, with the sum as a table, where `adding` is more than is free on any rank."""
    if not adding:
        return
    runtime = runtime_of(state)
    there = on_device(state)
    free = _free(runtime, sum(there.values()))
    _give_back(runtime, sum(adding.values()))
    report = None if sum(adding.values()) <= free else _sum(there, adding, free)
    short = [f"rank {rank}:\n{text}" for rank, text in enumerate(runtime.lockstep.gather(report)) if text is not None]
    if short:
        raise DoesNotFit(
            f"{call}: not enough device memory for {', '.join(adding)}\n" + "\n".join(short) + "\n  offload something first "
            "(offload_actor, offload), or launch with a smaller cache; nothing was moved"
        )


def needed_to_score(state: RuntimeState[Any, Any, Any, Any], *masks: Tensor, role: Role | None = None) -> Mapping[str, int]:
    """What log-probs, values or rewards of rows take beside the model: by `role`, or by the Actor. Each mask `[batch, seq]` goes alone."""
    runtime = runtime_of(state)
    launch, ranks, config = runtime.spec, runtime.world.size, runtime.model.config
    if not masks or not _is_counted(runtime):
        return {}
    work = needs.work_of(max(masks, key=lambda mask: int(mask.sum())), runtime.world.device.type)
    if role is None:
        return needs.to_score(launch, config, work, ranks)
    if role == CRITIC:
        return needs.to_value(launch, config, work, ranks)
    frozen = {REFERENCE: launch.reference, EMA: launch.ema, **{reward_model(n): spec for n, spec in launch.reward_models.items()}}
    spec = frozen.get(role)
    if role in runtime.beside.by_actor:
        return needs.to_score(launch, config, work, ranks)
    return {} if spec is None else needs.to_ask(spec, config, work, ranks)


def needed_to_probe(state: RuntimeState[Any, Any, Any, Any]) -> Mapping[str, int]:
    """What the Actor takes as it is compared with an engine that wakes: with `keep_gathered` all of it in full."""
    runtime = runtime_of(state)
    if type(state.actor) is not OnDevice or not runtime.spec.probe_every:
        return {}
    return needed_to_score(state, torch.ones(1, PROBE, dtype=torch.bool))


def needed_to_train(state: RuntimeState[Any, Any, Any, Any], mask: Tensor, *, role: Role | None = None) -> Mapping[str, int]:
    """What an optimizer step takes beside weights and moments: of the Actor, or with `role=CRITIC` of the Critic."""
    runtime = runtime_of(state)
    if not _is_counted(runtime):
        return {}
    work = needs.work_of(mask, runtime.world.device.type)
    find = needs.to_train if role is None else needs.to_train_critic
    return find(runtime.spec, runtime.model.config, work, runtime.world.size)


def _is_counted(runtime: Runtime) -> bool:
    """Whether computing is added up: on a CPU, which pages, only against a limit that was asked for; without a model (scripted), never.

    Nor for a model that takes images: nothing is known here of what its vision tower takes.
    """
    limited = runtime.world.device.type == "cuda" or runtime.spec.device_bytes is not None
    return limited and runtime.model.config is not None and runtime.model.images is None


def _give_back(runtime: Runtime, size: int) -> None:
    """Where the driver has less than `size` free, what the allocator keeps unused goes back to it: an engine takes from there alone."""
    if runtime.world.device.type == "cuda" and torch.cuda.mem_get_info()[0] < size:
        torch.cuda.empty_cache()


def _free(runtime: Runtime, used: int) -> int:
    if runtime.spec.device_bytes is not None:
        return runtime.spec.device_bytes - used
    if runtime.world.device.type == "cuda":
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + unused
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _sum(there: Mapping[str, int], adding: Mapping[str, int], free: int) -> str:
    table = Table("", "MiB", title=None)
    for name, size in there.items():
        table.add_row(f"{name} (there)", f"{size / MIB:,.1f}")
    for name, size in adding.items():
        table.add_row(f"{name} (to come)", f"{size / MIB:,.1f}")
    table.add_section()
    table.add_row("would be on the device", f"{(sum(there.values()) + sum(adding.values())) / MIB:,.1f}")
    table.add_row("there, and free", f"{(sum(there.values()) + free) / MIB:,.1f}")
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
