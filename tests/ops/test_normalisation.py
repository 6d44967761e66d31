import dataclasses as dc
import io
import math
import random

import optree
import pytest
import torch
from torch import Tensor

from rft import tree
from rft.errors import BadInput, ShapeError
from rft.ops.normalisation import RunningMoments, batch_normalise, merge, moments, normalise, whiten
from tests.ops.cases import random_tokens
from tests.ops.group_cases import DTYPES, SEEDS, random_groups

NAN, INF = float("nan"), float("inf")


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / max(1, len(values))
    return mean, math.sqrt(sum((x - mean) ** 2 for x in values) / max(1, len(values)))


# ---- whiten ----


def test_whiten_by_hand() -> None:
    # 1, 3, 5, 7: mean 4, squares 9 + 1 + 1 + 9: deviation √5
    values, mask = torch.tensor([[1.0, NAN, 3.0], [5.0, 7.0, INF]]), torch.tensor([[True, False, True], [True, True, False]])
    root = math.sqrt(5)
    expected = torch.tensor([[-3 / root, 0.0, -1 / root], [1 / root, 3 / root, 0.0]])
    torch.testing.assert_close(whiten(values, mask, eps=0), expected)
    kept = torch.where(mask, expected + 4, 0.0)
    torch.testing.assert_close(whiten(values, mask, shift_mean=False, eps=0), kept)
    # eps is added to the deviation
    torch.testing.assert_close(whiten(values, mask, eps=root), expected / 2)


def test_whiten_without_spread() -> None:
    none, one = torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool)
    one[1, 1] = True
    values = torch.full((2, 3), 0.1)
    assert whiten(torch.full((2, 3), NAN), none).count_nonzero().item() == 0
    for mask in (one, torch.ones(2, 3, dtype=torch.bool)):
        for eps in (0.0, 1e-8):
            assert whiten(values, mask, eps=eps).count_nonzero().item() == 0
            assert torch.equal(whiten(values, mask, shift_mean=False, eps=eps), torch.where(mask, values, 0.0))
    assert whiten(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_against_a_loop(seed: int, dtype: torch.dtype, shift_mean: bool) -> None:
    values, _, _, mask = random_tokens(seed, dtype)
    result = whiten(values, mask, shift_mean=shift_mean)
    assert result.dtype == torch.float32
    mean, deviation = mean_and_deviation(values[mask].tolist())
    for row in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            scaled = (values[row, t].item() - mean) / (deviation + 1e-8) if deviation else 0.0
            expected = scaled + (0.0 if shift_mean else mean)
            assert result[row, t].item() == pytest.approx(expected if mask[row, t] else 0.0, rel=1e-5, abs=1e-6)


def test_whitening_what_is_white_changes_nothing() -> None:
    values, _, _, mask = random_tokens(3, torch.float32)
    once = whiten(values, mask)
    torch.testing.assert_close(whiten(once, mask), once)


def test_a_large_mean_does_not_drown_the_deviation() -> None:
    # 4096 ± 1/256, which fp32 holds exactly; its squares it does not.
    values = 4096 + torch.tensor([1.0, -1.0] * 500) / 256
    result = whiten(values, torch.ones(1000, dtype=torch.bool))
    torch.testing.assert_close(result, torch.tensor([1.0, -1.0] * 500), atol=1e-5, rtol=0)


# ---- batch_normalise ----


def test_batch_normalise_by_hand() -> None:
    values, valid = torch.tensor([1.0, NAN, 3.0, 5.0]), torch.tensor([True, False, True, True])
    # 1, 3, 5: mean 3, deviation √(8 / 3)
    edge = 2 / math.sqrt(8 / 3)
    torch.testing.assert_close(batch_normalise(values, valid), torch.tensor([-edge, 0.0, 0.0, edge]))
    # counted 2, 0 and 2 times: 1 and 5: mean 3, deviation 2
    weights = torch.tensor([2, 7, 0, 2])
    torch.testing.assert_close(batch_normalise(values, valid, weights=weights), torch.tensor([-1.0, 0.0, 0.0, 1.0]))


def test_batch_normalise_without_spread() -> None:
    assert batch_normalise(torch.full((3,), 0.1), eps=0).tolist() == [0.0] * 3
    assert batch_normalise(torch.tensor([NAN, INF]), torch.zeros(2, dtype=torch.bool)).tolist() == [0.0] * 2
    assert batch_normalise(torch.tensor([1.0, 2.0]), weights=torch.tensor([0, 0])).tolist() == [0.0] * 2
    assert batch_normalise(torch.tensor([1.0, 2.0]), weights=torch.tensor([0, 3])).tolist() == [0.0] * 2
    assert batch_normalise(torch.zeros(0)).tolist() == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_batch_normalise_against_a_loop(seed: int, dtype: torch.dtype) -> None:
    case = random_groups(seed, dtype)
    for weights in (torch.ones_like(case.lengths), case.lengths):
        values = [case.rewards[j].item() for j in range(len(weights)) if case.valid[j] for _ in range(int(weights[j]))]
        mean, deviation = mean_and_deviation(values)
        expected = [
            (case.rewards[j].item() - mean) / (deviation + 1e-8) if case.valid[j] and deviation else 0.0 for j in range(len(weights))
        ]
        result = batch_normalise(case.rewards, case.valid, weights=weights)
        torch.testing.assert_close(result, torch.tensor(expected), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_rows_does_not_matter(seed: int) -> None:
    case = random_groups(seed, torch.float32)
    order = torch.randperm(len(case.groups), generator=torch.Generator().manual_seed(seed))
    moved = case.taken(order)
    result = batch_normalise(case.rewards, case.valid, weights=case.lengths)
    assert torch.equal(batch_normalise(moved.rewards, moved.valid, weights=moved.lengths), result[order])


# ---- running moments ----


def as_numbers(seen: RunningMoments) -> list[float]:
    return [seen.count.item(), seen.mean.item(), seen.squares.item()]


def test_moments_by_hand() -> None:
    # 1, 2, 6: mean 3, squares 4 + 1 + 9
    seen = moments(torch.tensor([1.0, NAN, 2.0, 6.0]), torch.tensor([True, False, True, True]))
    assert as_numbers(seen) == [3.0, 3.0, 14.0]
    assert seen.deviation.item() == math.sqrt(14 / 3)
    # and 8, alone: mean 20/5... of 1, 2, 6, 8: 17/4; squares (13² + 9² + 7² + 15²) / 16 = 524/16
    both = merge(seen, moments(torch.tensor([8.0])))
    assert as_numbers(both) == [4.0, 4.25, 32.75]


def test_moments_of_nothing() -> None:
    for nothing in (RunningMoments(), moments(torch.zeros(0)), moments(torch.tensor([NAN]), torch.tensor([False]))):
        assert as_numbers(nothing) == [0.0, 0.0, 0.0]
        assert as_numbers(merge(nothing, nothing)) == [0.0, 0.0, 0.0]
        assert as_numbers(merge(nothing, moments(torch.tensor([2.0, 4.0])))) == [2.0, 3.0, 2.0]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_merging_parts_is_seeing_the_whole(seed: int, parts: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = 1000 + torch.randn(40, generator=draw)
    valid = torch.rand(40, generator=draw) < 0.7
    owner = torch.randint(0, parts, (40,), generator=draw)
    pieces = [moments(values[owner == part], valid[owner == part]) for part in range(parts)]
    whole = moments(values, valid)
    random.Random(seed).shuffle(pieces)
    one_by_one = RunningMoments()
    for piece in pieces:
        one_by_one = merge(one_by_one, piece)
    for merged in (merge(*pieces), merge(RunningMoments(), *pieces), one_by_one):
        assert as_numbers(merged) == pytest.approx(as_numbers(whole), rel=1e-11)
    kept = values[valid].tolist()
    mean, deviation = mean_and_deviation(kept)
    assert [*as_numbers(whole)[:2], whole.deviation.item()] == pytest.approx([len(kept), mean, deviation], rel=1e-9)


def test_normalise_by_hand() -> None:
    seen = moments(torch.tensor([1.0, 5.0]))  # mean 3, deviation 2
    values, valid = torch.tensor([3.0, 7.0, NAN]), torch.tensor([True, True, False])
    torch.testing.assert_close(normalise(values, seen, valid, eps=0), torch.tensor([0.0, 2.0, 0.0]))
    torch.testing.assert_close(normalise(values, seen, valid, centre=False, eps=0), torch.tensor([1.5, 3.5, 0.0]))
    torch.testing.assert_close(normalise(values, seen, valid, eps=2.0), torch.tensor([0.0, 1.0, 0.0]))


def test_normalise_without_a_scale_leaves_it() -> None:
    values = torch.tensor([3.0, 7.0])
    assert normalise(values, RunningMoments()).tolist() == [3.0, 7.0]
    for seen in (moments(torch.tensor([2.0])), moments(torch.tensor([2.0, 2.0]))):
        assert normalise(values, seen).tolist() == [1.0, 5.0]
        assert normalise(values, seen, centre=False).tolist() == [3.0, 7.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_normalising_by_its_own_moments_is_whitening(seed: int, dtype: torch.dtype) -> None:
    values, _, _, mask = random_tokens(seed, dtype)
    result = normalise(values, moments(values, mask), mask)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, whiten(values, mask), atol=1e-6, rtol=1e-6)


def test_no_gradient_goes_through() -> None:
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    mask = torch.tensor([True, True])
    for result in (whiten(values, mask), batch_normalise(values), normalise(values, moments(values)), moments(values).mean):
        assert not result.requires_grad


def test_moments_are_saved_and_restored() -> None:
    seen = moments(torch.tensor([0.1, 0.7, -3.0]))
    file = io.BytesIO()
    torch.save(seen, file)
    with torch.serialization.safe_globals([RunningMoments]):
        again = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert isinstance(again, RunningMoments)
    assert as_numbers(again) == as_numbers(seen)
    # as a checkpoint does that holds tensors only
    file = io.BytesIO()
    torch.save({f.name: getattr(seen, f.name) for f in dc.fields(seen)}, file)
    again = RunningMoments(**torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert as_numbers(again) == as_numbers(seen)


def test_moments_are_a_tree_of_three_tensors() -> None:
    seen = moments(torch.tensor([1.0, 5.0]))
    leaves, structure = optree.tree_flatten(seen, namespace=tree.NAMESPACE)
    assert [leaf.item() for leaf in leaves] == [2.0, 3.0, 8.0]
    assert as_numbers(optree.tree_unflatten(structure, leaves)) == [2.0, 3.0, 8.0]
    doubled: RunningMoments = tree.tree_map(lambda x: 2 * x, seen)
    assert as_numbers(doubled) == [4.0, 6.0, 16.0]
    with pytest.raises(dc.FrozenInstanceError):
        seen.count = torch.zeros(())


# ---- refusals ----


@pytest.mark.parametrize("eps", [-1e-8, NAN])
def test_refused_eps(eps: float) -> None:
    values, mask = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    with pytest.raises(BadInput, match="whiten: eps"):
        whiten(values, mask, eps=eps)
    with pytest.raises(BadInput, match="batch_normalise: eps"):
        batch_normalise(values, eps=eps)
    with pytest.raises(BadInput, match="normalise: eps"):
        normalise(values, RunningMoments(), eps=eps)


def test_refusals() -> None:
    with pytest.raises(BadInput, match="at least one part"):
        merge()
    with pytest.raises(BadInput, match="numbers of tokens"):
        batch_normalise(torch.zeros(2), weights=torch.tensor([1, -1]))
    scalars: list[Tensor] = [torch.zeros(()), torch.zeros(1, dtype=torch.float64)]
    for wrong in scalars:
        with pytest.raises(ShapeError, match=r"RunningMoments\.mean"):
            RunningMoments(mean=wrong)
    with pytest.raises(ShapeError, match="whiten"):
        whiten(torch.zeros(2), torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_and_not_made_nothing_of(bad: float) -> None:
    values, marked = torch.tensor([bad, 1.0, 2.0]), torch.ones(3, dtype=torch.bool)
    for call in (
        lambda: whiten(values, marked),
        lambda: batch_normalise(values),
        lambda: moments(values),
    ):
        with pytest.raises(BadInput, match="1 of 3 values are NaN or infinite"):
            call()
    without = torch.tensor([False, True, True])
    assert batch_normalise(values, without).tolist() == pytest.approx([0.0, -1.0, 1.0])
