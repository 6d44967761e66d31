"""The living state, the decorators, and the table that is read from the steps' annotations.

Everything about legality stands in three modules: the records and their invariants in `state.py`, the living state and the
decorators here, the steps in `steps`. Nothing else decides what may be called when.

A decorator reads the annotations that the type checker reads, and holds them at run time, in this order:

1. the argument is a `RuntimeState`, and is the one living object        else `IllegalStep`, `ConsumedState`
   (for `restore`: it is one that ever lived)
2. nothing is poisoned, closed, or under way                             else `RuntimePoisoned`, `EnginePoisoned`, …
3. the backends can take the step at all                                 else `IllegalStep`, with their reason
4. the axes are what the step's annotation says                          else `IllegalStep`, with the line to write instead
5. every rank is at this same step                                       else `RanksDiverged`

Only then is the step's body run. What the body does before its first irreversible write may fail freely: the state lives on. From
there on, effects run inside `Ledger.irreversible`, which poisons the engine or the whole runtime.
"""

import collections
import contextlib
import dataclasses as dc
import functools
import inspect
import re
import types
import typing
import weakref
from collections.abc import Callable, Container, Generator
from typing import Any, Literal, ParamSpec, TypeVar

from rft.errors import BrokenInvariant, ConsumedState, EngineFailed, EnginePoisoned, IllegalStep, RuntimeClosed, RuntimePoisoned
from rft.state import AXES, Devices, RuntimeState

Kind = Literal["beginning", "transition", "recovery", "restoration", "observation"]
Faulty = Literal["engine", "runtime"]
Joint = tuple[type, type, type, type]
"""The four axes of a state, as types."""
AnyState = RuntimeState[Any, Any, Any, Any]
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
S = TypeVar("S", bound=AnyState)


_ANEW = "write: state, run = restore(state, folder, run), from the last checkpoint; or leave `launch` and start anew"


class Ledger:
    """The one mutable cell: which state object lives, weakly, and what is poisoned. Owned by the devices.

    While the engine is poisoned the living state is held strongly: a composition such as `wake(broadcast(state))` that fails in its
    second step drops what the first returned, and only an older state is left to be given to `recover`.
    """

    def __init__(self) -> None:
        self._living: weakref.ref[AnyState] | None = None
        self._lived = weakref.WeakSet[AnyState]()
        self._held: AnyState | None = None
        self._fault: tuple[Faulty, str] | None = None
        self._closed = False
        self._under_way: str | None = None
        self.generation = -1
        """Of the newest state there has been, whether anybody still holds it or not."""

    def living(self) -> AnyState | None:
        """The living state, if anybody still holds it."""
        return None if self._living is None else self._living()

    def advance(self, state: AnyState) -> None:
        """From now on `state`, this very object, is the living one."""
        self._living = weakref.ref(state)
        self._lived.add(state)
        self.generation = state.generation

    def close(self) -> None:
        """Leaves no living state behind."""
        self._living, self._held, self._closed = None, None, True

    def fault(self) -> Faulty | None:
        """What is poisoned."""
        return None if self._fault is None else self._fault[0]

    def lived(self, state: AnyState) -> bool:
        """Whether this very object lives, or did until a step used it up; nothing does once `launch` has been left."""
        return not self._closed and state in self._lived

    def heal(self) -> None:
        """What was poisoned has been brought to rest, or been made anew."""
        self._fault = self._held = None

    def last_held(self, state: AnyState) -> AnyState:
        """The living state, while the engine is poisoned, for one that led to it and has the same Actor and old axes; else `state`."""
        living = self._held
        return state if living is None or state not in self._lived or joint_of(state)[2:] != joint_of(living)[2:] else living

    def admit(self, edge: "Edge", state: AnyState) -> None:
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
        except BaseException as error:
            self._fault = (part, f"{type(error).__name__}: {error}")
            self._held = self.living() if part == "engine" else None
            if not isinstance(error, Exception):
                raise
            if part == "engine":
                kind = type(error) if isinstance(error, EngineFailed) else EngineFailed
                raise kind(f"the engine failed half-way: {error}\n  write: state = recover(state), then broadcast") from error
            raise RuntimePoisoned(f"a step failed half-way: {error!r}\n  {_ANEW}") from error

    def _refuse_poisoned(self, edge: "Edge", part: Faulty, cause: str) -> None:
        if part == "runtime":
            raise RuntimePoisoned(f"{edge.name}(state): an earlier step failed half-way ({cause})\n  {_ANEW}")
        if edge.kind != "recovery":
            raise EnginePoisoned(
                f"{edge.name}(state): the engine failed earlier ({cause})\n  write instead: state = recover(state)\n"
                "  legal now: recover, restore"
            )

    def _consumed(self, edge: "Edge", state: AnyState) -> str:
        living = self.living()
        now = "nobody holds the living state any more" if living is None else f"the living one is {describe(living)}"
        return (
            f"{edge.name}(state): this object is {describe(state)}, but {now}.\n"
            "  A state is used up by the step that it is given to; and a copy, a pickle, a `replace`, a mapped tree or a state built "
            f"by hand never lives.\n  write instead: state = step(state), and always pass the newest"
        )


@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Edge:
    """One row of the table: where a step may be called, and what it makes of each axis."""

    name: str
    module: str
    kind: Kind
    before: tuple[frozenset[type], ...]
    """The types that each axis may have."""
    after: tuple[type | None, ...]
    """What each axis becomes; None: it stays. An observation leaves all."""
    call: str
    """How it is written."""
    more: str
    """What it returns beside the state, or instead of it."""

    def allows(self, joint: Joint) -> bool:
        """Whether a state of these axes may take the step."""
        return all(axis in allowed for axis, allowed in zip(joint, self.before, strict=True))

    def apply(self, joint: Joint) -> Joint:
        """The axes after the step."""
        axes = (then or axis for axis, then in zip(joint, self.after, strict=True))
        return typing.cast(Joint, tuple(axes))

    def admit(self, state: AnyState) -> Devices:
        """Everything that must hold before the body runs; the module's head has the order."""
        if type(state) is not RuntimeState:
            raise IllegalStep(f"{self.name}(state) needs a RuntimeState, got {type(state).__name__}")
        devices, (engine, weights, actor, old) = state.devices, self.before
        devices.ledger.admit(self, state)
        if self.name in devices.cannot:
            raise IllegalStep(f"{self.name}(state): {devices.cannot[self.name]}\n{_legal_now(state)}")
        if not (type(state.engine) in engine and type(state.weights) in weights and type(state.actor) in actor and type(state.old) in old):
            raise IllegalStep(_refusal(self, state))
        devices.enter(self.name, devices.ledger.generation)
        return devices


TABLE: dict[tuple[str, str], Edge] = {}
"""Every step that has been defined, yours too, by module and name."""


# ---- decorators ----


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
    edge = _collect(step, "observation")

    @functools.wraps(step)
    def run(state: AnyState, /, *args: Any, **kwargs: Any) -> Any:
        with _taken(edge, state):
            return step(state, *args, **kwargs)

    return typing.cast(F, run)


def beginning(step: Callable[P, Generator[S]]) -> Callable[P, contextlib.AbstractContextManager[S]]:
    """Makes the context manager that yields the first state of a generator function, and empties the ledger when it is left."""
    inner = contextlib.contextmanager(step)
    _ = _collect(step, "beginning")

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
    edge = _collect(step, kind)

    @functools.wraps(step)
    def run(state: AnyState, /, *args: Any, **kwargs: Any) -> Any:
        if kind == "recovery" and type(state) is RuntimeState:
            state = state.devices.ledger.last_held(state)
        with _taken(edge, state):
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
def _taken(edge: Edge, state: AnyState) -> Generator[None]:
    devices = edge.admit(state)
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


# ---- the table ----


def joint_of(state: AnyState) -> Joint:
    """The axes of a state, as types."""
    return type(state.engine), type(state.weights), type(state.actor), type(state.old)


def describe(state: AnyState) -> str:
    """`RuntimeState[Awake, Fresh, OnDevice, NoOld] (version 3, generation 17)`."""
    axes = ", ".join(axis.__name__ for axis in joint_of(state))
    return f"RuntimeState[{axes}] (version {state.version}, generation {state.generation})"


def legal(state: AnyState) -> tuple[str, ...]:
    """Names of the steps that `state` may take next: `restore` alone for one that is used up, or where the runtime is poisoned.

    With a poisoned engine `recover` leads on, too; for a copy, or after `launch`, nothing does. It reads the axes, and what this
    runtime's backends can do; roles, batches and memory are checked by the steps themselves.
    """
    ledger = state.devices.ledger
    if not ledger.lived(state):
        return ()
    kinds: tuple[Kind, ...] = ("transition", "recovery", "restoration", "observation")
    if ledger.living() is not state or ledger.fault() == "runtime":
        kinds = ("restoration",)
    elif ledger.fault() == "engine":
        kinds = ("recovery", "restoration")
    joint, cannot = joint_of(state), state.devices.cannot
    return tuple(e.name for e in TABLE.values() if e.kind in kinds and e.allows(joint) and e.name not in cannot)


def route(start: Joint, edge: Edge, *, without: Container[str] = ()) -> list[Edge] | None:
    """The fewest transitions that lead from `start` to where `edge` may be taken, none of them named in `without`; None if nothing does."""
    queue, came = collections.deque([start]), dict[Joint, tuple[Joint, Edge] | None]({start: None})
    while queue:
        here = queue.popleft()
        if edge.allows(here):
            return _walked(here, came)
        for step in (e for e in TABLE.values() if e.kind == "transition" and e.name not in without and e.allows(here)):
            there = step.apply(here)
            if there not in came:
                came[there] = (here, step)
                queue.append(there)
    return None


def _walked(end: Joint, came: dict[Joint, tuple[Joint, Edge] | None]) -> list[Edge]:
    steps = list[Edge]()
    while (last := came[end]) is not None:
        end, step = last
        steps.append(step)
    return steps[::-1]


def _refusal(edge: Edge, state: AnyState) -> str:
    joint = joint_of(state)
    wrong = [i for i, axis in enumerate(joint) if axis not in edge.before[i]]
    lines = [f"{edge.name}(state): the state is {describe(state)}", f"  it needs {needs(edge)}"]
    lines += [f"  {AXES[i][0]} is {joint[i].__name__}, and must be {names(edge.before[i])}" for i in wrong]
    if all(edge.after[i] is joint[i] for i in wrong):
        lines.append(f"  leave it out: {edge.name} gives {' and '.join(joint[i].__name__ for i in wrong)}, and that is so already; or")
    way = route(joint, edge, without=state.devices.cannot)
    if way is not None:
        lines += ["  write instead:", *(f"    {written(step)}" for step in [*way, edge])]
    return "\n".join([*lines, _legal_now(state)])


def _legal_now(state: AnyState) -> str:
    return f"  legal now: {', '.join(legal(state)) or 'nothing'}"


def needs(edge: Edge) -> str:
    """`[Asleep, Fresh, any, any]`."""
    return "[" + ", ".join(names(allowed) for allowed in edge.before) + "]"


def names(allowed: frozenset[type]) -> str:
    """The name of the one type that is allowed, or `any`."""
    return "any" if len(allowed) > 1 else next(iter(allowed)).__name__


def written(edge: Edge) -> str:
    """A step as a line of a loop: `state, metrics = train_step(state, minibatch, objective)`."""
    given = [*([] if edge.kind == "observation" else ["state"]), *edge.more.split()]
    return f"{', '.join(given)} = {edge.call}" if given else edge.call


# ---- reading annotations ----


def _collect(step: Callable[..., Any], kind: Kind) -> Edge:
    hints = typing.get_type_hints(step)
    result = hints.pop("return", None)
    parameters = list(inspect.signature(step).parameters.values())
    before, after = _any_axes(), _any_axes()
    if kind == "beginning":
        after = _axes(typing.get_args(result)[0])
    else:
        before = _axes(hints[parameters[0].name])
    if kind in ("transition", "recovery", "restoration"):
        after = _axes(typing.get_args(result)[0] if typing.get_origin(result) is tuple else result)
    edge = Edge(
        name=step.__name__,
        module=step.__module__,
        kind=kind,
        before=tuple(allowed for allowed, _ in before),
        after=(None,) * len(AXES) if kind == "observation" else tuple(map(_becomes, before, after)),
        call=f"{step.__name__}({', '.join(_written(p) for p in parameters if p.default is p.empty)})",
        more=_more(kind, result),
    )
    TABLE[edge.module, edge.name] = edge
    return edge


def _axes(hint: Any) -> list[tuple[frozenset[type], object]]:
    """Per axis of an annotation: the types it allows, and the TypeVar that names it, if one does."""
    if hint is not RuntimeState and typing.get_origin(hint) is not RuntimeState:
        raise TypeError(f"a step takes a RuntimeState first, and a transition returns one first; got {hint}")
    given = typing.get_args(hint)
    given += (Any,) * (len(AXES) - len(given))
    return [_axis(argument, both) for argument, both in zip(given, _any_axes(), strict=True)]


def _any_axes() -> list[tuple[frozenset[type], object]]:
    return [(frozenset(both), None) for _, both in AXES]


def _axis(argument: Any, both: tuple[frozenset[type], object]) -> tuple[frozenset[type], object]:
    if isinstance(argument, TypeVar):
        return both[0], argument
    return both if argument is Any or isinstance(argument, types.UnionType) else (frozenset([argument]), None)


def _becomes(before: tuple[frozenset[type], object], after: tuple[frozenset[type], object]) -> type | None:
    if len(after[0]) == 1:
        return next(iter(after[0]))
    if after[1] is None or after[1] is not before[1]:
        raise TypeError("a transition must say of each axis what it becomes: a type, or the TypeVar of the state that it takes")
    return None


def _more(kind: Kind, result: Any) -> str:
    if kind == "observation":
        if result is types.NoneType:
            return ""
        name = result.__name__ if inspect.isclass(result) and re.fullmatch("[A-Z][A-Za-z]*", result.__name__) else "value"
        return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    if typing.get_origin(result) is not tuple:
        return ""
    second = typing.get_args(result)[1]
    return second.__name__.lower() if isinstance(second, TypeVar) else "metrics"


def _written(parameter: inspect.Parameter) -> str:
    kinds = {parameter.KEYWORD_ONLY: "{}=…", parameter.VAR_POSITIONAL: "*{}", parameter.VAR_KEYWORD: "**{}"}
    return kinds.get(parameter.kind, "{}").format(parameter.name)
