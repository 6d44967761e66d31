"""Rows without their padding: one behind the other in a single run of tokens, and back.

`token` counts the marked entries of a `[batch, seq]` mask, row by row.
"""

import dataclasses as dc

import torch
from jaxtyping import Bool, Int32, Int64, Shaped
from torch import Tensor

from rft import tree
from rft.shapes import check_record, checked


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """How a run of tokens falls into rows."""

    rows: Int64[Tensor, "token"]
    """The row of each token."""
    positions: Int64[Tensor, "token"]
    """Its place in that row, from 0."""
    bounds: Int32[Tensor, "bound"]
    """Where the rows begin, and where the last one ends: cumulative lengths, from 0. A row without tokens ends where it begins."""
    longest: int
    """Tokens of the longest row."""

    def __post_init__(self) -> None:
        check_record(self)


@checked
def segments(mask: Bool[Tensor, "batch seq"]) -> Segments:
    """How the marked entries of `[batch, seq]` fall into rows when they lie one behind the other.

        positions = (Σ_{s ≤ t} mask_is) − 1,   bounds_i = Σ_{j < i} Σ_t mask_jt

    Rows may be empty or have holes; where a hole was is not remembered here, but by the mask.
    """
    lengths = mask.sum(dim=1)
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Segments(
        rows=mask.nonzero()[:, 0],
        positions=(mask.cumsum(1) - 1)[mask],
        bounds=bounds.int(),
        longest=int(lengths.max()) if len(lengths) else 0,
    )


@checked
def pack(values: Shaped[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"]) -> Shaped[Tensor, "token"]:
    """The marked entries of `[batch, seq]`, row by row. What is not marked is never read."""
    return values[mask]


@checked
def unpack(values: Shaped[Tensor, "token"], mask: Bool[Tensor, "batch seq"]) -> Shaped[Tensor, "batch seq"]:
    """The inverse of `pack`: as many values as `mask` marks, back in their places, and 0 elsewhere. Differentiable."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


@checked
def side_by_side(values: Shaped[Tensor, "token *rest"], where: Segments) -> Shaped[Tensor, "batch longest *rest"]:
    """Each row of a run of tokens on its own, padded with 0 on the right to the longest. Differentiable."""
    empty = values.new_zeros((len(where.bounds) - 1) * where.longest, *values.shape[1:])
    return empty.index_copy(0, _places(where), values).unflatten(0, (-1, where.longest))


@checked
def one_behind_the_other(values: Shaped[Tensor, "batch longest *rest"], where: Segments) -> Shaped[Tensor, "token *rest"]:
    """The inverse of `side_by_side`. Padding is dropped, and has no gradient."""
    return values.flatten(0, 1).index_select(0, _places(where))


def _places(where: Segments) -> Int64[Tensor, "token"]:
    return where.rows * where.longest + where.positions
