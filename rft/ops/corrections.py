"""What makes up for tokens sampled by an engine whose arithmetic is not the trainer's."""

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rft.shapes import checked


@checked
def truncated_weights(
    trainer: Float[Tensor, "batch seq"], engine: Float[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], *, cap: float
) -> Float32[Tensor, "batch seq"]:
    """Truncated importance weight of each token: min(exp(trainer − engine), cap), in fp32 and without gradient; 1 outside the mask.

    `trainer` and `engine` are the log-probs that the two give the same sampled token under the same weights. The mean of w f over
    the engine's tokens estimates the trainer's mean of f; the cap bounds the variance at the price of a little bias.

    Source: Ionides, Truncated Importance Sampling, https://doi.org/10.1198/106186008X320456; from engine to trainer: Yao et al.,
    Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, https://fengyao.notion.site/off-policy-rl
    """
    difference = torch.where(mask, trainer.detach().float(), 0.0) - torch.where(mask, engine.detach().float(), 0.0)
    return difference.exp().clamp(max=cap)
