"""Per-token losses. What is averaged, and over how many tokens, is the objective's business (`masked_mean`)."""

import dataclasses as dc

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rft.shapes import checked

LOG_RATIO_LIMIT = 20.0
"""Beyond ratios of e^±20 a token carries no information, and fp32 overflows at e^88."""


@dc.dataclass(frozen=True, kw_only=True)
class Surrogate:
    """Per token, 0 outside the mask (ratio 1): the loss, the ratio before it is clipped, and whether the clip took the gradient."""

    loss: Float32[Tensor, "batch seq"]
    ratio: Float32[Tensor, "batch seq"]
    clipped: Bool[Tensor, "batch seq"]


@checked
def clipped_surrogate(
    new: Float[Tensor, "batch seq"],
    old: Float[Tensor, "batch seq"],
    advantages: Float[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
    *,
    clip: float,
) -> Surrogate:
    """PPO's loss of each token: −min(r A, clip(r, 1 − clip, 1 + clip) A) with r = exp(new − old), in fp32.

    `clipped` marks the tokens that the clip stops: A > 0 and r > 1 + clip, or A < 0 and r < 1 − clip. What stands outside of the
    mask is not read, NaN included. The log-ratio is limited to ±20; the returned ratio is free of gradient.

    Source: Schulman et al., Proximal Policy Optimization Algorithms, https://arxiv.org/abs/1707.06347, equation 7.
    """
    log_ratio = torch.where(mask, new.float(), 0.0) - torch.where(mask, old.float(), 0.0)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    gains = torch.where(mask, advantages.float(), 0.0)
    loss = -torch.minimum(ratio * gains, ratio.clamp(1 - clip, 1 + clip) * gains)
    clipped = ((gains > 0) & (ratio > 1 + clip)) | ((gains < 0) & (ratio < 1 - clip))
    return Surrogate(loss=loss, ratio=ratio.detach(), clipped=clipped)


@checked
def negative_log_likelihood(new: Float[Tensor, "batch seq"]) -> Float32[Tensor, "batch seq"]:
    """The supervised loss of each token, in nats: −log p(token t | before t), in fp32."""
    return -new.float()
