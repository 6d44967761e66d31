"""How a number is gathered over micro-batches and ranks.

A plain scalar tensor is summed: it is a share of the whole, already divided by the step's totals. What does not add up like that is
a `Metric`, which merges with its like. Each stays on its device, unread, until `host` brings it over; then it can be pickled.
"""

import dataclasses as dc
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rft.errors import BadInput
from rft.ops.masked import marked
from rft.shapes import checked


@runtime_checkable
class Metric(Protocol):
    """What is known of a part; merged, of the whole. Frozen records of tensors."""

    def merge(self, other: Self, /) -> Self:
        """That of both parts together, in either order."""
        ...

    def value(self) -> float:
        """The number to report, never NaN."""
        ...


@dc.dataclass(frozen=True, kw_only=True)
class Maximum:
    """The largest of all values; 0 where there are none."""

    largest: Tensor

    def merge(self, other: Self, /) -> Self:
        return dc.replace(self, largest=torch.maximum(self.largest, other.largest))

    def value(self) -> float:
        largest = float(self.largest)
        return 0.0 if largest == -math.inf else largest


FINEST, GROWTH, BINS = 1e-8, 1.03, 800
"""Bins of a quantile: what is below the finest, and from there on each 3% wider than the one before, to above 1e2."""


@dc.dataclass(frozen=True, kw_only=True)
class Quantile:
    """The value that a share `at` of all values does not exceed, to within 1.5%; 0 where there are none.

    Values of at least 0 are counted in bins, since quantiles of parts do not add up to those of the whole, and counts do.
    """

    at: Tensor
    """In (0, 1]."""
    counts: Tensor
    """How many values lie in each of the `BINS`."""

    def merge(self, other: Self, /) -> Self:
        return dc.replace(self, counts=self.counts + other.counts)

    def value(self) -> float:
        below = self.counts.cumsum(0)
        wanted = float(self.at) * float(below[-1])
        found = int((below < wanted - 1e-6).sum()) if wanted else 0
        return FINEST * GROWTH ** (found - 0.5) if found else 0.0


@dc.dataclass(frozen=True, kw_only=True)
class EffectiveSampleSize:
    """Kish's effective sample size of importance weights, as a share of their number.

        (Σ w)² / (n Σ w²)

    1 where all weights are equal, 1/n where one outweighs the rest; 0 where there are none or all are 0.

    Source: Kish, Survey Sampling, 1965
    """

    total: Tensor
    squares: Tensor
    count: Tensor

    def merge(self, other: Self, /) -> Self:
        return dc.replace(self, total=self.total + other.total, squares=self.squares + other.squares, count=self.count + other.count)

    def value(self) -> float:
        norm = float(self.count) * float(self.squares)
        return float(self.total) ** 2 / norm if norm else 0.0


@dc.dataclass(frozen=True, kw_only=True)
class ExplainedVariance:
    """How much of the variance of returns R the values V account for.

        1 − Var(R − V) / Var(R)

    1 where the values differ from the returns by a constant only, 0 for values that tell nothing, below 0 for such as are worse than a
    constant; 0 where there are no returns, or all are equal.
    """

    count: Tensor
    total: Tensor
    squares: Tensor
    error: Tensor
    error_squares: Tensor

    def merge(self, other: Self, /) -> Self:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in dc.fields(self)}
        return dc.replace(self, **sums)

    def value(self) -> float:
        count = max(float(self.count), 1.0)
        variance = float(self.squares) / count - (float(self.total) / count) ** 2
        left = float(self.error_squares) / count - (float(self.error) / count) ** 2
        rounding = 1e-12 * float(self.squares) / count
        return 1 - left / variance if variance > rounding else 0.0


@checked
def maximum(values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]) -> Maximum:
    """The largest of the marked values."""
    kept = torch.where(mask, values.detach().float(), -torch.inf)
    return Maximum(largest=torch.cat([kept.flatten(), kept.new_full((1,), -torch.inf)]).max())


@checked
def quantiles(values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"], at: Sequence[float]) -> tuple[Quantile, ...]:
    """Quantiles of the marked values (at least 0), one for each share of `at`."""
    bins = (marked(values.detach(), mask).clamp(min=FINEST).div(FINEST).log() / math.log(GROWTH)).ceil().clamp(max=BINS - 1)
    counts = torch.zeros(BINS, dtype=torch.int64, device=values.device).scatter_add_(0, bins.flatten().long(), mask.flatten().long())
    return tuple(Quantile(at=torch.tensor(share), counts=counts) for share in at)


@checked
def effective_sample_size(weights: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]) -> EffectiveSampleSize:
    """The effective sample size of the marked weights (at least 0), summed in double precision."""
    kept = marked(weights.detach(), mask).double()
    return EffectiveSampleSize(total=kept.sum(), squares=kept.square().sum(), count=mask.sum())


@checked
def explained_variance(values: Float[Tensor, "*axes"], returns: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]) -> ExplainedVariance:
    """The explained variance of the marked returns, summed in double precision."""
    target = marked(returns.detach(), mask).double()
    error = target - marked(values.detach(), mask).double()
    return ExplainedVariance(
        count=mask.sum(), total=target.sum(), squares=target.square().sum(), error=error.sum(), error_squares=error.square().sum()
    )


def merged(parts: Iterable[Mapping[str, Tensor | Metric]]) -> dict[str, Tensor | Metric]:
    """The metrics of all parts together: tensors are summed, others merged; a part may lack some.

    Raises `BadInput` for a name that is of two kinds.
    """
    whole = dict[str, Any]()
    for part in parts:
        for name, value in part.items():
            whole[name] = _joined(name, whole[name], value) if name in whole else value
    return whole


def host(metrics: Mapping[str, Tensor | Metric]) -> dict[str, Tensor | Metric]:
    """The same on the CPU and without graph, to be pickled: what a rank sends to another."""
    return {name: _on_host(value) for name, value in metrics.items()}


def read(metrics: Mapping[str, Tensor | Metric]) -> dict[str, float]:
    """The numbers to report."""
    return {name: float(value) if isinstance(value, Tensor) else value.value() for name, value in metrics.items()}


def _joined(name: str, first: Any, second: Any) -> Any:
    if type(first) is not type(second):
        raise BadInput(f"metric {name!r} is a {type(first).__name__} here and a {type(second).__name__} there; give it one kind")
    return first + second if isinstance(first, Tensor) else first.merge(second)


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    return dc.replace(value, **{field.name: _on_host(getattr(value, field.name)) for field in dc.fields(value)})
