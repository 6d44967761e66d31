"""Which state object lives, and what is poisoned."""

import contextlib
import weakref
from collections.abc import Generator
from typing import Literal

from rft.errors import ConsumedState, EngineFailed, EnginePoisoned, IllegalStep, RanksDiverged, RuntimeClosed, RuntimePoisoned
from rft.ledger.table import AnyState, Edge, describe, joint_of

Faulty = Literal["engine", "runtime"]
_NEVER_LIVED = "a copy, a pickle, a `replace`, a mapped tree or a state built by hand never lives"
_LOST = RanksDiverged.__name__
_NEW_JOB = "the ranks have lost each other: leave `launch`, start the job anew, and go on from the last checkpoint"
_ANEW = "write: state, run = restore(state, folder, run), from the last checkpoint; or leave `launch` and start anew"


class Ledger:
    """The one mutable cell: which state object lives, and what is poisoned. Owned by the devices.

    The living state is held, and those before it are only known: a composition such as `wake(broadcast(state))` that fails in its
    second step drops what the first returned, and its caller is left with an older one. Until `launch` is left, devices, ledger and
    state refer to each other in a circle, which `close` opens.
    """

    def __init__(self) -> None:
        self._living: AnyState | None = None
        self._lived = weakref.WeakSet[AnyState]()
        self._fault: tuple[Faulty, str] | None = None
        self._closed = False
        self._under_way: str | None = None
        self.generation = -1
        """Of the newest state there has been."""

    def living(self) -> AnyState | None:
        """The living state; None before the first one, and once `launch` has been left."""
        return self._living

    def advance(self, state: AnyState) -> None:
        """From now on `state`, this very object, is the living one."""
        self._living = state
        self._lived.add(state)
        self.generation = state.generation

    def close(self) -> None:
        """Leaves no living state behind."""
        self._living, self._closed = None, True

    def fault(self) -> Faulty | None:
        """What is poisoned."""
        return None if self._fault is None else self._fault[0]

    def lived(self, state: AnyState) -> bool:
        """Whether this very object lives, or did until a step used it up; nothing does once `launch` has been left."""
        return not self._closed and state in self._lived

    def heal(self) -> None:
        """What was poisoned has been brought to rest, or been made anew."""
        self._fault = None

    def last_held(self, state: AnyState) -> AnyState:
        """The living state, while the engine is poisoned, for one that led to it and has the same Actor and old axes; else `state`."""
        living = self._living if self.fault() == "engine" else None
        return state if living is None or state not in self._lived or joint_of(state)[2:] != joint_of(living)[2:] else living

    def newest(self, state: AnyState) -> AnyState:
        """The living state, for any that ever lived here. Raises `ConsumedState` for another one, `RuntimeClosed`."""
        if self._closed:
            raise RuntimeClosed("living(state): `launch` was left, and its devices have been given back; launch anew")
        if self._living is None or state not in self._lived:
            raise ConsumedState(f"living(state): this object is {describe(state)}, and {_NEVER_LIVED}")
        return self._living

    def admit(self, edge: Edge, state: AnyState) -> None:
        """Raises unless `state` lives and nothing stands in the way of a step; see the module's head."""
        if self._closed:
            raise RuntimeClosed(f"{edge.name}(state): `launch` was left, and its devices have been given back; launch anew")
        restoring = edge.kind == "restoration"
        if not (self.lived(state) if restoring else self.living() is state):
            raise ConsumedState(self._consumed(edge, state))
        if self._under_way is not None:
            raise IllegalStep(f"{edge.name}(state) was called inside {self._under_way}, which has not returned; call it before or after")
        if self._fault is not None and not restoring:
            self._refuse_poisoned(edge, *self._fault)

    def begin(self, step: str) -> None:
        """Until `end`, no other step is admitted: steps are taken one at a time, and compositions of them are plain functions."""
        self._under_way = step

    def end(self) -> None:
        """The step that was begun is over, however it ended."""
        self._under_way = None

    @contextlib.contextmanager
    def irreversible(self, part: Faulty, *, but: tuple[type[Exception], ...] = ()) -> Generator[None]:
        """Marks what cannot be taken back: an error inside poisons the engine alone, or the whole runtime.

        Errors leave it as `EngineFailed` or `RuntimePoisoned`, with the original as their cause; an interruption passes unchanged.
        Those of `but` promise that nothing was written: they pass, and poison nothing.
        """
        try:
            yield
        except but:
            raise
        except RanksDiverged as error:  # no engine's failure, and nothing that takes all ranks leads on from it
            self._fault = ("runtime", f"{_LOST}: {error}")
            raise
        except BaseException as error:
            self._fault = (part, f"{type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise
            if part == "engine":
                kind = type(error) if isinstance(error, EngineFailed) else EngineFailed
                raise kind(f"the engine failed half-way: {error}\n  write: state = recover(state), then broadcast") from error
            raise RuntimePoisoned(f"a step failed half-way: {error!r}\n  {_ANEW}") from error

    def _refuse_poisoned(self, edge: Edge, part: Faulty, cause: str) -> None:
        if part == "runtime":
            advice = _NEW_JOB if cause.startswith(_LOST) else _ANEW
            raise RuntimePoisoned(f"{edge.name}(state): an earlier step failed half-way ({cause})\n  {advice}")
        if edge.kind != "recovery":
            raise EnginePoisoned(
                f"{edge.name}(state): the engine failed earlier ({cause})\n  write instead: state = recover(state)\n"
                "  legal now: recover, restore"
            )

    def _consumed(self, edge: Edge, state: AnyState) -> str:
        now = "none has lived yet" if self._living is None else f"the living one is {describe(self._living)}"
        return (
            f"{edge.name}(state): this object is {describe(state)}, but {now}.\n"
            f"  A state is used up by the step that it is given to; and {_NEVER_LIVED}.\n"
            "  write instead: state = step(state), and always pass the newest; where a failure left you without it: living(state)"
        )
