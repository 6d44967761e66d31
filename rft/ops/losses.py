"""Policy losses of single tokens. What is averaged, and over how many tokens, is the aggregation's business (`ops.aggregation`).

All take `(new, old, advantages, mask)` of shape `[batch, seq]`: the log-probs of the sampled tokens under the policy in training and
under the one that the batch is measured against, the tokens' advantages, and which tokens count. Only `new` is differentiated; all
is computed in fp32; what stands outside of the mask is not read, NaN included; ratios are held to e^±20 (`ops.ratios`).

In the formulas r_t = exp(new_t − old_t), A_t is the advantage, p_t = exp(new_t), sg[·] is constant in the gradient, and n is the
number of a row's marked tokens.
"""

import dataclasses as dc
import math
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rft.ops.kl import k3, straight_through
from rft.ops.masked import marked, row_mean, row_sum
from rft.ops.parameters import require_positive, require_within
from rft.ops.ratios import bounded_exp, log_ratio
from rft.shapes import checked

Tokens: TypeAlias = Float[Tensor, "batch seq"]
Mask: TypeAlias = Bool[Tensor, "batch seq"]


@dc.dataclass(frozen=True, kw_only=True)
class Surrogate:
    """Per token: the loss, the importance ratio before any clip, and where the clip takes effect. Outside the mask 0, 1 and False.

    `ratio` is free of gradient; it is the sequence's where the loss takes one ratio for a sequence. `clipped` tells which tokens have
    lost their gradient to the clip, or (`cispo`, `topr`) had their weight cut.
    """

    loss: Float32[Tensor, "batch seq"]
    ratio: Float32[Tensor, "batch seq"]
    clipped: Bool[Tensor, "batch seq"]


@checked
def policy_gradient(new: Tokens, old: Tokens, advantages: Tokens, mask: Mask) -> Surrogate:
    """The plain policy gradient, REINFORCE: no ratio, no clip.

        loss_t = −A_t log p_t

    On policy every surrogate here has its gradient (those of one ratio per sequence in the sum over the sequence's tokens). `old`
    serves the returned ratio alone; off policy nothing is corrected.

    Known as: verl `loss_mode="gpg"`.
    Source: Williams, Simple Statistical Gradient-Following Algorithms, https://doi.org/10.1007/BF00992696
    """
    loss = -_gains(advantages, mask) * marked(new, mask)
    return Surrogate(loss=loss, ratio=_ratio(new, old, mask).detach(), clipped=torch.zeros_like(mask))


@checked
def ppo_clip(new: Tokens, old: Tokens, advantages: Tokens, mask: Mask, *, low: float, high: float) -> Surrogate:
    """PPO's clipped surrogate, with a bound for each side.

        loss_t = −min(r_t A_t, clip(r_t, 1 − low, 1 + high) A_t)

    A token is clipped, and has no gradient, where A > 0 and r > 1 + high, or A < 0 and r < 1 − low. PPO and GRPO use low = high = 0.2;
    DAPO's clip-higher low = 0.2 and high = 0.28. `low` of 1 or more is no lower bound. Raises `BadInput` for bounds not above 0.

    Known as: TRL `epsilon`, `epsilon_high`; verl `clip_ratio_low`, `clip_ratio_high` (whose default, `loss_mode="vanilla"`, is
    `dual_clip`); OpenRLHF `PolicyLoss`, `clip_eps_low`, `clip_eps_high`; LightRFT `PolicyLoss`, `clip_eps`.
    Source: Schulman et al., Proximal Policy Optimization Algorithms, https://arxiv.org/abs/1707.06347; two bounds: Yu et al., DAPO,
    https://arxiv.org/abs/2503.14476
    """
    require_positive("ppo_clip", low=low, high=high)
    ratio, gains = _ratio(new, old, mask), _gains(advantages, mask)
    return _clipped(ratio, gains, low, high)


@checked
def dual_clip(new: Tokens, old: Tokens, advantages: Tokens, mask: Mask, *, low: float, high: float, limit: float = 3.0) -> Surrogate:
    """PPO's clip with a floor under what a single bad token can cost.

        loss_t = −max(min(r_t A_t, clip(r_t, 1 − low, 1 + high) A_t), limit · A_t)   where A_t < 0, and `ppo_clip` elsewhere

    Where A < 0 the ratio is not bounded from above by `ppo_clip`; here such tokens are clipped at r > limit. Raises `BadInput` for
    bounds not above 0, and for a limit that is not above 1 + high.

    Known as: TRL `delta`; verl `loss_mode="vanilla"`, `clip_ratio_c`; OpenRLHF `PolicyLoss`, `dual_clip`.
    Source: Ye et al., Mastering Complex Control in MOBA Games with Deep Reinforcement Learning, https://arxiv.org/abs/1912.09729
    """
    require_positive("dual_clip", low=low, high=high, **{"limit − (1 + high)": limit - (1 + high)})
    ratio, gains = _ratio(new, old, mask), _gains(advantages, mask)
    inner = _clipped(ratio, gains, low, high)
    floored = (gains < 0) & (inner.ratio > limit)
    loss = torch.where(floored, -limit * gains, inner.loss)
    return Surrogate(loss=loss, ratio=inner.ratio, clipped=inner.clipped | floored)


@checked
def gspo(new: Tokens, old: Tokens, advantages: Tokens, mask: Mask, *, low: float, high: float) -> Surrogate:
    """GSPO: PPO's clip of one ratio for the whole sequence, the geometric mean of its tokens' ratios.

        loss_t = −min(s A_t, clip(s, 1 − low, 1 + high) A_t),   s = exp(1/n Σ_t (new_t − old_t))

    Each token of a row bears the row's loss, so `sequence_mean_of_token_means` gives the paper's objective; A is one number per row
    there. A row is clipped as a whole. As s is a mean, its bounds are narrow: the paper has low = 3e−4 and high = 4e−4. (What verl and
    LightRFT call GSPO is `gspo_token`.) Raises `BadInput` for bounds not above 0.

    Known as: TRL `importance_sampling_level="sequence"`; OpenRLHF `policy_loss_type="gspo"`.
    Source: Zheng et al., Group Sequence Policy Optimization, https://arxiv.org/abs/2507.18071
    """
    require_positive("gspo", low=low, high=high)
    ratio = _sequence_ratio(new, old, mask)
    return _clipped(torch.where(mask, ratio, 1.0), _gains(advantages, mask), low, high)


@checked
def gspo_token(new: Tokens, old: Tokens, advantages: Tokens, mask: Mask, *, low: float, high: float) -> Surrogate:
    """GSPO with advantages of single tokens: the sequence's ratio as a number, the gradient of each token's own log-prob.

        loss_t = −min(s_t A_t, clip(s_t, 1 − low, 1 + high) A_t),   s_t = sg[s] p_t / sg[p_t],   s as in `gspo`

    The gradient of loss_t is −s A_t ∇log p_t where it is not clipped. With one advantage per row, values and gradients under
    `sequence_mean_of_token_means` are those of `gspo`. Raises `BadInput` for bounds not above 0.

    Known as: verl `loss_mode="gspo"`; LightRFT `PolicyLoss`, `use_gspo`; TRL `experimental.gspo_token`.
    Source: Zheng et al., Group Sequence Policy Optimization, https://arxiv.org/abs/2507.18071, section 4.3
    """
    require_positive("gspo_token", low=low, high=high)
    own = marked(new, mask)
    ratio = _sequence_ratio(new, old, mask).detach() * (own - own.detach()).exp()
    return _clipped(torch.where(mask, ratio, 1.0), _gains(advantages, mask), low, high)


@checked
def gmpo(new: Tokens, old: Tokens, advantages: Tokens, mask: Mask, *, low: float = 0.4, high: float = 0.4) -> Surrogate:
    """GMPO: the geometric mean of ratios that are clipped token by token, in log space.

        loss_t = −A_t exp(1/n Σ_t c_t),   c_t = min(log r_t, high) where A_t > 0,  max(log r_t, −low) where A_t < 0

    The bounds are of log-ratios: the paper's range (e^−0.4, e^0.4) is low = high = 0.4. Each token of a row bears the row's loss, so
    `sequence_mean_of_token_means` gives the paper's objective; A is one number per row there. A clipped token has no gradient, its
    neighbours keep theirs. `ratio` is the token's. Raises `BadInput` for bounds not above 0.

    Known as: TRL `experimental.gmpo`; verl `loss_mode="geo_mean"`; LightRFT `PolicyLoss`, `use_gmpo`.
    Source: Zhao et al., Geometric-Mean Policy Optimization, https://arxiv.org/abs/2507.20673
    """
    require_positive("gmpo", low=low, high=high)
    change, gains = log_ratio(new, old.detach(), mask), _gains(advantages, mask)
    over, under = (gains > 0) & (change > high), (gains < 0) & (change < -low)
    kept = torch.where(over, high, torch.where(under, -low, change))
    mean = bounded_exp(row_mean(kept, mask))[:, None]
    return Surrogate(loss=-gains * mean, ratio=bounded_exp(change.detach()), clipped=over | under)


@checked
def cispo(new: Tokens, old: Tokens, advantages: Tokens, mask: Mask, *, high: float, low: float = 1.0) -> Surrogate:
    """CISPO: the ratio is a bounded weight, and every token keeps its gradient.

        loss_t = −sg[clip(r_t, 1 − low, 1 + high)] A_t log p_t

    The paper has no lower bound, which is low = 1, and tunes `high`. `clipped` marks the tokens whose weight is cut, whatever the
    sign of A. Raises `BadInput` for a `high` that is not above 0 and a `low` outside of [0, 1].

    Known as: TRL `loss_type="cispo"` (its `epsilon_high` bounds the ratio itself: 1 + high here); verl `loss_mode="cispo"`.
    Source: MiniMax, MiniMax-M1, https://arxiv.org/abs/2506.13585
    """
    require_positive("cispo", high=high)
    require_within("cispo", 0, 1, low=low)
    ratio = _ratio(new, old, mask).detach()
    loss = -ratio.clamp(1 - low, 1 + high) * _gains(advantages, mask) * marked(new, mask)
    return Surrogate(loss=loss, ratio=ratio, clipped=(ratio < 1 - low) | (ratio > 1 + high))


@checked
def sapo(new: Tokens, old: Tokens, advantages: Tokens, mask: Mask, *, positive: float = 1.0, negative: float = 1.05) -> Surrogate:
    """SAPO: a smooth gate in place of the clip.

        loss_t = −4/τ σ(τ (r_t − 1)) A_t,   τ = positive where A_t > 0, negative elsewhere

    The gradient is −4 σ (1 − σ) r_t A_t ∇log p_t: the policy gradient's at r = 1, fading on either side, the faster the higher the
    temperature τ. The loss at r = 1 is −2 A / τ, not −A. Nothing is ever clipped. The paper averages with
    `sequence_mean_of_token_means`. Raises `BadInput` for temperatures not above 0.

    Known as: TRL `loss_type="sapo"`, `sapo_temperature_pos`, `sapo_temperature_neg`; verl `loss_mode="sapo"`, `tau_pos`, `tau_neg`.
    Source: Gao et al., Soft Adaptive Policy Optimization, https://arxiv.org/abs/2511.20347
    """
    require_positive("sapo", positive=positive, negative=negative)
    ratio, gains = _ratio(new, old, mask), _gains(advantages, mask)
    temperature = torch.where(gains > 0, positive, negative).float()
    loss = -4 / temperature * (temperature * (ratio - 1)).sigmoid() * gains
    return Surrogate(loss=loss, ratio=ratio.detach(), clipped=torch.zeros_like(mask))


@checked
def cpg(new: Tokens, old: Tokens, advantages: Tokens, mask: Mask, *, low: float, high: float) -> Surrogate:
    """CPG: PPO's clip of the log-ratio, so that no ratio multiplies the gradient.

        loss_t = −min(l_t A_t, clip(l_t, log(1 − low), log(1 + high)) A_t),   l_t = new_t − old_t

    The gradient is −A_t ∇log p_t where `ppo_clip` has one, and 0 where it has none. Raises `BadInput` for bounds not above 0 and a
    `low` of 1 or more.

    Known as: LightRFT `PolicyLoss`, `use_cpg_loss` (which adds A_t old_t, constant in the gradient).
    Source: Liu et al., CPGD: Toward Stable Rule-based Reinforcement Learning for Language Models, https://arxiv.org/abs/2505.12504
    """
    require_positive("cpg", low=low, high=high, **{"1 − low": 1 - low})
    change, gains = log_ratio(new, old.detach(), mask), _gains(advantages, mask)
    over, under = (gains > 0) & (change > math.log1p(high)), (gains < 0) & (change < math.log1p(-low))
    kept = torch.where(over, math.log1p(high), torch.where(under, math.log1p(-low), change))
    return Surrogate(loss=-kept * gains, ratio=bounded_exp(change.detach()), clipped=over | under)


@checked
def cpgd(
    new: Tokens, old: Tokens, advantages: Tokens, mask: Mask, *, low: float, high: float, drift: float, drift_limit: float = math.inf
) -> Surrogate:
    """CPGD: `cpg`, and a pull back to the old policy.

        loss_t = cpg_t + drift · d_t,   d_t = r_t − 1 − log r_t,   ∇d_t = min(r_t − 1, drift_limit) ∇log p_t

    d estimates KL(old ‖ new) from the old policy's tokens (`kl.k3`), and its gradient is the divergence's where nothing is limited;
    `drift_limit` bounds the factor r − 1, the one place where a ratio enters the gradient. Clipped tokens are pulled back, too.
    Raises `BadInput` as `cpg` does, and for a negative drift or a limit that is not above 0.

    Source: Liu et al., CPGD: Toward Stable Rule-based Reinforcement Learning for Language Models, https://arxiv.org/abs/2505.12504
    """
    require_within("cpgd", 0, math.inf, drift=drift)
    require_positive("cpgd", drift_limit=drift_limit)
    base, change = cpg(new, old, advantages, mask, low=low, high=high), log_ratio(new, old.detach(), mask)
    slope = (base.ratio - 1).clamp(max=drift_limit)
    distance = straight_through(k3(old, new, mask), slope * change)
    return dc.replace(base, loss=base.loss + drift * distance)


@checked
def topr(new: Tokens, old: Tokens, advantages: Tokens, mask: Mask) -> Surrogate:
    """TOPR: good responses are learned whatever their ratio, bad ones only as far as the policy still gives them.

        loss_t = −w A_t log p_t,   w = 1 where A_t ≥ 0,  sg[min(exp(Σ_t (new_t − old_t)), 1)] where A_t < 0

    The ratio is the whole sequence's, a product over its tokens. `clipped` marks the tokens whose weight is cut to 1. Sums over
    tokens (`sequence_mean_of_token_sums`) give the paper's objective, whose sign is that of the sequence's reward.

    Source: Le Roux et al., Tapered Off-Policy REINFORCE, https://arxiv.org/abs/2503.14286
    """
    gains, total = _gains(advantages, mask), row_sum(log_ratio(new.detach(), old.detach(), mask), mask)
    ratio = torch.where(mask, bounded_exp(total)[:, None], 1.0)
    weight = torch.where(gains < 0, ratio.clamp(max=1.0), 1.0)
    return Surrogate(loss=-weight * gains * marked(new, mask), ratio=ratio, clipped=(gains < 0) & (ratio > 1))


@checked
def negative_log_likelihood(new: Tokens) -> Float32[Tensor, "batch seq"]:
    """The supervised loss of each token, in nats, in fp32.

        loss_t = −log p_t

    Known as: TRL `SFTTrainer`; OpenRLHF `SFTLoss`; LightRFT `GPTLMLoss`.
    Source: maximum likelihood; as an auxiliary loss (PTX): Ouyang et al., InstructGPT, https://arxiv.org/abs/2203.02155
    """
    return -new.float()


def _gains(advantages: Tensor, mask: Tensor) -> Tensor:
    return marked(advantages.detach(), mask)


def _ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return bounded_exp(log_ratio(new, old.detach(), mask))


def _sequence_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return bounded_exp(row_mean(log_ratio(new, old.detach(), mask), mask))[:, None]


def _clipped(ratio: Tensor, gains: Tensor, low: float, high: float) -> Surrogate:
    over, under = (gains > 0) & (ratio > 1 + high), (gains < 0) & (ratio < 1 - low)
    kept = torch.where(over, 1 + high, torch.where(under, 1 - low, ratio))
    return Surrogate(loss=-kept * gains, ratio=ratio.detach(), clipped=over | under)
