"""Ranks, devices and process groups, as torchrun users know them.

With 8 ranks and TP 2 the TP groups are [0,1] [2,3] [4,5] [6,7] and the DP groups [0,2,4,6] [1,3,5,7]. The Actor is sharded over
the whole world; TP and DP are the engine's. On several nodes ranks count through node after node, so that a TP group, whose ranks
are neighbours, lies on one of them.
"""

import dataclasses as dc
import datetime
import itertools
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented as public)

from rft.errors import BadInput, RanksDiverged

log = logging.getLogger("rft")
_opened = itertools.count()
BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""What processors call their instructions for it."""


@dc.dataclass(frozen=True, kw_only=True)
class World:
    """This rank's place. `host` is a gloo group over all ranks, for small messages; `tp` and `dp` are gloo groups too (None: alone)."""

    rank: int
    size: int
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    device: torch.device
    host: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None
    dp: dist.ProcessGroup | None


def tp_groups(size: int, tp: int) -> list[list[int]]:
    """Neighbouring ranks: [0,1] [2,3] … for TP 2. Raises `BadInput` where TP does not divide the world."""
    if tp < 1 or size % tp:
        raise BadInput(f"tensor_parallel={tp} does not divide the world size {size}; start torchrun with a multiple of {tp} processes")
    return [list(range(first, first + tp)) for first in range(0, size, tp)]


def dp_groups(size: int, tp: int) -> list[list[int]]:
    """Ranks of the same TP rank: [0,2,4,6] [1,3,5,7] for 8 ranks and TP 2. Raises `BadInput` like `tp_groups`."""
    return [list(ranks) for ranks in zip(*tp_groups(size, tp), strict=True)]


def open_world(tensor_parallel: int, *, timeout_s: float) -> World:
    """Joins torchrun's world (or makes one of a single rank), with its TP and DP groups. Collective; over any number of nodes.

    Under torchrun the ranks call the roll first. Raises `RanksDiverged` that names those which did not come in time; and `BadInput`,
    on every rank, where TP does not divide the world, a TP group would lie on two nodes, or a rank has no device, and for an environment
    that torchrun does not make. Nothing has been opened then.
    """
    size, rank = _said("WORLD_SIZE", 1), _said("RANK", 0)
    rows, columns = tp_groups(size, tensor_parallel), dp_groups(size, tensor_parallel)
    if "MASTER_ADDR" not in os.environ:
        _require_alone(rank, size)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    timeout = datetime.timedelta(seconds=timeout_s)
    device = _join(rank, size, _problem(tensor_parallel, size), timeout)
    tp = [_group(ranks, timeout) for ranks in rows]
    dp = [_group(ranks, timeout) for ranks in columns]
    world = World(
        rank=rank,
        size=size,
        tp_rank=rank % tensor_parallel,
        tp_size=tensor_parallel,
        dp_rank=rank // tensor_parallel,
        dp_size=size // tensor_parallel,
        device=device,
        host=_group(range(size), timeout),
        tp=tp[rank // tensor_parallel],
        dp=dp[rank % tensor_parallel],
    )
    where = f"device {device}, process {os.getpid()} on {socket.gethostname()}"
    log.info("rank %d of %d: TP rank %d, DP rank %d, %s", rank, size, world.tp_rank, world.dp_rank, where)
    return world


def quick_dtype() -> Literal["bfloat16", "float32"]:
    """What this rank's device computes in fastest: bfloat16, but float32 on a CPU that has no instructions for bfloat16.

    There a product of matrices takes 6 to 30 times as long in bfloat16. Where torch does not tell what a CPU has, it is bfloat16.
    """
    told = getattr(torch.cpu, "get_capabilities", None)  # not in every version
    if torch.cuda.is_available() or told is None or any(told().get(name) for name in BFLOAT16):
        return "bfloat16"
    return "float32"


def _said(name: str, otherwise: int) -> int:
    """What the environment says of this rank. Raises `BadInput` for what is no number."""
    said = os.environ.get(name, str(otherwise))
    if not said.isdecimal():
        raise BadInput(f"the environment has {name}={said!r}, which is no whole number; start with torchrun, which sets it, or unset it")
    return int(said)


def _require_alone(rank: int, size: int) -> None:
    """Raises `BadInput` where there are to be several ranks, and nothing says where they meet."""
    if (rank, size) != (0, 1) and not dist.is_initialized():
        raise BadInput(
            f"the environment has RANK={rank} and WORLD_SIZE={size}, and no MASTER_ADDR where the ranks meet; start with torchrun, which "
            "sets all of them, or unset RANK and WORLD_SIZE for a single rank"
        )


def _join(rank: int, size: int, problem: str | None, timeout: datetime.timedelta) -> torch.device:
    """Makes torch's process group, unless there is one already, when all ranks are there and none has a problem."""
    store = _fresh_store(timeout) if under_torchrun() and not dist.is_initialized() else None
    problems = {rank: problem} if store is None else _roll_call(store, rank, size, problem, timeout)
    if found := [f"rank {who}: {what}" for who, what in problems.items() if what]:
        raise BadInput("\n".join(["this cannot be launched:", *found]))
    device = _own_device()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        where: dict[str, Any] = {} if store is None else {"store": store, "rank": rank, "world_size": size}
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None, **where)
    return device


def _roll_call(store: PrefixStore, rank: int, size: int, problem: str | None, timeout: datetime.timedelta) -> dict[int, str]:
    """What each rank says against a launch, if anything, once all are there."""
    keys = {who: f"there/{who}" for who in range(size)}
    store.set(keys[rank], problem or "")
    try:
        store.wait(list(keys.values()), timeout)
    except dist.DistStoreError as error:
        missing = ", ".join(str(who) for who, key in keys.items() if not store.check([key]))
        raise RanksDiverged(
            f"of {size} ranks, rank {missing} did not come to launch within {timeout.total_seconds():g} s; its own output, on its own "
            "node, should say why"
        ) from error
    return {who: store.get(key).decode() for who, key in keys.items()}


def _problem(tensor_parallel: int, size: int) -> str | None:
    """What stands against this rank's taking part, seen from here."""
    here, local = _said("LOCAL_WORLD_SIZE", size), _said("LOCAL_RANK", 0)
    if here % tensor_parallel:
        return (
            f"tensor_parallel={tensor_parallel} would spread a TP group over nodes, and every token would wait for the network; "
            f"{socket.gethostname()} runs {here} of the {size} processes: start torchrun with a multiple of {tensor_parallel} per node"
        )
    devices = torch.cuda.device_count() if torch.cuda.is_available() else None
    if devices is not None and local >= devices:
        return f"it is local rank {local} on {socket.gethostname()}, where {devices} GPUs are visible: start one process a GPU"
    return None


def _group(ranks: Sequence[int], timeout: datetime.timedelta) -> dist.ProcessGroup | None:
    group: Any = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
    return group


def under_torchrun() -> bool:
    """Whether torchrun started this rank, and keeps the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _fresh_store(timeout: datetime.timedelta) -> PrefixStore:
    """Torchrun's store, under a name of its own for each world: it outlives them, and the second would find the first one's addresses."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return PrefixStore(f"rft/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/world {next(_opened)}", store)


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", _said("LOCAL_RANK", 0))
    torch.cuda.set_device(device)
    return device


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
