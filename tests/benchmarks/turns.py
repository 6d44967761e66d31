"""Several benchmarks on one machine: they start side by side, which takes longest, and measure one after the other.

Where RFT_BENCHMARK_TURN is a file, to be made once this run has started, its folder has one for each run that waits. As soon as there are
RFT_BENCHMARK_TURNS of them, the devices of CUDA_VISIBLE_DEVICES are taken in turn, and kept until the process ends. Whoever starts the
runs makes the file of one that has failed. Otherwise nobody waits.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rft.parallel.world import World

LIMIT_S, POLL_S = 200.0, 0.2
"""For which the slowest start is waited, and between two looks."""
HELD: list[Any] = []
"""Locks go with the files that they are on."""


def my_turn(world: World) -> None:
    """Returns on all ranks once the devices are this run's alone."""
    if world.rank == 0 and (own := os.environ.get("RFT_BENCHMARK_TURN")):
        _wait_for_all(Path(own))
        for device in sorted(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")):
            HELD.append(Path(own).with_name(f".device-{device}").open("w"))
            fcntl.flock(HELD[-1], fcntl.LOCK_EX)
    if world.size > 1:
        dist.barrier(group=world.host)


def _wait_for_all(own: Path) -> None:
    own.touch()
    wanted, until = int(os.environ["RFT_BENCHMARK_TURNS"]), time.monotonic() + LIMIT_S
    while sum(not file.name.startswith(".") for file in own.parent.iterdir()) < wanted and time.monotonic() < until:
        time.sleep(POLL_S)
