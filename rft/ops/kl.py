"""Estimates of KL(p ‖ q) from tokens sampled from p, one number per token: their mean estimates the divergence.

`p` and `q` are the log-probs that the two give the sampled tokens: p the policy in training, q the reference. In a reward an
estimate is a constant, and k1 is the one to take. In a loss what counts is its gradient, and that is another matter than its value:

    as a loss        its mean is            its gradient's mean is, over tokens of p
    k1               KL(p ‖ q)              0
    k2               near it                that of KL(p ‖ q)
    k3               KL(p ‖ q)              that of KL(q ‖ p)
    straight_through(k3, k2)                KL(p ‖ q), and its gradient
    importance_weighted(k1 or k3)           KL(p ‖ q), and its gradient, over tokens of any policy

All this is of one token's distribution given those before it. What a token does to the divergence of later ones is in no loss of
this kind; a penalty in the reward (−β k1, summed to go) has it.

Source: Tang and Munos, On a few pitfalls in KL divergence gradient estimation for RL, https://arxiv.org/abs/2506.09477; Liu et al.,
Rethinking KL Regularization in RLHF, https://arxiv.org/abs/2510.01555
"""

from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rft.ops.ratios import LOG_RATIO_LIMIT, bounded_exp, log_ratio
from rft.shapes import checked

LogProbs: TypeAlias = Float[Tensor, "*axes"]
Mask: TypeAlias = Bool[Tensor, "*axes"]
Estimate: TypeAlias = Float32[Tensor, "*axes"]


@checked
def k1(p: LogProbs, q: LogProbs, mask: Mask | None = None) -> Estimate:
    """The log-ratio: unbiased, of high variance, negative for single tokens.

        k1 = log p − log q

    In fp32 nats; 0 outside of the mask (None: everything counts), which is not read. As a loss it does nothing but add noise: its
    gradient ∇log p has mean 0. It belongs into the reward.

    Known as: verl `kl_penalty="kl"` or `"k1"`; OpenRLHF `kl_estimator="k1"`.
    Source: Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html
    """
    return log_ratio(p, q, _everything(p, mask))


@checked
def k2(p: LogProbs, q: LogProbs, mask: Mask | None = None) -> Estimate:
    """Half the log-ratio squared: never negative, of low variance, a little biased.

        k2 = ½ (log p − log q)²

    In fp32 nats; 0 outside of the mask (None: everything counts), which is not read. As a loss its gradient (log p − log q) ∇log p
    has the mean ∇KL(p ‖ q): the right one, though its value is not the divergence's.

    Known as: verl `kl_penalty="mse"` or `"k2"`; OpenRLHF `kl_estimator="k2"`.
    Source: Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html
    """
    return 0.5 * k1(p, q, mask).square()


@checked
def k3(p: LogProbs, q: LogProbs, mask: Mask | None = None) -> Estimate:
    """The ratio's excess over its logarithm: unbiased, never negative, of low variance where the two are close.

        k3 = r − 1 − log r,   r = q / p

    In fp32 nats, with log r held to ±20; 0 outside of the mask (None: everything counts), which is not read. As a loss its gradient
    (1 − r) ∇log p has the mean ∇KL(q ‖ p): of the divergence the other way round, and without bound where p ≪ q.

    Known as: TRL `beta` of `GRPOConfig`; verl `kl_penalty="low_var_kl"` or `"k3"`; OpenRLHF `kl_estimator="k3"`.
    Source: Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html
    """
    change = -torch.clamp(k1(p, q, mask), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return change.expm1() - change


@checked
def straight_through(value: Estimate, gradient: Estimate) -> Estimate:
    """The value of one estimate with the gradient of another.

        sg[value] + gradient − sg[gradient]

    `straight_through(k3(p, q), k2(p, q))` reports the divergence without bias and has its gradient.

    Known as: verl `kl_penalty="k3+"` (and `"k1+"`), of which the gradient is k2's.
    Source: Liu et al., Rethinking KL Regularization in RLHF, https://arxiv.org/abs/2510.01555
    """
    return value.detach() + (gradient - gradient.detach())


@checked
def importance_weighted(estimate: Estimate, p: LogProbs, sampler: LogProbs, mask: Mask | None = None) -> Estimate:
    """An estimate for tokens that another policy sampled, with value and gradient right.

        p / sampler · estimate

    `estimate` is k1 or k3 of (p, q), differentiable; `sampler` the log-probs under the policy that the tokens come from (constant).
    The gradient goes through the weight, too: the mean over the sampler's tokens is Σ p · estimate = KL(p ‖ q) for every p, so its
    gradient is the divergence's. Where the sampler is p itself, this gradient is k2's for k3, and (k1 + 1) ∇log p for k1. The weight
    is held to e^±20; 0 outside of the mask (None: everything counts), which is not read.

    Known as: TRL `use_bias_correction_kl`.
    Source: DeepSeek-AI, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 3.1
    """
    counted = _everything(p, mask)
    return bounded_exp(log_ratio(p, sampler.detach(), counted)) * torch.where(counted, estimate, 0.0)


def _everything(like: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask
