"""What one transition costs by itself, without its effect.

    python -m tests.benchmarks.transition                                          checks, ledger and the new record
    torchrun --nproc-per-node 4 -m tests.benchmarks.transition                     and the comparison of ranks, watched as under `launch`

It times a step without an effect, beside the same function without the decorator on one rank, and appends to results/transition.jsonl.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import rft
from rft.effects.runtime import runtime_of
from rft.ledger import Ledger
from rft.parallel.world import World, open_world
from rft.state import A, Devices, E, O, Roles, RuntimeState, W, first_state
from rft.testing import scripted_launch
from tests.benchmarks.record import append


def bare(state: RuntimeState[E, W, A, O], /) -> RuntimeState[E, W, A, O]:
    """The new record alone."""
    return rft.then(state, state.engine, state.weights, state.actor, state.old)


@rft.transition
def stay(state: RuntimeState[E, W, A, O], /) -> RuntimeState[E, W, A, O]:
    """A transition that moves nothing."""
    return rft.then(state, state.engine, state.weights, state.actor, state.old)


def microseconds(step: Callable[[Any], Any], *, calls: int = 20_000, rounds: int = 7) -> float:
    """Median over `rounds` of the mean time of one call, in microseconds."""
    devices = Devices()
    devices.ledger = Ledger()
    state = first_state(devices, Roles())
    devices.ledger.advance(state)
    times = list[float]()
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            state = step(state)
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def milliseconds(world: World, *, calls: int = 500) -> list[float]:
    """Of each of `calls` transitions that all ranks take together, on this rank."""
    with scripted_launch(world=world) as state, runtime_of(state).lockstep.watched():
        times = list[float]()
        for _ in range(calls):
            start = time.perf_counter()
            state = stay(state)
            times.append((time.perf_counter() - start) * 1e3)
    return times


def together() -> dict[str, Any]:
    """On rank 0, which waits for all of them."""
    world = open_world(1, timeout_s=60)
    times = sorted(milliseconds(world))
    torch.distributed.destroy_process_group()
    row = {"median_ms": statistics.median(times), "p95_ms": times[len(times) * 95 // 100]}
    return {"ranks": world.size, "load": round(os.getloadavg()[0], 1), **{name: round(value, 3) for name, value in row.items()}}


def main() -> None:
    """One row."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        row = together()
    else:
        row = {"transition_us": round(microseconds(stay), 2), "new_record_us": round(microseconds(bare), 2)}
    if os.environ.get("RANK", "0") == "0":
        print(row)
        append("transition", row)


if __name__ == "__main__":
    main()
