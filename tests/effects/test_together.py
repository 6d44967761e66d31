"""What is computed over a batch is the same on one rank and on two, and groups may lie on both."""

from pathlib import Path
from typing import Any

import pytest
import torch

import rft
from rft.ops import normalisation
from rft.testing import scripted_launch
from tests.effects.batches import FUNCTIONS, IDS, REWARDS, SHARES, columns_of
from tests.launching import torchrun

SCRIPT = Path(__file__).with_name("together_ranks.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    folder = tmp_path_factory.mktemp("together")
    _ = torchrun(SCRIPT, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_ranks_compute_what_one_computes(name: str, seen: list[dict[str, Any]]) -> None:
    function, columns = FUNCTIONS[name]
    whole = columns_of(range(len(IDS)))
    expected = function(*(whole[column] for column in columns))
    for rows, rank in zip(SHARES, seen, strict=True):
        own = rank[name]
        rest = expected[list(rows)]
        assert own.shape[0] == len(rows)
        if own.dim() == 2:
            assert own.shape == columns_of(rows)["mask"].shape
            rest = rest[:, : own.shape[1]]
        torch.testing.assert_close(own, rest, atol=1e-6, rtol=1e-6)


def test_all_rows_are_there_in_rank_order_on_every_rank(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        rewards, logprobs = rank["all rows"]
        assert rewards.tolist() == [REWARDS[row] for row in (*SHARES[0], *SHARES[1])]
        assert logprobs.shape == (10, 8)
        torch.testing.assert_close(logprobs[:6], columns_of(SHARES[0])["logprobs"])
        torch.testing.assert_close(logprobs[6:, :7], columns_of(SHARES[1])["logprobs"])
        assert not logprobs[6:, 7:].any()


def test_rows_that_do_not_fit_on_one_rank_are_refused_on_all(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["refused"].startswith("PeerFailed")
    assert "rank 1: ShapeError" in seen[0]["refused"]
    assert seen[1]["refused"].startswith("ShapeError: over_ranks(state, function, *rows): the tensors must have the same rows")


def test_prompts_that_end_on_one_rank_are_refused_on_all(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["ended"] for rank in seen)
    assert first == (
        "PeerFailed: collect_groups(state, batches, …): another rank has no prompts left; give every rank an iterator that goes on",
        True,
    )
    assert second == ("BadInput: collect_groups(state, batches, …): there are no prompts left; give an iterator that goes on", True)


def test_what_fails_to_say_which_rows_are_kept_on_one_rank_fails_on_all(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["kept by nobody"] for rank in seen)
    assert first == ("PeerFailed: collect_groups(state, …): Wanted.keep failed on another rank, whose own error says why", True)
    assert second[0].startswith("ShapeError: Wanted.keep must give a tensor with a bool for each of the ")
    assert second[1]


def test_running_moments_are_gathered_with_the_rows_of_all_ranks() -> None:
    whole = columns_of(range(len(IDS)))
    with scripted_launch() as state:
        values, valid = rft.all_rows(state, whole["rewards"], whole["valid"])
    running = normalisation.merge(normalisation.RunningMoments(), normalisation.moments(values, valid))
    kept = torch.tensor(REWARDS, dtype=torch.float64)[whole["valid"]]
    assert running.mean.item() == pytest.approx(kept.mean().item())
    assert int(running.count) == 9


@pytest.mark.parametrize("rows", [(), (torch.zeros(2, 3, 4),), ([1.0],)])
def test_what_are_no_rows_is_refused(rows: Any) -> None:
    with scripted_launch() as state, pytest.raises(rft.BadInput, match=r"tensors \[batch\] or \[batch, seq\]"):
        _ = rft.over_ranks(state, torch.neg, *rows)


def test_what_is_no_function_is_refused() -> None:
    nothing: Any = None
    with scripted_launch() as state, pytest.raises(rft.BadInput, match=r"function must be one of tensors, such as .*, got NoneType"):
        _ = rft.over_ranks(state, nothing, torch.zeros(3))


def test_a_function_must_give_a_row_for_each_row() -> None:
    with scripted_launch() as state, pytest.raises(rft.ShapeError, match="given 3 rows and gave 2"):
        _ = rft.over_ranks(state, lambda x: x[:2], torch.zeros(3))


def test_a_record_of_tensors_is_cut_as_a_tensor_is() -> None:
    with scripted_launch() as state:
        first, second = rft.over_ranks(state, lambda x: (x + 1, x[:, None] * 2), torch.arange(3.0))
    assert first.tolist() == [1.0, 2.0, 3.0]
    assert second.tolist() == [[0.0], [2.0], [4.0]]


def test_ranks_that_bring_different_dtypes_are_refused(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["of two dtypes"].startswith("BadInput: over_ranks(state, function, *rows): ranks bring different tensors: rank 0 (2,) ")
        assert "torch.float32; rank 1 (2,) torch.int64; bring" in rank["of two dtypes"]
