import pytest
import torch

from rft.trainers.microbatches import cut, share_of, to_width
from tests.trainers.batches import ROWS, random_experience, rows_of, some_old

SOURCE = random_experience()
BATCH = rows_of(SOURCE, *range(8))
OLD = some_old(SOURCE, SOURCE.logprobs)


def test_a_share_counts_what_was_sampled() -> None:
    share = share_of(BATCH.mask, BATCH.sampled)
    assert share.lengths == tuple(length for length, _ in ROWS)
    assert share.tokens == sum(length - max(prompt, 1) for length, prompt in ROWS)
    assert share.sequences == 7  # row 6 sampled nothing
    assert share.problem is None


def test_a_share_tells_what_is_wrong() -> None:
    hole, late = torch.tensor([[True, False, True]]), torch.tensor([[False, True, True]])
    assert "hole" in str(share_of(hole).problem)
    assert "hole" in str(share_of(late).problem)
    assert "column 0" in str(share_of(torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 3, dtype=torch.bool)).problem)


def test_rows_are_cut_to_their_longest_and_old_logprobs_with_them() -> None:
    micro = cut(BATCH, OLD, (2, 5))
    assert micro.rows.tokens.shape == micro.rows.mask.shape == micro.rows.advantages.shape == (2, 6)
    assert torch.equal(micro.rows.tokens, SOURCE.tokens[[2, 5], :6].clamp(min=0))
    assert micro.rows.tokens[0, 5] == 0  # a token, where padding need not be one
    assert micro.rows.rows.tolist() == [2, 5]
    assert micro.old is not None
    assert torch.equal(micro.old, OLD[[2, 5], :6])
    assert cut(BATCH, None, (2, 5)).old is None


@pytest.mark.parametrize("old", [None, OLD])
def test_a_filler_has_nothing_sampled(old: torch.Tensor | None) -> None:
    micro = cut(BATCH, old, ())
    assert not micro.rows.sampled.any()
    assert micro.rows.tokens.shape == (1, 2)
    assert (micro.old is None) == (old is None)


def test_a_row_of_one_token_gets_a_column_to_predict() -> None:
    mask = torch.zeros_like(BATCH.mask)
    mask[:, 0] = True
    single = rows_of(SOURCE, 0)
    object.__setattr__(single, "mask", mask[:1])
    assert cut(single, None, (0,)).rows.tokens.shape == (1, 2)


def test_to_width_crops_and_pads() -> None:
    value = torch.tensor([[1, 2, 3]])
    assert to_width(value, 2).tolist() == [[1, 2]]
    assert to_width(value, 5).tolist() == [[1, 2, 3, 0, 0]]
    assert to_width(torch.tensor([[True]]), 2).tolist() == [[True, False]]
