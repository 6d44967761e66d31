"""What is computed over the rows of all ranks: means for metrics, and functions of whole batches."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from rft import tree
from rft.effects.runtime import runtime_of
from rft.errors import BadInput, ShapeError
from rft.state import RuntimeState

T = TypeVar("T")


def average(state: RuntimeState[Any, Any, Any, Any], values: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """Mean of each column over the entries of all ranks; NaN for a column that is empty everywhere."""
    with runtime_of(state).lockstep.agreement() as exchange:
        exchange.own = own = _sums(values)
    everywhere: list[dict[str, tuple[float, int]]] = exchange.everywhere
    for rank, part in enumerate(everywhere):
        if part.keys() != own.keys():
            both = f"{', '.join(map(repr, own)) or 'none'}, and rank {rank} {', '.join(map(repr, part)) or 'none'}"
            raise BadInput(f"average(state, values): this rank brings the columns {both}; bring the same ones, [] where there is nothing")
    sums = {name: (_sum(name, [part[name][0] for part in everywhere]), sum(part[name][1] for part in everywhere)) for name in own}
    return {name: total / count if count else math.nan for name, (total, count) in sums.items()}


def _sums(values: object) -> dict[str, tuple[float, int]]:
    """Of each column its sum and its number of entries. Raises `BadInput` for what is no mapping of columns of numbers."""
    if not isinstance(values, Mapping):
        raise BadInput(f"average(state, values): values must map names to columns of numbers, got {type(values).__name__}")
    try:
        columns = {name: [float(entry) for entry in column] for name, column in cast(Mapping[str, Any], values).items()}
    except (TypeError, ValueError) as error:
        raise BadInput(f"average(state, values): a column must be numbers, such as rewards.values.tolist(): {error}") from error
    return {name: (_sum(name, column), len(column)) for name, column in columns.items()}


def _sum(name: str, entries: Sequence[float]) -> float:
    """Raises `BadInput` for infinities of both signs, and for numbers that are too large to be added up: they have no mean."""
    try:
        return math.fsum(entries)
    except (ValueError, OverflowError) as error:
        raise BadInput(
            f"average(state, values): the column {name!r} has no mean ({error}); leave out entries that are not finite"
        ) from error


def all_rows(state: RuntimeState[Any, Any, Any, Any], rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The rows of all ranks, in rank order; wider ones padded."""
    return _gathered("all_rows(state, *rows)", state, rows)[0]


def over_ranks(state: RuntimeState[Any, Any, Any, Any], function: Callable[..., T], rows: tuple[Tensor, ...]) -> T:
    """`function` of the rows of all ranks; of its result this rank's rows, at this rank's width."""
    call = "over_ranks(state, function, *rows)"
    with runtime_of(state).lockstep.agreement():
        if not callable(function):
            raise BadInput(f"{call}: function must be one of tensors, such as advantages.grpo, got {type(function).__name__}")
    whole, own = _gathered(call, state, rows)
    width = max((row.shape[1] for row in rows if row.dim() == 2), default=None)
    with runtime_of(state).lockstep.agreement():
        return tree.tree_map(partial(_own, rows=own, count=len(whole[0]), width=width), function(*whole))


def _gathered(call: str, state: RuntimeState[Any, Any, Any, Any], rows: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], slice]:
    """Each tensor's rows of all ranks, and which of them are this rank's."""
    runtime = runtime_of(state)
    with runtime.lockstep.agreement():
        _check(call, rows)
    parts = runtime.lockstep.gather(rows)
    if len({tuple((row.dim(), row.dtype) for row in part) for part in parts}) > 1:
        brought = "; ".join(f"rank {rank} {', '.join(f'{tuple(t.shape)} {t.dtype}' for t in part)}" for rank, part in enumerate(parts))
        raise BadInput(f"{call}: ranks bring different tensors: {brought}; bring as many of the same axes and dtypes from each")
    first = sum(len(part[0]) for part in parts[: runtime.world.rank])
    return tuple(map(_stacked, zip(*parts, strict=True))), slice(first, first + len(rows[0]))


def _check(call: str, rows: tuple[Any, ...]) -> None:
    if not rows or any(not isinstance(row, Tensor) or row.dim() not in (1, 2) for row in rows):
        raise BadInput(f"{call}: rows must be tensors [batch] or [batch, seq], at least one; got {', '.join(map(_kind, rows)) or 'none'}")
    if len({len(row) for row in rows}) > 1 or len({row.shape[1] for row in rows if row.dim() == 2}) > 1:
        raise ShapeError(f"{call}: the tensors must have the same rows and columns, got {', '.join(map(_kind, rows))}")


def _kind(row: object) -> str:
    return str(tuple(row.shape)) if isinstance(row, Tensor) else type(row).__name__


def _stacked(parts: tuple[Tensor, ...]) -> Tensor:
    if parts[0].dim() == 1:
        return torch.cat(parts)
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1])) for part in parts])


def _own(result: Tensor, *, rows: slice, count: int, width: int | None) -> Tensor:
    if not result.dim():
        raise ShapeError("over_ranks: the function gave one number for the whole batch; for such take its rows from all_rows(state, *rows)")
    if len(result) != count:
        raise ShapeError(f"over_ranks: the function was given {count} rows and gave {len(result)}; it must give a row for each")
    return result[rows] if result.dim() == 1 else result[rows, :width]
