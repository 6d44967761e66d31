"""Losses of the critic."""

import dataclasses as dc

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rft.ops.masked import marked
from rft.ops.parameters import require_positive
from rft.shapes import checked


@dc.dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Per token: the loss, and where the clip has taken its gradient. Outside the mask 0 and False."""

    loss: Float32[Tensor, "batch seq"]
    clipped: Bool[Tensor, "batch seq"]


@checked
def value_loss(new: Float[Tensor, "batch seq"], returns: Float[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"]) -> ValueLoss:
    """Half the squared error of the predicted values.

        loss_t = ½ (V_t − R_t)²

    `new` (V) is differentiated, `returns` (R) are constant; in fp32. What stands outside of the mask is not read.

    Known as: OpenRLHF `ValueLoss` without `clip_eps`; LightRFT `ValueLoss` without `clip_eps`.
    Source: Schulman et al., Proximal Policy Optimization Algorithms, https://arxiv.org/abs/1707.06347, equation 9
    """
    error = marked(new, mask) - marked(returns.detach(), mask)
    return ValueLoss(loss=0.5 * error.square(), clipped=torch.zeros_like(mask))


@checked
def clipped_value_loss(
    new: Float[Tensor, "batch seq"],
    old: Float[Tensor, "batch seq"],
    returns: Float[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
    *,
    clip: float,
) -> ValueLoss:
    """The value loss with predictions held near the old ones, as in PPO's code.

        loss_t = ½ max((V_t − R_t)², (clip(V_t, O_t − clip, O_t + clip) − R_t)²)

    `new` (V) is differentiated; `old` (O, the values at sampling time) and `returns` (R) are constant; in fp32. `clipped` marks the
    tokens whose loss is the second, which has no gradient: the value has moved further than `clip` towards its return. Raises
    `BadInput` for a clip that is not above 0.

    Known as: TRL `cliprange_value`; verl `cliprange_value`; OpenRLHF `ValueLoss`, `clip_eps`; LightRFT `ValueLoss`, `clip_eps`.
    Source: Dhariwal et al., OpenAI Baselines (PPO2), https://github.com/openai/baselines
    """
    require_positive("clipped_value_loss", clip=clip)
    value, anchor, target = marked(new, mask), marked(old.detach(), mask), marked(returns.detach(), mask)
    free = (value - target).square()
    bounded = (value.detach().clamp(anchor - clip, anchor + clip) - target).square()
    clipped = bounded > free.detach()
    return ValueLoss(loss=0.5 * torch.where(clipped, bounded, free), clipped=clipped)
