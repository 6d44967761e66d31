"""Several rewards of the same rows as one."""

import math
from typing import cast

import torch

from rft.errors import BadInput
from rft.rewards.scoring import Rewards


def combine_rewards(*parts: tuple[float, Rewards]) -> Rewards:
    """The weighted sum of rewards, for rows that have all of them.

        r_i = Σ_k w_k r_ki

    A row that lacks one of them has none (`valid` is False), with the failures of all of them. To weigh sources of different scale alike,
    standardise each over the rows of all ranks first:

        values = rft.over_ranks(state, normalisation.batch_normalise, rewards.values, rewards.valid)
        combine_rewards((0.5, dataclasses.replace(rewards, values=values)), (1.0, other))

    Raises `BadInput` for none, for what is no pair of a finite number and rewards, and where they are of different numbers of rows.
    """
    if wrong := [_shown(part) for part in parts if not _is_part(part)] or (["none"] if not parts else []):
        raise BadInput(f"combine_rewards needs pairs (weight, rewards), each weight a finite number, got {', '.join(wrong)}")
    if len({len(rewards.values) for _, rewards in parts}) > 1:
        raise BadInput(f"combine_rewards needs rewards of the same rows, got {[len(rewards.values) for _, rewards in parts]} rows")
    valid = torch.stack([rewards.valid for _, rewards in parts]).all(dim=0)
    total = torch.stack([weight * rewards.values for weight, rewards in parts]).sum(dim=0)
    failures = sorted((failure for _, rewards in parts for failure in rewards.failures), key=lambda failure: failure.row)
    return Rewards(values=torch.where(valid, total, 0.0), valid=valid, failures=tuple(failures))


def _is_part(part: object) -> bool:
    """A bool is no weight."""
    if not isinstance(part, tuple) or len(given := cast("tuple[object, ...]", part)) != 2:
        return False
    weight, rewards = given
    return isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight) and isinstance(rewards, Rewards)


def _shown(part: object) -> str:
    """A pair with the kind of its second half, and of anything else its kind."""
    if not isinstance(part, tuple) or len(given := cast("tuple[object, ...]", part)) != 2:
        return type(part).__name__
    return f"({given[0]!r}, {type(given[1]).__name__})"
