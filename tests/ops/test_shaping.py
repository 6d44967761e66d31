import pytest
import torch

from rft.errors import BadInput, ShapeError
from rft.ops import shaping
from tests.ops.group_cases import DTYPES, SEEDS, random_groups

NAN, INF = float("nan"), float("inf")


def test_overlong_penalty_by_hand() -> None:
    # max_length 20, buffer 4: free up to 16, then a quarter for every token, −1 at 20 and beyond
    lengths = torch.tensor([0, 1, 15, 16, 17, 18, 19, 20, 21, 100])
    expected = [0.0, 0.0, 0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]
    assert shaping.overlong_penalty(lengths, max_length=20, buffer=4).tolist() == expected
    # the paper's: 16384 expected, 4096 more tolerated
    assert shaping.overlong_penalty(torch.tensor([16384, 18432, 20480]), max_length=20480, buffer=4096).tolist() == [0.0, -0.5, -1.0]


@pytest.mark.parametrize("seed", SEEDS)
def test_overlong_penalty_against_the_paper_s_cases(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    longest = int(torch.randint(1, 50, (), generator=draw))
    buffer = int(torch.randint(1, longest + 1, (), generator=draw))
    lengths = torch.randint(0, 60, (30,), generator=draw)
    result = shaping.overlong_penalty(lengths, max_length=longest, buffer=buffer)
    assert result.dtype == torch.float32
    for length, penalty in zip(lengths.tolist(), result.tolist(), strict=True):
        if length <= longest - buffer:
            expected = 0.0
        elif length <= longest:
            expected = ((longest - buffer) - length) / buffer
        else:
            expected = -1.0
        assert penalty == pytest.approx(expected, rel=1e-6)


def test_no_lengths() -> None:
    assert shaping.overlong_penalty(torch.zeros(0, dtype=torch.int64), max_length=1, buffer=1).tolist() == []


def test_clip_rewards_by_hand() -> None:
    rewards = torch.tensor([-3.0, 0.5, 3.0, NAN, INF])
    valid = torch.tensor([True, True, True, False, False])
    assert shaping.clip_rewards(rewards, valid, low=-1.0, high=2.0).tolist() == [-1.0, 0.5, 2.0, 0.0, 0.0]
    assert shaping.clip_rewards(rewards[:3], low=1.0, high=2.0).tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_clip_rewards_against_a_loop(seed: int, dtype: torch.dtype) -> None:
    case = random_groups(seed, dtype)
    result = shaping.clip_rewards(case.rewards, case.valid, low=0.25, high=0.625)
    assert result.dtype == torch.float32
    expected = [min(max(r, 0.25), 0.625) if good else 0.0 for r, good in zip(case.rewards.tolist(), case.valid.tolist(), strict=True)]
    assert result.tolist() == expected


@pytest.mark.parametrize(("max_length", "buffer"), [(4, 0), (4, 5), (0, 0), (4, -1)])
def test_refused_buffers(max_length: int, buffer: int) -> None:
    with pytest.raises(BadInput, match="0 < buffer <= max_length"):
        shaping.overlong_penalty(torch.tensor([1]), max_length=max_length, buffer=buffer)


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, 1.0), (NAN, 1.0)])
def test_refused_bounds(low: float, high: float) -> None:
    with pytest.raises(BadInput, match="low must be below high"):
        shaping.clip_rewards(torch.zeros(1), low=low, high=high)


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="overlong_penalty"):
        shaping.overlong_penalty(torch.zeros(2), max_length=4, buffer=1)
