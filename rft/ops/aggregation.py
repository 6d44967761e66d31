"""From losses of tokens to the loss of a batch: what is averaged, over what, with denominators of the whole global batch.

An aggregation is given a part (the rows of one micro-batch) and the `Totals` of the whole. What it gives for the parts adds up, over
micro-batches and ranks, to the loss of the whole: a batch has one loss and one gradient, however it is split.

The totals count sampled tokens and the rows that have some. A mask that marks fewer (a selection of tokens) leaves them as they are:
what is not marked counts as a loss of 0, except in the mean of a row.
"""

import dataclasses as dc
from collections.abc import Callable

from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rft.ops.masked import masked_mean, masked_sum, row_mean
from rft.ops.parameters import require_positive
from rft.shapes import checked


@dc.dataclass(frozen=True, kw_only=True)
class Totals:
    """Denominators over the whole global batch of one optimizer step: all ranks, all micro-batches."""

    tokens: int
    """Sampled tokens, those of demonstrations left out."""
    sequences: int
    """Rows with at least one sampled token, demonstrations left out."""
    demonstrated: int = 0
    """Tokens of demonstrations."""


Aggregation = Callable[[Float[Tensor, "batch seq"], Bool[Tensor, "batch seq"], Totals], Float32[Tensor, ""]]
"""(loss of each token, which tokens count, the totals) -> this part's share of the batch's loss."""


@checked
def token_mean(loss: Float[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], totals: Totals) -> Float32[Tensor, ""]:
    """The mean over all tokens of the global batch.

        1/N Σ_i Σ_t loss_it,   N = the sampled tokens of the global batch

    Long responses weigh as much as they have tokens. 0 where nothing is marked.

    Known as: TRL `loss_type="dapo"`; verl `loss_agg_mode="token-mean"`; OpenRLHF `token_level_loss=True`; LightRFT
    `loss_agg_mode="token-mean"`.
    Source: Yu et al., DAPO, https://arxiv.org/abs/2503.14476
    """
    return masked_mean(loss, mask, totals.tokens)


@checked
def sequence_mean_of_token_means(loss: Float[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], totals: Totals) -> Float32[Tensor, ""]:
    """The mean over sequences of each one's mean over its tokens.

        1/S Σ_i 1/n_i Σ_t loss_it,   n_i = the marked tokens of row i,   S = the sequences of the global batch

    Every sequence weighs the same, so a long response's token weighs less: GRPO's length bias. A row without a marked token adds
    nothing and is not counted in S. 0 where nothing is marked.

    Known as: TRL `loss_type="grpo"`; verl `loss_agg_mode="seq-mean-token-mean"`; OpenRLHF `token_level_loss=False`; LightRFT
    `loss_agg_mode="seq-mean-token-mean"`.
    Source: Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300
    """
    return row_mean(loss, mask).sum() / max(totals.sequences, 1)


@checked
def sequence_mean_of_token_sums(loss: Float[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], totals: Totals) -> Float32[Tensor, ""]:
    """The mean over sequences of each one's sum over its tokens.

        1/S Σ_i Σ_t loss_it,   S = the sequences of the global batch

    The policy gradient as it is derived: a response's log-prob is the sum of its tokens'. Its scale grows with the length of the
    responses. A row without a marked token is not counted in S. 0 where nothing is marked.

    Known as: verl `loss_agg_mode="seq-mean-token-sum"`; LightRFT `loss_agg_mode="seq-mean-token-sum"`.
    Source: Ahmadian et al., Back to Basics: Revisiting REINFORCE Style Optimization, https://arxiv.org/abs/2402.14740
    """
    return masked_sum(loss, mask) / max(totals.sequences, 1)


@checked
def constant_length(
    loss: Float[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], totals: Totals, *, length: float
) -> Float32[Tensor, ""]:
    """The mean over sequences of each one's sum over its tokens, divided by one length for all.

        1/(S · length) Σ_i Σ_t loss_it,   S = the sequences of the global batch

    No bias towards short or long responses, and a scale that does not move with their lengths: `length` is a constant of the run,
    such as the longest response allowed, in tokens. As an aggregation: `partial(constant_length, length=4096)`. 0 where nothing is
    marked. Raises `BadInput` for a length that is not above 0.

    Known as: TRL `loss_type="dr_grpo"` (its length is `max_completion_length`); verl `loss_agg_mode="seq-mean-token-sum-norm"` with
    `loss_scale_factor`; LightRFT `loss_agg_mode="seq-mean-token-sum-norm"` (which divides by the length alone, not by S).
    Source: Liu et al., Understanding R1-Zero-Like Training (Dr. GRPO), https://arxiv.org/abs/2503.20783
    """
    require_positive("constant_length", length=length)
    return masked_sum(loss, mask) / (max(totals.sequences, 1) * length)
