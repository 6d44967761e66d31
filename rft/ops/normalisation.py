"""Normalisation over a batch, and over all that a run has seen.

A function here normalises over the entries that it is given: those of all ranks must be among them. Sums are taken in float64, so that
the order of entries and ranks does not show. `whiten` and `batch_normalise` whiten; what has been through one of them, or through an
estimator that says so, needs no other.
"""

import dataclasses as dc
import math

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from rft import tree
from rft.errors import BadInput
from rft.ops.masked import marked
from rft.ops.parameters import require_finite, require_within
from rft.shapes import check_record, checked


@checked
def whiten(
    values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"], *, shift_mean: bool = True, eps: float = 1e-8
) -> Float32[Tensor, "*axes"]:
    """Marked entries brought to mean 0 and deviation 1; 0 elsewhere.

        y = (x − μ) / (σ + eps),   μ, σ over all marked entries

    σ is the deviation of the population (divided by n). Where all marked entries are equal, one alone included, y is exactly 0.
    Without `shift_mean` the mean is given back: the result is y + μ. What is not marked is not read. Raises `BadInput` for a negative
    `eps`.

    Known as: TRL `masked_whiten` (n − 1 for n, eps below the root); verl `masked_whiten` (the same); LightRFT `--advantages_norm`
    (over each micro-batch).
    Source: Andrychowicz et al., What Matters In On-Policy Reinforcement Learning?, https://arxiv.org/abs/2006.05990
    """
    require_within("whiten", 0, math.inf, eps=eps)
    return _whitened(values, mask.double(), mask, eps, shift_mean=shift_mean)


@checked
def batch_normalise(
    values: Float[Tensor, "batch"],
    valid: Bool[Tensor, "batch"] | None = None,
    *,
    weights: Int64[Tensor, "batch"] | None = None,
    eps: float = 1e-8,
) -> Float32[Tensor, "batch"]:
    """A number of each sequence brought to mean 0 and deviation 1 over the batch; 0 for rows that are not valid.

        y_i = (x_i − μ) / (σ + eps),   μ = Σ w_i x_i / Σ w_i,   σ² = Σ w_i (x_i − μ)² / Σ w_i

    The weights are 1 by default: every sequence counts once. With the numbers of sampled tokens as weights it is what `whiten` gives
    when every token has its sequence's number. Where all rows of weight above 0 are equal, all are exactly 0. It whitens: after
    `grpo`, which whitens each group, it would whiten twice; it goes well after `dr_grpo`, `rloo`, `opo` and `remax`. Raises `BadInput`
    for negative weights or `eps`.

    Source: Andrychowicz et al., What Matters In On-Policy Reinforcement Learning?, https://arxiv.org/abs/2006.05990
    """
    require_within("batch_normalise", 0, math.inf, eps=eps)
    valid = torch.ones_like(values, dtype=torch.bool) if valid is None else valid
    weights = torch.ones_like(valid, dtype=torch.int64) if weights is None else weights
    if bool((weights[valid] < 0).any()):
        raise BadInput("batch_normalise: weights are numbers of tokens, at least 0")
    return _whitened(values, torch.where(valid, weights, 0).double(), valid, eps, shift_mean=True)


def _whitened(values: Tensor, weights: Tensor, mask: Tensor, eps: float, *, shift_mean: bool) -> Tensor:
    x = marked(values.detach(), mask).double()
    require_finite("normalisation", x)
    total = weights.sum().clamp(min=1)
    mean = (weights * x).sum() / total
    deviation = (weights * (x - mean).square()).sum().div(total).sqrt()
    scaled = torch.where(deviation > 0, (x - mean) / (deviation + eps), 0.0)
    return torch.where(mask, scaled if shift_mean else scaled + mean, 0.0).float()


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class RunningMoments:
    """How many numbers have been seen, their mean, and their squared distances from it; `RunningMoments()` has seen none.

    Three float64 scalars: part of a run's state, saved and restored with it.
    """

    count: Float64[Tensor, ""] = dc.field(default_factory=_zero)
    mean: Float64[Tensor, ""] = dc.field(default_factory=_zero)
    squares: Float64[Tensor, ""] = dc.field(default_factory=_zero)

    def __post_init__(self) -> None:
        check_record(self)

    @property
    def deviation(self) -> Float64[Tensor, ""]:
        """√(squares / count), that of the population; 0 where nothing has been seen."""
        return (self.squares / self.count.clamp(min=1)).sqrt()


@checked
def moments(values: Float[Tensor, "*axes"], valid: Bool[Tensor, "*axes"] | None = None) -> RunningMoments:
    """Count, mean and squared distances of the valid entries.

        n = Σ 1,   μ = Σ x / n,   M = Σ (x − μ)²

    What is not `valid` is not read. Of nothing all three are 0.

    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances,
    http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf
    """
    x = (values if valid is None else values[valid]).detach().float().double()
    require_finite("moments", x)
    mean = x.sum() / max(1, x.numel())
    return RunningMoments(count=torch.full_like(mean, x.numel()), mean=mean, squares=(x - mean).square().sum())


@checked
def merge(*parts: RunningMoments) -> RunningMoments:
    """The moments of all that the parts have seen together.

        n = Σ n_k,   μ = Σ n_k μ_k / n,   M = Σ (M_k + n_k (μ_k − μ)²)

    The same in any order, to rounding: so the moments of ranks are brought together, and those of a batch with the run's. Raises
    `BadInput` for no parts.

    Known as: LightRFT `RunningMoments.update`.
    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances,
    http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf
    """
    if not parts:
        raise BadInput("merge needs at least one part; what has seen nothing is RunningMoments()")
    counts, means, squares = (torch.stack([getattr(part, name) for part in parts]) for name in ("count", "mean", "squares"))
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    return RunningMoments(count=count, mean=mean, squares=(squares + counts * (means - mean).square()).sum())


@checked
def normalise(
    values: Float[Tensor, "*axes"],
    seen: RunningMoments,
    valid: Bool[Tensor, "*axes"] | None = None,
    *,
    centre: bool = True,
    eps: float = 1e-8,
) -> Float32[Tensor, "*axes"]:
    """Values measured by moments that were taken before, or elsewhere; 0 for what is not valid.

        y = (x − μ) / (σ + eps),   without `centre`: y = x / (σ + eps)

    σ is the deviation of the population. Moments without any spread (nothing seen, one number, or equal ones) have no scale to offer:
    then σ + eps is taken as 1. Dividing `dr_grpo` by the deviation of the batch's rewards is `normalise(advantages, moments(rewards,
    valid), valid, centre=False)`. Raises `BadInput` for a negative `eps`.

    Known as: LightRFT `--reward_running_norm` (with `centre`: and `--reward_running_norm_minus_mean`); TRL
    `GRPOConfig(scale_rewards="batch")` (`dr_grpo` by the moments of the batch's rewards).
    """
    require_within("normalise", 0, math.inf, eps=eps)
    mask = torch.ones_like(values, dtype=torch.bool) if valid is None else valid
    x = marked(values.detach(), mask).double()
    scale = torch.where(seen.deviation > 0, seen.deviation + eps, 1.0)
    return torch.where(mask, (x - seen.mean if centre else x) / scale, 0.0).float()
