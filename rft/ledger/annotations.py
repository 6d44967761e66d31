"""A row of the table is read from the annotations of its step: those that the type checker reads."""

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rft.ledger.table import TABLE, Choice, Edge, Kind
from rft.state import AXES, Role, RuntimeState


def collect(step: Callable[..., Any], kind: Kind) -> Edge:
    """The row of a step, which is in `TABLE` from now on; `TypeError` where its annotations make none."""
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
        choices=_choices(parameters[1:], hints),
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


def _choices(parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]) -> tuple[Choice, ...]:
    """Of the parameters after the state: those that are a `Role`, or a `Literal`."""
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(
        Choice(name=p.name, place=place if p.kind in by_place else None, default=None if p.default is p.empty else p.default)
        for place, p in enumerate(parameters)
        if (hint := hints[p.name]) is Role or Role in typing.get_args(hint) or typing.get_origin(hint) is typing.Literal
    )


def _written(parameter: inspect.Parameter) -> str:
    kinds = {parameter.KEYWORD_ONLY: "{}=…", parameter.VAR_POSITIONAL: "*{}", parameter.VAR_KEYWORD: "**{}"}
    return kinds.get(parameter.kind, "{}").format(parameter.name)
