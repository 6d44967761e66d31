"""Statistics of groups of rows: each row is given that of its own group, taken over the group's valid rows.

A group is the rows with the same number in `groups`, wherever they stand. All rows of a group must be here, those of other ranks too.
Sums are taken in float64, where those of fp32 numbers are exact but for extreme ranges: so neither the order of rows nor ranks show in
what is rounded to fp32 afterwards, and the mean of equal fp32 numbers is exactly that number.
NaN or infinity among valid values raises `BadInput`.
"""

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from rft.errors import BadInput
from rft.ops.parameters import require_finite
from rft.shapes import checked


@checked
def count(groups: Int64[Tensor, "batch"], valid: Bool[Tensor, "batch"] | None = None) -> Float64[Tensor, "batch"]:
    """How many valid rows the group of a row has.

        n_i = Σ_{j ∈ group(i)} 1

    Rows that are not `valid` do not count, but are told the count of their group, which may be 0.
    """
    return total(torch.ones_like(groups, dtype=torch.float32), groups, valid)


@checked
def total(
    values: Float[Tensor, "batch"], groups: Int64[Tensor, "batch"], valid: Bool[Tensor, "batch"] | None = None
) -> Float64[Tensor, "batch"]:
    """The sum of the values of a row's group.

        S_i = Σ_{j ∈ group(i)} x_j

    Values of rows that are not `valid` may be anything. 0 for a group without valid rows.
    """
    return _total(_values(values, valid), groups)


@checked
def others(
    values: Float[Tensor, "batch"], groups: Int64[Tensor, "batch"], valid: Bool[Tensor, "batch"] | None = None
) -> Float64[Tensor, "batch"]:
    """The sum of the values of the other rows of a row's group.

        O_i = Σ_{j ∈ group(i), j ≠ i} x_j

    0 for a row that is alone. A row that is not `valid` is told the sum of all valid ones.
    """
    return total(values, groups, valid) - _values(values, valid)


@checked
def mean(
    values: Float[Tensor, "batch"], groups: Int64[Tensor, "batch"], valid: Bool[Tensor, "batch"] | None = None
) -> Float64[Tensor, "batch"]:
    """The mean of the values of a row's group.

        μ_i = S_i / n_i

    0 for a group without valid rows.
    """
    return total(values, groups, valid) / count(groups, valid).clamp(min=1)


@checked
def deviation(
    values: Float[Tensor, "batch"], groups: Int64[Tensor, "batch"], valid: Bool[Tensor, "batch"] | None = None, *, ddof: int
) -> Float64[Tensor, "batch"]:
    """The standard deviation of the values of a row's group.

        σ_i = √(Σ_{j ∈ group(i)} (x_j − μ_i)² / (n_i − ddof))

    `ddof` 0 is the deviation of the population, 1 that of a sample. Where n_i − ddof is 0 or less, and where all values are equal, it
    is exactly 0. Raises `BadInput` for another `ddof`.
    """
    if ddof not in (0, 1):
        raise BadInput(f"deviation: ddof is 0 (population) or 1 (sample), got {ddof}")
    centred = _values(values, valid) - mean(values, groups, valid)
    squares = centred.square() if valid is None else torch.where(valid, centred.square(), 0.0)
    return (_total(squares, groups) / (count(groups, valid) - ddof).clamp(min=1)).sqrt()


@checked
def all_equal(
    values: Float[Tensor, "batch"], groups: Int64[Tensor, "batch"], valid: Bool[Tensor, "batch"] | None = None
) -> Bool[Tensor, "batch"]:
    """Whether all values of a row's group are the same, so that the group teaches nothing.

        max_{j ∈ group(i)} x_j = min_{j ∈ group(i)} x_j

    True for a group of one, and for one without valid rows.

    Known as: verl `algorithm.filter_groups` (leaves these groups out); LightRFT `--dynamic_sampling` (masks them).
    """
    names, member = groups.unique(return_inverse=True)
    x = _values(values, valid)
    low, high = (x, x) if valid is None else (torch.where(valid, x, torch.inf), torch.where(valid, x, -torch.inf))
    lowest = x.new_full((len(names),), torch.inf).scatter_reduce(0, member, low, "amin")
    highest = x.new_full((len(names),), -torch.inf).scatter_reduce(0, member, high, "amax")
    return (highest <= lowest)[member]


@checked
def rank(
    values: Float[Tensor, "batch"], groups: Int64[Tensor, "batch"], valid: Bool[Tensor, "batch"] | None = None
) -> Int64[Tensor, "batch"]:
    """The place of a row among the valid rows of its group by ascending value, counted from 0.

        p_i = #{j ∈ group(i) : x_j before x_i}

    Equal values keep the order of their rows. Rows that are not `valid` come after all valid ones of their group.
    """
    x = _values(values, valid)
    order = (x if valid is None else torch.where(valid, x, torch.inf)).argsort(stable=True)
    order = order[groups[order].argsort(stable=True)]
    _, member, sizes = groups.unique(return_inverse=True, return_counts=True)
    places = torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=order.device))
    return places - (sizes.cumsum(0) - sizes)[member]


def _values(values: Tensor, valid: Tensor | None) -> Tensor:
    read = values if valid is None else torch.where(valid, values, 0.0)
    require_finite("values by group", read)
    return read.double()


def _total(values: Tensor, groups: Tensor) -> Tensor:
    names, member = groups.unique(return_inverse=True)
    return values.new_zeros(len(names)).index_add(0, member, values)[member]
