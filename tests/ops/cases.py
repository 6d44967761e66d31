"""Random per-token cases: mask holes, empty responses, rubbish outside of the mask."""

import torch
from torch import Tensor


def random_tokens(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(new, old, advantages, mask), each `[batch, seq]`; NaN and infinity where the mask is False."""
    draw = torch.Generator().manual_seed(seed)
    batch, seq = (int(torch.randint(1, 9, (), generator=draw)) for _ in range(2))
    mask = torch.rand(batch, seq, generator=draw) < 0.6
    mask[0] = False
    new = -4 * torch.rand(batch, seq, generator=draw)
    old = new + 0.5 * torch.randn(batch, seq, generator=draw)
    advantages = torch.randn(batch, seq, generator=draw)
    rubbish = torch.tensor([float("nan"), float("inf"), -float("inf")])[torch.randint(0, 3, (batch, seq), generator=draw)]
    new, old, advantages = (value.where(mask, rubbish).to(dtype) for value in (new, old, advantages))
    return new, old, advantages, mask
