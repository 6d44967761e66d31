"""What one transition costs by itself: checks, ledger and the new record; no effect, no comparison of ranks, no memory sum.

    python -m tests.benchmarks.transition

It times a step without an effect beside the same function without the decorator, and appends both to results/transition.jsonl.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import rft
from rft.ledger import Ledger
from rft.state import A, Devices, E, O, Roles, RuntimeState, W, first_state
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


if __name__ == "__main__":
    row = {"transition_us": round(microseconds(stay), 2), "new_record_us": round(microseconds(bare), 2)}
    print(row)
    append("transition", row)
