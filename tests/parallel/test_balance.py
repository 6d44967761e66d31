"""Prompts over DP groups: nothing is lost, nothing moves without need, and no group waits long for another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft.parallel.balance import SLACK, balanced

RANKS = st.integers(1, 4).flatmap(
    lambda tp: st.lists(st.lists(st.integers(1, 2000), max_size=8), min_size=1, max_size=4).map(lambda rows: (tp, rows * tp))
)


@pytest.mark.parametrize(
    ("tokens", "groups", "chosen"),
    [
        ([[10, 10], [10, 10]], (0, 1), [[0, 0], [1, 1]]),
        ([[10, 10, 10, 10], []], (0, 1), [[0, 0, 1, 1], []]),
        ([[100, 1], [1, 1]], (0, 1), [[0, 1], [1, 1]]),  # the longest stays, and what is with it goes
        ([[8, 7], [1, 2]], (0, 1), [[0, 1], [0, 1]]),
        ([[10], [10], [10], [10]], (0, 0, 1, 1), [[0], [0], [1], [1]]),  # TP 2: two ranks feed one engine
        ([[10, 10], [10, 10], [], []], (0, 0, 1, 1), [[0, 0], [1, 1], [], []]),
        ([[], []], (0, 1), [[], []]),
    ],
)
def test_by_hand(tokens: list[list[int]], groups: tuple[int, ...], chosen: list[list[int]]) -> None:
    assert balanced(tokens, groups) == chosen


@given(RANKS)
def test_no_group_has_much_more_than_its_share(given: tuple[int, list[list[int]]]) -> None:
    tp, tokens = given
    groups = [rank // tp for rank in range(len(tokens))]
    count, chosen = max(groups) + 1, balanced(tokens, groups)
    assert [len(row) for row in chosen] == [len(row) for row in tokens]
    load = [0] * count
    for sizes, places in zip(tokens, chosen, strict=True):
        for size, group in zip(sizes, places, strict=True):
            load[group] += size
    total, longest = sum(map(sum, tokens)), max((size for sizes in tokens for size in sizes), default=0)
    assert sum(load) == total
    assert max(load) <= max(SLACK * total / count, total / count + longest)


@given(RANKS)
def test_what_is_balanced_stays_where_it_is(given: tuple[int, list[list[int]]]) -> None:
    tp, tokens = given
    groups = [rank // tp for rank in range(len(tokens))]
    own = [sum(sum(sizes) for sizes, group in zip(tokens, groups, strict=True) if group == g) for g in range(max(groups) + 1)]
    if max(own) <= SLACK * sum(own) / len(own):
        assert balanced(tokens, groups) == [[group] * len(sizes) for sizes, group in zip(tokens, groups, strict=True)]
