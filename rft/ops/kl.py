"""Estimates of KL(p ‖ q) from tokens sampled from p, one number per token: their mean estimates the divergence.

Source: Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html
"""

from jaxtyping import Float, Float32
from torch import Tensor

from rft.shapes import checked


@checked
def k1(p: Float[Tensor, "*axes"], q: Float[Tensor, "*axes"]) -> Float32[Tensor, "*axes"]:
    """log p − log q of tokens sampled from p, in fp32 nats: unbiased, of high variance, and negative for single tokens."""
    return p.float() - q.float()


@checked
def k3(p: Float[Tensor, "*axes"], q: Float[Tensor, "*axes"]) -> Float32[Tensor, "*axes"]:
    """(r − 1) − log r with log r = log q − log p of tokens sampled from p, in fp32 nats: unbiased, and never negative."""
    log_ratio = q.float() - p.float()
    return log_ratio.expm1() - log_ratio
