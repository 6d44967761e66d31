"""What may be called when: the living state, the decorators, and the table that is read from the steps' annotations.

Everything about legality stands in three places: the records and their invariants in `state.py`, the living state and the
decorators here, the steps in `steps`. Nothing else decides what may be called when. Here:

    table        one row per step, and the ways through the table
    annotations  a step's annotations become its row
    living       the one mutable cell: which state lives, what is poisoned
    admission    whether a step may be taken, and what to write instead

A decorator reads the annotations that the type checker reads, and holds them at run time, in this order:

1. the argument is a `RuntimeState`, and is the one living object        else `IllegalStep`, `ConsumedState`
   (for `restore`: it is one that ever lived)
2. nothing is poisoned, closed, or under way                             else `RuntimePoisoned`, `EnginePoisoned`, …
3. the backends can take the step at all                                 else `IllegalStep`, with their reason
4. the axes are what the step's annotation says                          else `IllegalStep`, with the line to write instead
5. every rank is at this same step, of the same role                     else `RanksDiverged`

Only then is the step's body run. What the body does before its first irreversible write may fail freely: the state lives on. From
there on, effects run inside `Ledger.irreversible`, which poisons the engine or the whole runtime.
"""

import contextlib
import functools
import typing
from collections.abc import Callable, Generator, Mapping
from typing import Any, ParamSpec, TypeVar

from rft.errors import BrokenInvariant
from rft.ledger.admission import admit, legal
from rft.ledger.annotations import collect
from rft.ledger.living import Faulty, Ledger
from rft.ledger.table import TABLE, AnyState, Edge, Joint, Kind, describe, joint_of
from rft.state import RuntimeState

__all__ = [
    "TABLE",
    "AnyState",
    "Edge",
    "Faulty",
    "Joint",
    "Kind",
    "Ledger",
    "beginning",
    "describe",
    "joint_of",
    "legal",
    "observation",
    "recovery",
    "restoration",
    "transition",
]

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
S = TypeVar("S", bound=AnyState)


def transition(step: F) -> F:
    """Makes a step of `(state: RuntimeState[…], …) -> RuntimeState[…]`, or of one that returns such a state and something more.

    The state that it is given is used up, and the one that it returns (made by `then`) lives.
    """
    return _consuming(step, "transition")


def recovery(step: F) -> F:
    """Like `transition`, but also admitted while the engine is poisoned; the poison is gone when it returns.

    It may then be given the last state that is still held, where the living one was dropped by the failure: see `Ledger`.
    """
    return _consuming(step, "recovery")


def restoration(step: F) -> F:
    """Like `transition`, but also admitted while anything is poisoned, and in any state that ever lived: it makes everything anew.

    The poison is gone when it returns. The state that it returns is newer than all before it.
    """
    return _consuming(step, "restoration")


def observation(step: F) -> F:
    """Makes a step of `(state: RuntimeState[…], …) -> value`: the same checks, and the state lives on."""
    edge = collect(step, "observation")

    @functools.wraps(step)
    def run(state: AnyState, /, *args: Any, **kwargs: Any) -> Any:
        with _taken(edge, state, args, kwargs):
            return step(state, *args, **kwargs)

    return typing.cast(F, run)


def beginning(step: Callable[P, Generator[S]]) -> Callable[P, contextlib.AbstractContextManager[S]]:
    """Makes the context manager that yields the first state of a generator function, and empties the ledger when it is left."""
    inner = contextlib.contextmanager(step)
    _ = collect(step, "beginning")

    @contextlib.contextmanager
    @functools.wraps(step)
    def run(*args: P.args, **kwargs: P.kwargs) -> Generator[S]:
        with inner(*args, **kwargs) as state:
            ledger = state.devices.ledger
            ledger.advance(state)
            try:
                yield state
            finally:
                ledger.close()

    return run


def _consuming(step: F, kind: Kind) -> F:
    edge = collect(step, kind)

    @functools.wraps(step)
    def run(state: AnyState, /, *args: Any, **kwargs: Any) -> Any:
        if kind == "recovery" and type(state) is RuntimeState:
            state = state.devices.ledger.last_held(state)
        with _taken(edge, state, args, kwargs):
            result = step(state, *args, **kwargs)
        follower = result[0] if type(result) is tuple else result
        _check_follower(edge, state, follower)
        ledger = state.devices.ledger
        if kind in ("recovery", "restoration"):
            ledger.heal()
        ledger.advance(follower)
        return result

    return typing.cast(F, run)


@contextlib.contextmanager
def _taken(edge: Edge, state: AnyState, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Generator[None]:
    devices = admit(edge, state, edge.chosen(args, kwargs))
    devices.ledger.begin(edge.name)
    try:
        yield
    finally:
        devices.ledger.end()
        devices.leave(edge.name)


def _check_follower(edge: Edge, state: AnyState, follower: AnyState) -> None:
    """Raises `BrokenInvariant` where a step, maybe one of yours, returns what it must not."""
    if type(follower) is not RuntimeState:
        what = type(follower).__name__
        raise BrokenInvariant(f"{edge.name} returned a {what}: return a state made by `then`, or a tuple that starts with one")
    newest = state.devices.ledger.generation
    newer = follower.generation > newest if edge.kind == "restoration" else follower.generation == newest + 1
    if follower.devices is not state.devices or not newer:
        raise BrokenInvariant(f"{edge.name} returned {describe(follower)} for {describe(state)}: make it from that state, by one `then`")
    if joint_of(follower) != edge.apply(joint_of(state)):
        raise BrokenInvariant(f"{edge.name} returned {describe(follower)} for {describe(state)}, against its annotation")
