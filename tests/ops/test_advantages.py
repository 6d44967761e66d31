import math

import pytest
import torch

from rft.errors import ShapeError
from rft.ops.advantages import group_advantages, per_token


def naive(rewards: list[float], groups: list[int], valid: list[bool]) -> list[float]:
    """Group by group, in double precision."""
    result = []
    for reward, group, good in zip(rewards, groups, valid, strict=True):
        others = [r for r, g, v in zip(rewards, groups, valid, strict=True) if g == group and v]
        if not good or max(others) == min(others):
            result.append(0.0)
            continue
        mean = sum(others) / len(others)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in others) / len(others))
        result.append((reward - mean) / (deviation + 1e-6))
    return result


def test_by_hand() -> None:
    # group 7: mean 1, deviations ±1, std 1; group 3: rewards 0, 0, 0, 4: mean 1, std √3; mixed up by position
    rewards = torch.tensor([0.0, 0.0, 4.0, 2.0, 0.0, 0.0])
    groups = torch.tensor([7, 3, 3, 7, 3, 3])
    root = math.sqrt(3)
    expected = torch.tensor([-1.0, -1 / root, 3 / root, 1.0, -1 / root, -1 / root])
    torch.testing.assert_close(group_advantages(rewards, groups), expected, atol=3e-6, rtol=0)


def test_equal_rewards_and_single_rows_are_exactly_zero() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0])
    assert group_advantages(rewards, torch.tensor([1, 1, 1, 2])).tolist() == [0.0] * 4
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_failed_rewards_take_no_part() -> None:
    rewards = torch.tensor([1.0, math.nan, 3.0, math.inf, 2.0])
    valid = torch.tensor([True, False, True, False, True])
    groups = torch.tensor([0, 0, 0, 1, 1])
    expected = torch.tensor([-1.0, 0.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(group_advantages(rewards, groups, valid), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(30))
def test_against_a_loop(seed: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 24, (), generator=draw))
    groups = torch.randint(-3, 3, (count,), generator=draw)
    rewards = torch.randint(0, 4, (count,), generator=draw).to(dtype) / 4
    valid = torch.rand(count, generator=draw) < 0.8
    result = group_advantages(rewards, groups, valid)
    assert result.dtype == torch.float32
    expected = torch.tensor(naive(rewards.tolist(), groups.tolist(), valid.tolist()))
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_per_token() -> None:
    sampled = torch.tensor([[False, True, True], [False, False, False]])
    assert per_token(torch.tensor([2.0, 3.0]), sampled).tolist() == [[0.0, 2.0, 2.0], [0.0, 0.0, 0.0]]


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="group_advantages"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
