import math

import pytest
import torch

from rft.errors import BadInput, ShapeError
from rft.ops import groups as grouped
from tests.ops.group_cases import DTYPES, SEEDS, random_groups

NAN = float("nan")
VALUES = torch.tensor([5.0, 1.0, NAN, 3.0, 2.0, 2.0])
GROUPS = torch.tensor([9, 4, 4, 4, 7, 7])
VALID = torch.tensor([True, True, False, True, True, True])


def test_by_hand() -> None:
    # group 9: 5 alone; group 4: 1 and 3 (the NaN failed): sum 4, mean 2, squares 1 + 1; group 7: 2 and 2
    assert grouped.count(GROUPS, VALID).tolist() == [1, 2, 2, 2, 2, 2]
    assert grouped.total(VALUES, GROUPS, VALID).tolist() == [5, 4, 4, 4, 4, 4]
    assert grouped.others(VALUES, GROUPS, VALID).tolist() == [0, 3, 4, 1, 2, 2]
    assert grouped.mean(VALUES, GROUPS, VALID).tolist() == [5, 2, 2, 2, 2, 2]
    assert grouped.deviation(VALUES, GROUPS, VALID, ddof=0).tolist() == [0, 1, 1, 1, 0, 0]
    assert grouped.deviation(VALUES, GROUPS, VALID, ddof=1).square().tolist() == pytest.approx([0, 2, 2, 2, 0, 0])
    assert grouped.all_equal(VALUES, GROUPS, VALID).tolist() == [True, False, False, False, True, True]
    assert grouped.rank(VALUES, GROUPS, VALID).tolist() == [0, 0, 2, 1, 0, 1]


def test_a_group_without_valid_rows() -> None:
    values, groups, valid = torch.tensor([NAN, 1.0]), torch.tensor([0, 1]), torch.tensor([False, True])
    assert grouped.count(groups, valid).tolist() == [0, 1]
    assert grouped.mean(values, groups, valid).tolist() == [0, 1]
    assert grouped.deviation(values, groups, valid, ddof=1).tolist() == [0, 0]
    assert grouped.all_equal(values, groups, valid).tolist() == [True, True]


def test_no_rows() -> None:
    values, groups = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    for result in (grouped.count(groups), grouped.mean(values, groups), grouped.rank(values, groups), grouped.all_equal(values, groups)):
        assert result.tolist() == []


@pytest.mark.parametrize("count", [1, 3, 7, 1000])
def test_the_mean_of_equal_numbers_is_that_number(count: int) -> None:
    # 0.1 is no fp32 number, and in fp32 the mean of seven of them is another one.
    values = torch.full((count,), 0.1)
    groups = torch.zeros(count, dtype=torch.int64)
    assert grouped.mean(values, groups).tolist() == values.tolist()
    assert grouped.deviation(values, groups, ddof=0).tolist() == [0.0] * count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_against_a_loop(seed: int, dtype: torch.dtype) -> None:
    case = random_groups(seed, dtype)
    args = (case.rewards, case.groups, case.valid)
    results = {
        "count": grouped.count(case.groups, case.valid),
        "total": grouped.total(*args),
        "others": grouped.others(*args),
        "mean": grouped.mean(*args),
        "population": grouped.deviation(*args, ddof=0),
        "sample": grouped.deviation(*args, ddof=1),
        "all_equal": grouped.all_equal(*args),
        "rank": grouped.rank(*args),
    }
    for row in range(len(case.groups)):
        group = [case.rewards[j].item() for j in case.members(row)]
        own = case.rewards[row].item() if case.valid[row] else 0.0
        mean = sum(group) / max(1, len(group))
        squares = sum((x - mean) ** 2 for x in group)
        before = [j for j in case.members(row) if (case.rewards[j].item(), j) < (case.rewards[row].item(), row)]
        expected = {
            "count": len(group),
            "total": sum(group),
            "others": sum(group) - own,
            "mean": mean,
            "population": math.sqrt(squares / max(1, len(group))),
            "sample": math.sqrt(squares / max(1, len(group) - 1)),
            "all_equal": len(set(group)) <= 1,
        }
        if case.valid[row]:
            expected["rank"] = len(before)
        else:
            assert results["rank"][row] >= len(group)
        assert {name: results[name][row].item() for name in expected} == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_rows_does_not_matter(seed: int) -> None:
    case = random_groups(seed, torch.float32)
    order = torch.randperm(len(case.groups), generator=torch.Generator().manual_seed(seed))
    moved = case.taken(order)
    for function in (grouped.mean, grouped.others, grouped.all_equal):
        assert torch.equal(function(moved.rewards, moved.groups, moved.valid), function(case.rewards, case.groups, case.valid)[order])


def test_refusals() -> None:
    with pytest.raises(BadInput, match="ddof is 0"):
        grouped.deviation(torch.zeros(2), torch.zeros(2, dtype=torch.int64), ddof=2)
    with pytest.raises(ShapeError, match="mean"):
        grouped.mean(torch.zeros(3), torch.zeros(2, dtype=torch.int64))


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(BadInput, match="mark them as not valid"):
        grouped.mean(torch.tensor([1.0, float("nan")]), torch.tensor([0, 0]))
