"""Shaping of sequence rewards, before any advantage is taken. The KL penalty in the reward is `returns.token_rewards`."""

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from rft.errors import BadInput
from rft.shapes import checked


@checked
def overlong_penalty(lengths: Int64[Tensor, "batch"], *, max_length: int, buffer: int) -> Float32[Tensor, "batch"]:
    """DAPO's soft punishment of long responses, to be added to their rewards.

        p_i = 0                                       l_i ≤ max_length − buffer
        p_i = (max_length − buffer − l_i) / buffer    in between
        p_i = −1                                      l_i ≥ max_length

    `lengths` l counts sampled tokens, the end token included. The last `buffer` tokens before `max_length` cost ever more, so a
    response feels the limit before it is cut off. Multiply it for another height. Raises `BadInput` unless 0 < buffer ≤ max_length.

    Known as: TRL `get_soft_overlong_punishment`; verl `reward_model.overlong_buffer`; OpenRLHF `--overlong_buffer_len`; LightRFT
    `--overlong_buffer`.
    Source: Yu et al., DAPO: An Open-Source LLM Reinforcement Learning System at Scale, https://arxiv.org/abs/2503.14476, equation 13
    """
    if not 0 < buffer <= max_length:
        raise BadInput(f"overlong_penalty: the buffer lies before max_length, so 0 < buffer <= max_length; got {buffer} and {max_length}")
    return ((max_length - buffer - lengths).float() / buffer).clamp(-1, 0)


@checked
def clip_rewards(
    rewards: Float[Tensor, "batch"], valid: Bool[Tensor, "batch"] | None = None, *, low: float, high: float
) -> Float32[Tensor, "batch"]:
    """Rewards no lower than `low` and no higher than `high`.

        r'_i = min(max(r_i, low), high)

    Rows that are not `valid` have 0 and are not read. It goes before the advantages: a clipped advantage is another thing. Raises
    `BadInput` unless low < high.

    Known as: OpenRLHF `--reward_clip_range`; LightRFT `--reward_clip`.
    Source: Mnih et al., Human-level control through deep reinforcement learning, https://doi.org/10.1038/nature14236
    """
    if not low < high:
        raise BadInput(f"clip_rewards: low must be below high, got {low} and {high}")
    kept = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    return torch.where(kept, rewards.float().clamp(low, high), 0.0)
