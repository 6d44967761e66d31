import dataclasses as dc

import pytest
import torch

from rft.images import Placeholder
from rft.trainers.microbatches import cut, share_of, some_rows, to_width
from tests.trainers.batches import ROWS, random_experience, rows_of, some_old

SOURCE = random_experience()
BATCH = rows_of(SOURCE, *range(8))
OLD = some_old(SOURCE, SOURCE.logprobs)


def test_a_share_counts_what_was_sampled() -> None:
    share = share_of(BATCH.tokens, BATCH.mask, BATCH.sampled, torch.arange(8) == 2, vocab=250)
    assert share.rows.lengths == tuple(length for length, _ in ROWS)
    assert share.rows.sampled == tuple(length - max(prompt, 1) for length, prompt in ROWS)
    assert share.rows.demonstrated == (False, False, True, False, False, False, False, False)
    assert share.problem is None
    assert share_of(BATCH.tokens[:0], BATCH.mask[:0], BATCH.sampled[:0], vocab=250).rows.lengths == ()
    assert share_of(torch.tensor([[9]]), torch.tensor([[False]]), torch.tensor([[False]]), vocab=1).rows.lengths == (
        1,
    )  # a row without tokens takes a place


@pytest.mark.parametrize(
    ("mask", "sampled", "word"),
    [
        ([True, False, True], [False, False, False], "hole"),
        ([False, True, True], [False, False, True], "hole"),
        ([True, True, True], [True, False, True], "column 0"),
        ([True, True, False], [False, True, True], "padding"),
    ],
)
def test_a_share_tells_what_is_wrong(mask: list[bool], sampled: list[bool], word: str) -> None:
    assert word in str(
        share_of(torch.zeros(1, len(mask), dtype=torch.int64), torch.tensor([mask]), torch.tensor([sampled]), vocab=1).problem
    )


def test_rows_are_cut_to_their_longest_and_old_logprobs_with_them() -> None:
    micro = cut(BATCH, OLD, (2, 5))
    assert micro.rows.tokens.shape == micro.rows.mask.shape == micro.rows.advantages.shape == (2, 6)
    assert torch.equal(micro.rows.tokens, SOURCE.tokens[[2, 5], :6])
    assert micro.rows.rows.tolist() == [2, 5]
    assert micro.old is not None
    assert torch.equal(micro.old, OLD[[2, 5], :6])
    assert cut(BATCH, None, (2, 5)).old is None


@pytest.mark.parametrize("old", [None, OLD])
def test_a_filler_has_nothing_sampled(old: torch.Tensor | None) -> None:
    micro = cut(BATCH, old, ())
    assert not micro.rows.sampled.any()
    assert micro.rows.tokens.shape == micro.rows.mask.shape == (1, 1)
    assert (micro.old is None) == (old is None)


def test_rows_without_tokens_keep_a_column() -> None:
    empty = dc.replace(rows_of(SOURCE, 0), mask=torch.zeros_like(BATCH.mask[:1]))
    assert cut(empty, None, (0,)).rows.tokens.shape == (1, 1)


def test_some_rows_are_cut_and_a_filler_wants_nothing() -> None:
    heat = torch.arange(8.0)
    tokens, mask, wanted, temperature = some_rows(SOURCE.tokens, SOURCE.mask, SOURCE.sampled, heat, (5, 2))
    assert torch.equal(tokens, SOURCE.tokens[[5, 2], :6])
    assert torch.equal(mask, SOURCE.mask[[5, 2], :6])
    assert torch.equal(wanted, SOURCE.sampled[[5, 2], :6])
    assert temperature.tolist() == [5, 2]
    tokens, mask, wanted, temperature = some_rows(SOURCE.tokens, SOURCE.mask, SOURCE.sampled, heat, ())
    assert (tokens.tolist(), mask.tolist(), wanted.tolist(), temperature.tolist()) == ([[0]], [[True]], [[False]], [1.0])


def test_to_width_crops_and_pads() -> None:
    value = torch.tensor([[1, 2, 3]])
    assert to_width(value, 2).tolist() == [[1, 2]]
    assert to_width(value, 5).tolist() == [[1, 2, 3, 0, 0]]
    assert to_width(torch.tensor([[True]]), 2).tolist() == [[True, False]]


@pytest.mark.parametrize("token", [-1, 250])
def test_tokens_that_the_model_does_not_know_are_told(token: int) -> None:
    tokens = torch.tensor([[3, token]])
    share = share_of(tokens, torch.ones(1, 2, dtype=torch.bool), torch.tensor([[False, True]]), vocab=250)
    assert f"{max(token, 3)}, and the model's vocabulary from 0 to 249" in str(share.problem)


def test_images_that_were_lost_are_told() -> None:
    """A placeholder that was sampled is a token like any other."""
    mark = Placeholder(token=7, patches=4, numbers=24)
    tokens, mask = torch.tensor([[3, 7, 5], [3, 5, 7]]), torch.ones(2, 3, dtype=torch.bool)
    sampled = torch.tensor([[False, False, True], [False, False, True]])
    assert "row 0: it has placeholders of images (token 7), and no images" in str(
        share_of(tokens, mask, sampled, vocab=9, placeholder=mark).problem
    )
    assert share_of(tokens[1:], mask[1:], sampled[1:], vocab=9, placeholder=mark).problem is None
    assert share_of(tokens, mask, sampled, vocab=9).problem is None
