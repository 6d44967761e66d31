"""From losses of tokens to the loss of a batch: what is averaged, over what, with denominators of the whole global batch.

An aggregation is given a part (the rows of one micro-batch) and the `Totals` of the whole. What it gives for the parts adds up, over
micro-batches and ranks, to the loss of the whole: a batch has one loss and one gradient, however it is split.
"""

import dataclasses as dc
from collections.abc import Callable

from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rft.ops.masked import masked_mean
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

    Source: Yu et al., DAPO, https://arxiv.org/abs/2503.14476
    """
    return masked_mean(loss, mask, totals.tokens)
