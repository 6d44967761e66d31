"""Rollouts made by hand, for tests of what comes after sampling."""

import torch

from rft.experience import Rollouts
from rft.sampling import Sampling
from rft.state import BatchId, PolicyVersion


def rollouts(*responses, answer="3"):
    """One row per response; row n has n mod 4 sampled tokens."""
    count, width = len(responses), 4
    sampled = torch.zeros(count, width, dtype=torch.bool)
    for row in range(count):
        sampled[row, : row % width] = True
    return Rollouts(
        batch=BatchId("b"),
        tokens=torch.zeros(count, width, dtype=torch.int64),
        mask=torch.ones(count, width, dtype=torch.bool),
        sampled=sampled,
        logprobs=torch.zeros(count, width),
        versions=torch.where(sampled, 0, -1),
        groups=torch.arange(count),
        samples=torch.zeros(count, dtype=torch.int64),
        finish=("stop",) * count,
        questions=("q",) * count,
        responses=tuple(responses),
        answers=(answer,) * count,
        sampling=Sampling(),
        version=PolicyVersion(0),
    )
