import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft.errors import BadInput
from rft.parallel.batches import plan

LENGTHS = st.lists(st.lists(st.integers(1, 40), max_size=12), min_size=1, max_size=5)
BUDGETS = st.integers(1, 120)


def test_by_hand() -> None:
    # rank 0, longest first: 9 | 5 4 | 2; the second takes two rows of 5 (10 tokens), a third would be 15. Rank 1 needs one.
    assert plan([[4, 9, 2, 5], [3, 3]], 10) == (((1,), (3, 0), (2,)), ((0, 1), (), ()))
    assert plan([[], []], 10) == ((), ())


@given(LENGTHS, BUDGETS)
def test_every_rank_has_the_same_number(lengths: list[list[int]], budget: int) -> None:
    assert len({len(batches) for batches in plan(lengths, budget)}) == 1


@given(LENGTHS, BUDGETS)
def test_every_row_stands_exactly_once(lengths: list[list[int]], budget: int) -> None:
    for own, batches in zip(lengths, plan(lengths, budget), strict=True):
        assert sorted(row for batch in batches for row in batch) == list(range(len(own)))


@given(LENGTHS, BUDGETS)
def test_the_budget_is_kept_but_for_single_rows(lengths: list[list[int]], budget: int) -> None:
    for own, batches in zip(lengths, plan(lengths, budget), strict=True):
        for batch in filter(None, batches):
            assert len(batch) == 1 or len(batch) * max(own[row] for row in batch) <= budget


@given(LENGTHS, BUDGETS)
def test_no_rank_waits_for_nothing(lengths: list[list[int]], budget: int) -> None:
    assert all(any(batches[k] for batches in plan(lengths, budget)) for k in range(len(plan(lengths, budget)[0])))


def fewest(lengths: list[int], budget: int) -> int:
    """The smallest number of batches, by trying every way to split the sorted rows."""
    rows = sorted(lengths, reverse=True)
    best = [0]
    for end in range(1, len(rows) + 1):
        starts = (s for s in range(end) if end - s == 1 or (end - s) * rows[s] <= budget)
        best.append(1 + min(best[s] for s in starts))
    return best[-1]


@given(st.lists(st.integers(1, 20), max_size=10), st.integers(1, 60))
def test_there_are_no_more_than_needed(lengths: list[int], budget: int) -> None:
    assert len(plan([lengths], budget)[0]) == fewest(lengths, budget)


@given(LENGTHS, BUDGETS)
def test_empty_ones_come_last(lengths: list[list[int]], budget: int) -> None:
    for batches in plan(lengths, budget):
        filled = [bool(batch) for batch in batches]
        assert filled == sorted(filled, reverse=True)


@pytest.mark.parametrize(("lengths", "budget"), [([[3]], 0), ([[0]], 5), ([[2], [-1]], 5)])
def test_what_cannot_be_planned_is_refused(lengths: list[list[int]], budget: int) -> None:
    with pytest.raises(BadInput, match="at least 1"):
        plan(lengths, budget)
