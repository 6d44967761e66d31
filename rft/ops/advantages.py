"""Advantages: how much better a response is than the others to the same prompt."""

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from rft.shapes import checked


@checked
def group_advantages(
    rewards: Float[Tensor, "batch"],
    groups: Int64[Tensor, "batch"],
    valid: Bool[Tensor, "batch"] | None = None,
    *,
    eps: float = 1e-6,
) -> Float32[Tensor, "batch"]:
    """Rewards normalised within their group: (r − mean(group)) / (std(group) + eps), in fp32.

    Rows of one group carry the same number in `groups`, wherever they stand; all rows of a group must be here. The standard
    deviation is the population's (divided by n). A group of one, and one whose rewards are all equal, has advantages of exactly 0.
    Rows that are not `valid` (their reward failed) have 0 and take no part in their group; their rewards may be anything.

    Source: Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.
    """
    valid = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid
    values = torch.where(valid, rewards.float(), 0.0)
    names, member = groups.unique(return_inverse=True)

    def total(x: Tensor) -> Tensor:
        return torch.zeros(len(names), device=x.device).index_add(0, member, torch.where(valid, x, 0.0))

    count = total(torch.ones_like(values)).clamp(min=1)
    centred = values - (total(values) / count)[member]
    deviation = (total(centred.square()) / count).sqrt()[member]
    differs = _spread(values, valid, member, len(names))[member] > 0
    return torch.where(valid & differs, centred / (deviation + eps), 0.0)


def _spread(values: Tensor, valid: Tensor, member: Tensor, count: int) -> Tensor:
    # Of equal rewards the mean may differ in the last bit, and dividing that by a deviation of its size would make noise of it.
    highest = torch.full((count,), -torch.inf, device=values.device)
    lowest = torch.full((count,), torch.inf, device=values.device)
    highest = highest.scatter_reduce(0, member, torch.where(valid, values, -torch.inf), "amax")
    return highest - lowest.scatter_reduce(0, member, torch.where(valid, values, torch.inf), "amin")


@checked
def per_token(advantages: Float32[Tensor, "batch"], sampled: Bool[Tensor, "batch seq"]) -> Float32[Tensor, "batch seq"]:
    """Gives every sampled token its sequence's advantage; 0 elsewhere."""
    return torch.where(sampled, advantages[:, None], 0.0)
