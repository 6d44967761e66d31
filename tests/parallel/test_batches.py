"""Whatever the rows: each is planned once, budgets are kept, the ranks have equally many passes, and none is idle without need."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rft.errors import BadInput
from rft.ops.aggregation import Totals
from rft.parallel.batches import Batches, Layout, Rows, plan, work

RANKS = st.lists(st.lists(st.integers(1, 40), max_size=12), min_size=1, max_size=5)
BUDGETS = st.integers(1, 120)
WIDTHS = st.integers(0, 6)
"""At 0 the work of a row is its length squared, at 6 the linear part is the larger one for most rows here."""
LAYOUTS: st.SearchStrategy[Layout] = st.sampled_from(("packed", "padded"))


def rows(lengths: Sequence[int]) -> Rows:
    return Rows(lengths=tuple(lengths), sampled=(1,) * len(lengths), demonstrated=(False,) * len(lengths))


def batches(lengths: Sequence[Sequence[int]], budget: int, width: int = 1, layout: Layout = "packed") -> tuple[Batches, ...]:
    return plan([rows(own) for own in lengths], budget, width=width, layout=layout).ranks


def tokens(lengths: Sequence[int], layout: Layout) -> int:
    """What a pass over rows of these lengths takes of the budget."""
    return sum(lengths) if layout == "packed" else len(lengths) * max(lengths, default=0)


def load(lengths: Sequence[int], width: int, layout: Layout) -> int:
    """The work of such a pass."""
    longest = [max(lengths)] * len(lengths) if layout == "padded" and lengths else lengths
    return sum(work(length, width) for length in longest)


def shape(own: Sequence[int], planned: Batches) -> list[list[int]]:
    """The lengths in each pass."""
    return [sorted(own[row] for row in batch) for batch in planned]


# ---- by hand ----


def test_packed_by_hand() -> None:
    # Rank 0, longest first: 9 has a pass to itself (9 + 2 > 10), then 5 and 4, and 2 finds no room there: three passes. By length²:
    # 81 | 25 + 16 | 4. The 4 does better beside the 2 (25 | 20 rather than 41 | 4), and the heaviest comes first: 81 | 25 | 20.
    # Rank 1 would need one pass; over the three its rows go to two, the first of them to the one that was empty.
    assert batches([[4, 9, 2, 5], [3, 3]], 10, width=0) == (((1,), (3,), (0, 2)), ((1,), (0,), ()))
    assert batches([[], []], 10) == ((), ())


def test_padded_by_hand() -> None:
    # 9 | 5 4 | 2: two rows as wide as the 5 take 10 tokens, three would take 15. By rows × longest² that is 81 | 50 | 4.
    # Rank 1: three rows of 3 take 9 tokens, but in three passes the heaviest is lightest with one each.
    assert batches([[4, 9, 2, 5], [3, 3, 3]], 10, width=0, layout="padded") == (((1,), (3, 0), (2,)), ((0,), (1,), (2,)))


def test_the_work_of_a_row_by_hand() -> None:
    # Four tokens at width 2: 4 × (24 + 4).
    assert work(4, 2) == 112


def test_totals_by_hand() -> None:
    # Rank 0 sampled 2 + 0 tokens in one row that sampled at all, and demonstrates 5; rank 1 sampled 4 in one row.
    first = Rows(lengths=(3, 3, 9), sampled=(2, 0, 5), demonstrated=(False, False, True))
    second = Rows(lengths=(7,), sampled=(4,), demonstrated=(False,))
    assert plan([first, second], 10, width=1).totals == Totals(tokens=6, sequences=2, demonstrated=5)
    assert plan([], 10, width=1).totals == Totals(tokens=0, sequences=0)


@pytest.mark.parametrize(("lengths", "budget"), [([[3]], 0), ([[0]], 5), ([[2], [-1]], 5)])
def test_what_cannot_be_planned_is_refused(lengths: list[list[int]], budget: int) -> None:
    with pytest.raises(BadInput, match="at least 1"):
        batches(lengths, budget)


# ---- always ----


@given(RANKS, BUDGETS, WIDTHS, LAYOUTS)
def test_every_row_stands_exactly_once_on_its_own_rank(lengths: list[list[int]], budget: int, width: int, layout: Layout) -> None:
    for own, planned in zip(lengths, batches(lengths, budget, width, layout), strict=True):
        assert sorted(row for batch in planned for row in batch) == list(range(len(own)))


@given(RANKS, BUDGETS, WIDTHS, LAYOUTS)
def test_the_budget_is_kept_but_for_single_rows(lengths: list[list[int]], budget: int, width: int, layout: Layout) -> None:
    for own, planned in zip(lengths, batches(lengths, budget, width, layout), strict=True):
        assert all(len(batch) <= 1 or tokens(batch, layout) <= budget for batch in shape(own, planned))


@given(RANKS, BUDGETS, WIDTHS, LAYOUTS)
def test_every_rank_has_as_many_passes_and_no_pass_is_empty_everywhere(
    lengths: list[list[int]], budget: int, width: int, layout: Layout
) -> None:
    planned = batches(lengths, budget, width, layout)
    assert len({len(own) for own in planned}) == 1
    assert all(any(together) for together in zip(*planned, strict=True))


@given(RANKS, BUDGETS, WIDTHS, LAYOUTS)
def test_the_heaviest_come_first_so_that_ranks_wait_little(lengths: list[list[int]], budget: int, width: int, layout: Layout) -> None:
    for own, planned in zip(lengths, batches(lengths, budget, width, layout), strict=True):
        loads = [load(batch, width, layout) for batch in shape(own, planned)]
        assert loads == sorted(loads, reverse=True)


@given(RANKS, BUDGETS, WIDTHS, LAYOUTS, st.randoms(use_true_random=False))
def test_the_order_of_rows_and_of_ranks_changes_nothing(
    lengths: list[list[int]], budget: int, width: int, layout: Layout, shuffle: random.Random
) -> None:
    mixed = [shuffle.sample(own, len(own)) for own in lengths]
    order = shuffle.sample(range(len(lengths)), len(lengths))
    before = batches(lengths, budget, width, layout)
    after = batches([mixed[rank] for rank in order], budget, width, layout)
    for rank, planned in zip(order, after, strict=True):
        assert shape(mixed[rank], planned) == shape(lengths[rank], before[rank])


@given(RANKS, BUDGETS, WIDTHS)
@example([[9, 1, 1], [5, 5, 5]], 9, 0)
def test_packed_no_row_would_even_out_two_passes(lengths: list[list[int]], budget: int, width: int) -> None:
    for own, planned in zip(lengths, batches(lengths, budget, width), strict=True):
        for heavy, light in itertools.permutations(shape(own, planned), 2):
            for row in heavy:
                room = tokens([*light, row], "packed") <= budget
                assert not room or load([*light, row], width, "packed") >= load(heavy, width, "packed")


@given(st.lists(st.integers(1, 40), max_size=12), BUDGETS)
def test_where_there_is_room_passes_differ_by_no_more_than_a_row(lengths: list[int], budget: int) -> None:
    """A rank whose rows would all fit into one pass, beside one that needs many."""
    planned = batches([lengths, [budget] * 4], max(budget, sum(lengths)), width=3)[0]
    loads = [load(batch, 3, "packed") for batch in shape(lengths, planned)]
    assert max(loads) - min(loads) <= work(max(lengths, default=0), 3)


# ---- how many ----


def fewest_packed(lengths: Sequence[int], budget: int) -> int:
    """The smallest number of passes, by trying every way to fill them."""
    best = len(lengths)

    def place(left: Sequence[int], used: list[int]) -> None:
        nonlocal best
        if not left:
            best = min(best, len(used))
        elif len(used) < best:
            for k in range(len(used)):
                if used[k] + left[0] <= budget:
                    place(left[1:], [*used[:k], used[k] + left[0], *used[k + 1 :]])
            place(left[1:], [*used, left[0]])

    place(sorted(lengths, reverse=True), [])
    return best


def fewest_padded(lengths: Sequence[int], budget: int, heaviest: int | None = None, width: int = 0) -> int:
    """The smallest number of passes, none heavier than `heaviest`, by trying every way to cut the sorted rows; very large for none."""
    ordered = sorted(lengths, reverse=True)
    best = [0]
    for end in range(1, len(ordered) + 1):
        parts = [(first, ordered[first:end]) for first in range(end)]
        fitting = [f for f, part in parts if len(part) == 1 or tokens(part, "padded") <= budget]
        light = [f for f in fitting if heaviest is None or load(ordered[f:end], width, "padded") <= heaviest]
        best.append(1 + min((best[first] for first in light), default=1000))
    return best[-1]


@given(st.lists(st.integers(1, 20), max_size=8), st.integers(1, 40))
def test_packed_there_are_hardly_more_than_needed(lengths: list[int], budget: int) -> None:
    needed = fewest_packed(lengths, budget)
    assert needed <= len(batches([lengths], budget)[0]) <= (11 * needed + 6) // 9


@given(RANKS, BUDGETS)
def test_padded_there_are_no_more_than_needed(lengths: list[list[int]], budget: int) -> None:
    needed = max(fewest_padded(own, budget) for own in lengths)
    assert len(batches(lengths, budget, layout="padded")[0]) == needed


@given(RANKS, BUDGETS, WIDTHS)
def test_padded_the_heaviest_pass_is_as_light_as_can_be(lengths: list[list[int]], budget: int, width: int) -> None:
    for own, planned in zip(lengths, batches(lengths, budget, width, "padded"), strict=True):
        heaviest = max((load(batch, width, "padded") for batch in shape(own, planned)), default=0)
        assert fewest_padded(own, budget, heaviest, width) <= len(planned)
        assert not own or fewest_padded(own, budget, heaviest - 1, width) > len(planned)


def test_a_real_batch_is_balanced() -> None:
    """Eight ranks with responses of very different length: the time of all, waiting for each other at each pass, is nearly the least."""
    draw = random.Random(0)
    lengths = [[min(16000, int(draw.lognormvariate(7, 1))) for _ in range(128)] for _ in range(8)]
    planned = batches(lengths, 16384, width=4096)
    loads = [[load(batch, 4096, "packed") for batch in shape(own, passes)] for own, passes in zip(lengths, planned, strict=True)]
    assert len(planned[0]) == max(-(-sum(own) // 16384) for own in lengths)
    assert sum(map(max, zip(*loads, strict=True))) < 1.02 * max(map(sum, loads))
    assert Counter(len(passes) for passes in planned) == {len(planned[0]): 8}
