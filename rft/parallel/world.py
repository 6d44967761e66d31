"""Ranks, devices and process groups, as torchrun users know them.

With 8 ranks and TP 2 the TP groups are [0,1] [2,3] [4,5] [6,7] and the DP groups [0,2,4,6] [1,3,5,7]. The Actor is sharded over
the whole world; TP and DP are the engine's.
"""

import dataclasses as dc
import datetime
import itertools
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented as public)

from rft.errors import BadInput

log = logging.getLogger("rft")
_opened = itertools.count()


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
    """Joins torchrun's world (or makes one of a single rank), with its TP and DP groups. Collective.

    Raises `BadInput` where TP does not divide the world; nothing has been opened then.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    rows, columns = tp_groups(size, tensor_parallel), dp_groups(size, tensor_parallel)
    if "MASTER_ADDR" not in os.environ:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    device = _own_device()
    timeout = datetime.timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        where: dict[str, Any] = {"store": _fresh_store(timeout), "rank": rank, "world_size": size} if _is_torchruns() else {}
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None, **where)
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
    log.info("rank %d of %d: TP rank %d, DP rank %d, device %s", rank, size, world.tp_rank, world.dp_rank, device)
    return world


def _group(ranks: Sequence[int], timeout: datetime.timedelta) -> dist.ProcessGroup | None:
    group: Any = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
    return group


def _is_torchruns() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _fresh_store(timeout: datetime.timedelta) -> PrefixStore:
    """Torchrun's store, under a name of its own for each world: it outlives them, and the second would find the first one's addresses."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return PrefixStore(f"rft/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/world {next(_opened)}", store)


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
