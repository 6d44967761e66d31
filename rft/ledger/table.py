"""The table of legality: one row per step, what a row means, and the ways through it."""

import collections
import dataclasses as dc
import typing
from collections.abc import Container, Mapping
from typing import Any, Literal

from rft.state import RuntimeState, spelled

Kind = Literal["beginning", "transition", "recovery", "restoration", "observation"]
Joint = tuple[type, type, type, type]
"""The four axes of a state, as types."""
AnyState = RuntimeState[Any, Any, Any, Any]


@dc.dataclass(frozen=True, kw_only=True)
class Choice:
    """A parameter that makes two calls of a step different ones, a role or one of a few words: all ranks give it alike."""

    name: str
    place: int | None
    """Among the arguments after the state; None: it is given by name."""
    default: object
    """None where the call must give it."""

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """What a call chose: ` of role REFERENCE`; nothing where it left the choice open."""
        given = args[self.place] if self.place is not None and self.place < len(args) else kwargs.get(self.name, self.default)
        return "" if given is None else f" of {self.name} {spelled(given)}"


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
    choices: tuple[Choice, ...]
    """Parameters that tell its calls apart."""

    def allows(self, joint: Joint) -> bool:
        """Whether a state of these axes may take the step."""
        return all(axis in allowed for axis, allowed in zip(joint, self.before, strict=True))

    def apply(self, joint: Joint) -> Joint:
        """The axes after the step."""
        axes = (then or axis for axis, then in zip(joint, self.after, strict=True))
        return typing.cast(Joint, tuple(axes))

    def chosen(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """What tells this call from others of the same step: ` of role REFERENCE`, or nothing."""
        return "".join([choice.of(args, kwargs) for choice in self.choices]) if self.choices else ""


TABLE: dict[tuple[str, str], Edge] = {}
"""Every step that has been defined, yours too, by module and name."""


def joint_of(state: AnyState) -> Joint:
    """The axes of a state, as types."""
    return type(state.engine), type(state.weights), type(state.actor), type(state.old)


def describe(state: AnyState) -> str:
    """`RuntimeState[Awake, Fresh, OnDevice, NoOld] (version 3, generation 17)`."""
    axes = ", ".join(axis.__name__ for axis in joint_of(state))
    return f"RuntimeState[{axes}] (version {state.version}, generation {state.generation})"


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
