"""What lies on a device, in bytes, and whether more fits: asked before a step maps or moves anything there."""

import os
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from rft.effects.runtime import Runtime, runtime_of
from rft.errors import DoesNotFit
from rft.state import Awake, OnDevice, RuntimeState

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
    """Bytes of the largest tensor of the weight stream as it is gathered: what a broadcast needs beside both copies."""
    return max((_bytes(spec.shape, spec.dtype) for spec in runtime.trainer.manifest()), default=0)


def require_room(call: str, state: RuntimeState[Any, Any, Any, Any], adding: Mapping[str, int]) -> None:
    """Collective: raises `DoesNotFit`, with the sum as a table, where `adding` is more than is free on any rank."""
    runtime = runtime_of(state)
    there = on_device(state)
    free = _free(runtime, sum(there.values()))
    report = None if sum(adding.values()) <= free else _sum(there, adding, free)
    short = [f"rank {rank}:\n{text}" for rank, text in enumerate(runtime.lockstep.gather(report)) if text is not None]
    if short:
        raise DoesNotFit(
            f"{call}: not enough device memory for {', '.join(adding)}\n" + "\n".join(short) + "\n  offload something first "
            "(offload_actor, offload), or launch with a smaller cache; nothing was moved"
        )


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
