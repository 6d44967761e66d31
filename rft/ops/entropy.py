"""Which tokens were open: selections by the entropy of the distribution that each was drawn from.

Both give which tokens to train, not what to divide by. Wang et al. divide by all tokens of the batch, selected or not; so does
`token_mean` given the selection as its mask, as its totals count all sampled tokens. To divide by the selected ones alone, count
these instead.
"""

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rft.ops.parameters import require_positive, require_within
from rft.shapes import checked


@checked
def high_entropy_tokens(
    entropies: Float[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], *, share: float
) -> Bool[Tensor, "batch seq"]:
    """The tokens of highest entropy of each row.

        the ⌈share · n⌉ marked tokens of highest entropy, n = the row's marked tokens

    At least one where any is marked, none in an empty row; of equal entropies the earlier token comes first. Row by row it needs no
    other rows, and so no other rank; the paper takes the share of a whole batch, which is `entropy_threshold`. Raises `BadInput`
    for a share outside of (0, 1].

    Source: Wang et al., Beyond the 80/20 Rule, https://arxiv.org/abs/2506.01939
    """
    _check_share("high_entropy_tokens", share)
    order = torch.where(mask, entropies.float(), -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(mask.shape[1], device=mask.device).expand_as(order))
    return mask & (rank < _count(mask.sum(dim=1), share)[:, None])


@checked
def entropy_threshold(entropies: Float[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], *, share: float) -> Float32[Tensor, ""]:
    """The entropy that the top share of a whole batch's tokens reaches.

        τ = the ⌈share · N⌉-th highest entropy,   N = the batch's marked tokens;   selected: entropy_t ≥ τ

    Give it all rows of the batch, of all ranks; `mask & (entropies >= τ)` then selects on each. Tokens of entropy τ are selected
    all, even if they are more than the share. Without a marked token it is +∞, which selects none. Raises `BadInput` for a share
    outside of (0, 1]. The paper has share = 0.2.

    Known as: TRL `top_entropy_quantile` (which interpolates between two entropies).
    Source: Wang et al., Beyond the 80/20 Rule, https://arxiv.org/abs/2506.01939
    """
    _check_share("entropy_threshold", share)
    kept = entropies.detach()[mask].float().sort(descending=True).values
    return kept[_count(mask.sum(), share) - 1] if len(kept) else torch.full((), torch.inf, device=entropies.device)


def _check_share(where: str, share: float) -> None:
    require_positive(where, share=share)
    require_within(where, 0, 1, share=share)


def _count(tokens: Tensor, share: float) -> Tensor:
    # Products such as 0.07 · 100 lie a rounding error above the whole number that they are.
    return (share * tokens.double() - 1e-6).ceil().long().clamp(min=1)
