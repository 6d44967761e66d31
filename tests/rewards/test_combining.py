"""Rewards of several sources as one, worked out by hand."""

import math
from typing import Any

import pytest
import torch

from rft.errors import BadInput
from rft.rewards.combining import combine_rewards
from rft.rewards.scoring import RewardFailure, Rewards


def rewards(values: list[float], *failed: int) -> Rewards:
    """Where a row failed its value is 0."""
    valid = torch.tensor([row not in failed for row in range(len(values))], dtype=torch.bool)
    failures = tuple(RewardFailure(row=row, kind="raised", message=f"of {values}") for row in failed)
    return Rewards(values=torch.where(valid, torch.tensor(values), 0.0), valid=valid, failures=failures)


def test_the_sum_is_weighted() -> None:
    total = combine_rewards((0.5, rewards([1.0, 2.0, -4.0])), (2.0, rewards([3.0, 0.25, 1.0])))
    assert total.values.tolist() == [6.5, 1.5, 0.0]
    assert total.valid.all()
    assert total.failures == ()


def test_a_row_that_lacks_one_has_none_and_says_why() -> None:
    total = combine_rewards((1.0, rewards([1.0, 2.0, 3.0, 4.0], 3, 1)), (1.0, rewards([10.0, 20.0, 30.0, 40.0], 0, 1)))
    assert total.values.tolist() == [0.0, 0.0, 33.0, 0.0]
    assert total.valid.tolist() == [False, False, True, False]
    assert [failure.row for failure in total.failures] == [0, 1, 1, 3]
    assert {failure.message for failure in total.failures if failure.row == 1} == {"of [1.0, 2.0, 3.0, 4.0]", "of [10.0, 20.0, 30.0, 40.0]"}


def test_one_alone_and_a_weight_of_nothing() -> None:
    assert combine_rewards((-1.0, rewards([1.0, 2.0]))).values.tolist() == [-1.0, -2.0]
    assert combine_rewards((1.0, rewards([1.0, 2.0])), (0.0, rewards([5.0, 5.0], 0))).valid.tolist() == [False, True]
    assert combine_rewards((1.0, rewards([]))).values.shape == (0,)


@pytest.mark.parametrize(
    "parts",
    [
        (),
        ((math.nan, rewards([1.0])),),
        ((1.0, rewards([1.0])), (1.0, rewards([1.0, 2.0]))),
        (rewards([1.0]),),
        ((1.0,),),
        ((True, rewards([1.0])),),
        ((1.0, [1.0]),),
    ],
)
def test_what_cannot_be_added_is_refused(parts: Any) -> None:
    with pytest.raises(BadInput, match="combine_rewards needs"):
        _ = combine_rewards(*parts)
