import re

import pytest

from rft.data.arithmetic import sums
from rft.errors import BadInput


def parts(text):
    return tuple(map(int, re.fullmatch(r"What is (\d+) \+ (\d+)\?", text).groups()))


def test_answers_are_right_and_every_sum_is_on_one_side():
    split = sums(largest=50, held_out=100, seed=3)
    for question in (*split.train, *split.held_out):
        a, b = parts(question.text)
        assert 1 <= a <= 50
        assert 1 <= b <= 50
        assert question.answer == str(a + b)
        assert question.id == (a - 1) * 50 + b - 1
    assert len(split.held_out) == 100
    trained = {frozenset(parts(q.text)) for q in split.train}
    measured = {frozenset(parts(q.text)) for q in split.held_out}
    assert not trained & measured
    assert len(trained | measured) == 50 * 51 // 2


def test_training_has_both_orders_and_measuring_no_bias():
    split = sums(largest=50, held_out=200)
    assert {parts(q.text)[::-1] for q in split.train} == {parts(q.text) for q in split.train}
    smaller_first = sum(parts(q.text)[0] < parts(q.text)[1] for q in split.held_out)
    assert 60 < smaller_first < 140


def test_the_seed_alone_decides():
    assert sums(seed=1) == sums(seed=1)
    assert sums(seed=1) != sums(seed=2)


@pytest.mark.parametrize("counts", [{"largest": 0}, {"largest": -3}, {"held_out": 0}, {"held_out": -1}, {"largest": 2, "held_out": 3}])
def test_counts_that_leave_a_side_empty(counts):
    with pytest.raises(BadInput, match="sums needs"):
        sums(**counts)
