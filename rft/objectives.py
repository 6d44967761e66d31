"""What a loss is to a trainer: an `Objective` maps the new scores of one micro-batch to its share of the step's loss.

A trainer knows no formula and an objective no rank: the trainer cuts the global batch into micro-batches and adds up what the
objective gives, over micro-batches and ranks; the objective divides by the whole batch's `Totals`. So a batch has one loss and one
gradient, however it is split.
"""

import dataclasses as dc
from collections.abc import Callable

from jaxtyping import Float32
from torch import Tensor

from rft import tree
from rft.errors import BadInput
from rft.experience import Minibatch
from rft.ops.aggregation import Totals
from rft.ops.corrections import truncated_weights
from rft.ops.kl import k3
from rft.ops.losses import clipped_surrogate, negative_log_likelihood
from rft.ops.masked import masked_mean
from rft.shapes import check_record


@dc.dataclass(frozen=True, kw_only=True, eq=False)
class TokenScores:
    """What the Actor says of each token now, with gradient; 0 where nothing is sampled."""

    logprobs: Float32[Tensor, "batch seq"]
    """log p(token t | before t), in nats, at the row's temperature."""
    entropy: Float32[Tensor, "batch seq"]
    """Of the distribution that token t is drawn from, in nats, at the row's temperature."""

    def __post_init__(self) -> None:
        check_record(self)


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """What one forward pass takes: rows of a mini-batch, cut to their longest, with the old log-probs joined.

    `old` is None where the objective is to take its own detached log-probs (the first step). A filler row, which keeps the ranks'
    counts equal, has nothing sampled and contributes nothing.
    """

    rows: Minibatch
    old: Float32[Tensor, "batch seq"] | None


@dc.dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What an objective gives for one micro-batch.

    `loss` is a scalar, already divided by the step's `Totals`, so that the sum over micro-batches and ranks is the loss of the
    global batch. `metrics` are scalars, scaled likewise.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


Objective = Callable[[TokenScores, MicroBatch, Totals], LossTerms]
"""(the Actor's scores of the micro-batch's tokens, with gradient; the micro-batch; the totals) -> loss and metrics."""


def grpo(*, clip: float = 0.2, correction_cap: float | None = None) -> Objective:
    """The clipped surrogate over group-normalised advantages, averaged over the sampled tokens of the global batch.

    loss = −1/tokens Σ_t w_t min(r_t A_t, clip(r_t, 1 − clip, 1 + clip) A_t), r_t = exp(new_t − old_t). Without old log-probs (the
    first step) old = new, detached: r = 1, and the gradient is that of −A log p.

    w = 1, or with `correction_cap` the truncated importance weight min(exp(old_t − engine_t), cap) of `ops.corrections`, for the
    engine's arithmetic differs from the trainer's. Where the old log-probs were adopted from the engine it is 1, as r itself is
    then measured against the engine.

    Metrics, over the sampled tokens of the global batch: `clip_fraction`, `ratio_mean`, `kl` (k3 of old to new), `engine_kl`
    (k3 of the distribution sampled from to new), and with `correction_cap` also `correction_mean`. Raises `BadInput` for a clip or a
    cap that is not above 0.

    Source: Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300 (the mean over tokens instead of sequences: Yu et al., DAPO,
    https://arxiv.org/abs/2503.14476).
    """
    if clip <= 0 or (correction_cap is not None and correction_cap <= 0):
        raise BadInput(f"grpo: clip and correction_cap must be above 0, got {clip} and {correction_cap}")

    def objective(scores: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
        new, mask, advantages = scores.logprobs, micro.rows.sampled, micro.rows.advantages
        old = new.detach() if micro.old is None else micro.old
        surrogate = clipped_surrogate(new, old, advantages, mask, clip=clip)
        metrics = {
            "clip_fraction": masked_mean(surrogate.clipped.float(), mask, totals.tokens),
            "ratio_mean": masked_mean(surrogate.ratio, mask, totals.tokens),
            "kl": masked_mean(k3(old, new.detach()), mask, totals.tokens),
            "engine_kl": masked_mean(k3(micro.rows.logprobs, new.detach()), mask, totals.tokens),
        }
        loss = surrogate.loss
        if correction_cap is not None:
            weights = truncated_weights(old, micro.rows.logprobs, mask, cap=correction_cap)
            metrics["correction_mean"] = masked_mean(weights, mask, totals.tokens)
            loss = weights * loss
        return LossTerms(loss=masked_mean(loss, mask, totals.tokens), metrics=metrics)

    return objective


def supervised() -> Objective:
    """Negative log-likelihood of the marked tokens: loss = −1/tokens Σ_t log p(token t | before t).

    `sampled` marks the tokens to learn; advantages and old log-probs are not read.
    """

    def objective(scores: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
        loss = negative_log_likelihood(scores.logprobs)
        return LossTerms(loss=masked_mean(loss, micro.rows.sampled, totals.tokens), metrics={})

    return objective
