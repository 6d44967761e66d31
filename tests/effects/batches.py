"""A batch whose groups lie on two ranks, and every function that is computed over a whole batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rft.ops import advantages, groups, normalisation, returns

SHARES = ((0, 3, 4, 6, 7, 9), (1, 2, 5, 8))
"""Rows of each rank: of unequal number, with groups on both."""
IDS = (5, 5, 5, 5, 2, 2, 2, 8, 2, 9)
REWARDS = (0.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 3.0, 1.0, 2.0)
"""Group 5 teaches, group 2 is all equal, 8 and 9 are of one row each."""
LENGTHS = (4, 2, 0, 7, 1, 3, 5, 2, 6, 1)


def columns_of(rows: Sequence[int]) -> dict[str, Tensor]:
    """The columns of some rows, as wide as their longest."""
    lengths = torch.tensor(LENGTHS)[list(rows)]
    mask = torch.arange(int(lengths.max()) + 1)[None, :] < lengths[:, None]
    noise = torch.randn(len(LENGTHS), 9, generator=torch.Generator().manual_seed(1))[list(rows), : mask.shape[1]]
    rewards = torch.tensor(REWARDS)[list(rows)]
    return {
        "rewards": rewards,
        "groups": torch.tensor(IDS)[list(rows)],
        "valid": torch.tensor(rows) != 3,
        "greedy": rewards / 2,
        "lengths": lengths,
        "mask": mask,
        "logprobs": torch.where(mask, noise, 0.0),
        "earned": returns.token_rewards(rewards, mask),
    }


PLAIN = ("rewards", "groups", "valid")
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "grpo": (advantages.grpo, PLAIN),
    "dr_grpo": (advantages.dr_grpo, PLAIN),
    "rloo": (advantages.rloo, PLAIN),
    "remax": (lambda r, v, g: advantages.remax(r, v, greedy=g), ("rewards", "valid", "greedy")),
    "opo": (lambda r, g, v, n: advantages.opo(r, g, v, lengths=n), (*PLAIN, "lengths")),
    "cpgd": (lambda r, g, v: advantages.cpgd(r, g, v, cap=2.0), PLAIN),
    "pass_at_k": (lambda r, g, v: advantages.pass_at_k((r > 0.5).float(), g, v, k=2), PLAIN),
    "max_at_k": (lambda r, g, v: advantages.max_at_k(r, g, v, k=2), PLAIN),
    "reinforce_baseline": (lambda r, g, v, n: advantages.reinforce_baseline(r, g, v, lengths=n), (*PLAIN, "lengths")),
    "batch_normalise": (normalisation.batch_normalise, ("rewards", "valid")),
    "whiten": (normalisation.whiten, ("logprobs", "mask")),
    "reinforce_plus_plus": (returns.reinforce_plus_plus, ("earned", "mask")),
    "all_equal": (groups.all_equal, PLAIN),
    "others": (groups.others, PLAIN),
}
