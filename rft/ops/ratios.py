"""Probability ratios of the same tokens under two policies, from log-probs: in fp32 whatever comes in, and finite whatever they are."""

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rft.ops.masked import marked
from rft.shapes import checked

LOG_RATIO_LIMIT = 20.0
"""Ratios are held to e^±20, and have no gradient beyond: such a token carries no information, and fp32 overflows at e^88."""


@checked
def log_ratio(p: Float[Tensor, "*axes"], q: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]) -> Float32[Tensor, "*axes"]:
    """log p − log q of log-probs p and q: exactly 0 where they are equal, and outside of the mask."""
    return marked(p, mask) - marked(q, mask)


@checked
def bounded_exp(x: Float32[Tensor, "*axes"]) -> Float32[Tensor, "*axes"]:
    """e^x, held to e^±20."""
    return torch.clamp(x, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
