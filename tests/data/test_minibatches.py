import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft.data.minibatches import Cut, MinibatchCursor, minibatches, minibatches_per_epoch, next_minibatch
from rft.errors import BadInput
from rft.experience import Experience, Minibatch
from rft.state import BatchId


def experience(rows):
    flat = torch.arange(rows)
    wide = torch.zeros(rows, 3)
    return Experience(
        batches=(BatchId("b"),),
        origin=torch.zeros_like(flat),
        rows=flat,
        tokens=flat[:, None].expand(rows, 3),
        mask=wide == 0,
        sampled=wide == 0,
        logprobs=wide,
        groups=flat // 2,
        rewards=flat.float(),
        advantages=wide,
        temperature=torch.ones(rows),
        demonstrated=torch.zeros(rows, dtype=torch.bool),
    )


def rows_of(source, cut):
    return [m.rows.tolist() for m in minibatches(source, cut)]


def test_whole_by_default():
    (only,) = minibatches(experience(5), Cut())
    assert isinstance(only, Minibatch)
    assert sorted(only.rows.tolist()) == list(range(5))
    assert only.tokens[:, 0].tolist() == only.rows.tolist()


def test_no_rows_are_still_one_minibatch_when_nothing_is_cut():
    assert rows_of(experience(0), Cut(epochs=2)) == [[], []]


@given(st.integers(1, 20), st.integers(1, 7), st.integers(1, 3), st.sampled_from(["keep", "drop"]), st.integers(0, 3))
def test_every_epoch_has_each_row_once(rows, size, epochs, last, seed):
    cut = Cut(size=size, epochs=epochs, last=last, seed=seed)
    if last == "drop" and size > rows:
        with pytest.raises(BadInput, match="give no mini-batch"):
            minibatches(experience(rows), cut)
        return
    per_epoch = rows // size if last == "drop" else -(-rows // size)
    found = rows_of(experience(rows), cut)
    assert minibatches_per_epoch(rows, cut) == per_epoch
    assert len(found) == per_epoch * epochs
    for epoch in range(epochs):
        seen = [row for part in found[epoch * per_epoch : (epoch + 1) * per_epoch] for row in part]
        assert len(set(seen)) == len(seen) == (rows if last == "keep" else per_epoch * size)
        assert all(len(part) == size for part in found[epoch * per_epoch : (epoch + 1) * per_epoch - 1])


def test_epochs_are_shuffled_by_the_seed():
    one, two = (rows_of(experience(12), Cut(size=4, epochs=2, seed=seed)) for seed in (0, 1))
    assert one != two
    assert one[:3] != one[3:]
    assert one == rows_of(experience(12), Cut(size=4, epochs=2, seed=0))


def test_the_cursor_alone_says_where_to_go_on():
    source, cut, cursor = experience(7), Cut(size=3, epochs=2), MinibatchCursor()
    for expected in rows_of(source, cut):
        found = next_minibatch(source, cut, MinibatchCursor(epoch=cursor.epoch, position=cursor.position))
        assert found is not None
        assert found[0].rows.tolist() == expected
        cursor = found[1]
    assert next_minibatch(source, cut, cursor) is None


@pytest.mark.parametrize("bad", [{"size": 0}, {"size": -1}, {"epochs": 0}, {"last": "pad"}, {"size": 4.0}, {"epochs": 1.5}])
def test_cuts_that_cannot_work(bad):
    with pytest.raises(BadInput):
        Cut(**bad)


def test_what_is_no_experience_or_cut_is_told_at_once():
    with pytest.raises(BadInput, match=r"source must be Experience, got list; experience\(rollouts, rewards, advantages\) makes one"):
        minibatches([], Cut())
    with pytest.raises(BadInput, match=r"cut must be Cut, got int; write Cut\(size=…\)"):
        minibatches(experience(4), 4)


def test_an_empty_rank_is_told_before_the_others_wait_for_it():
    with pytest.raises(BadInput, match="0 rows give no mini-batch of size=4"):
        minibatches(experience(0), Cut(size=4))
