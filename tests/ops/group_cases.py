"""Random rewards of groups: of unequal size, of one, all equal, mixed up by position, with rows whose reward failed."""

import dataclasses as dc

import pytest
import torch
from torch import Tensor

SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 206))]
DTYPES = [torch.float32, torch.bfloat16]


@dc.dataclass(frozen=True)
class Case:
    rewards: Tensor
    groups: Tensor
    valid: Tensor
    lengths: Tensor

    def members(self, row: int) -> list[int]:
        """The valid rows of the group of a row, by position."""
        return [j for j in range(len(self.rewards)) if self.groups[j] == self.groups[row] and self.valid[j]]

    def taken(self, order: Tensor) -> "Case":
        return Case(self.rewards[order], self.groups[order], self.valid[order], self.lengths[order])


def random_groups(seed: int, dtype: torch.dtype, *, binary: bool = False) -> Case:
    """Rewards that bf16 holds exactly where valid, NaN and infinity elsewhere; lengths from 0 on."""
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(0, 24, (), generator=draw))
    groups = torch.randint(-2, 3, (count,), generator=draw) * 1_000_003
    levels = int(torch.randint(1, 6, (), generator=draw))
    rewards = torch.randint(0, 2 if binary else levels, (count,), generator=draw) / (1 if binary else 4)
    valid = torch.rand(count, generator=draw) < 0.8
    rubbish = torch.tensor([float("nan"), float("inf"), -float("inf")])[torch.randint(0, 3, (count,), generator=draw)]
    lengths = torch.randint(0, 9, (count,), generator=draw)
    return Case(rewards.where(valid, rubbish).to(dtype), groups, valid, lengths)
