import math
import pickle
from itertools import permutations

import pytest
import torch
from torch import Tensor

from rft.errors import BadInput
from rft.ops import metrics
from rft.ops.metrics import Metric
from tests.ops.cases import random_tokens, seeds

NAN = float("nan")


def test_by_hand() -> None:
    values, mask = torch.tensor([[1.0, 3.0, NAN], [2.0, NAN, NAN]]), torch.tensor([[True, True, False], [True, False, False]])
    assert metrics.maximum(values, mask).value() == 3.0
    assert metrics.maximum(-values, mask).value() == -1.0
    # (1 + 3 + 2)² / (3 (1 + 9 + 4)) = 36 / 42
    assert metrics.effective_sample_size(values, mask).value() == pytest.approx(36 / 42)
    assert metrics.effective_sample_size(torch.full((4,), 0.3), torch.ones(4, dtype=torch.bool)).value() == pytest.approx(1.0)
    assert metrics.effective_sample_size(torch.tensor([5.0, 0.0, 0.0, 0.0]), torch.ones(4, dtype=torch.bool)).value() == 0.25


def test_explained_variance_by_hand() -> None:
    returns, mask = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]]), torch.tensor([[True, True, False], [True, False, False]])
    # returns 1, 2, 6 have a variance of 14/3; errors of 0, 1, 4 one of 26/9
    values = torch.tensor([[1.0, 1.0, 0.0], [2.0, 0.0, 0.0]])
    cases = ((returns - 5, 1.0), (torch.full((2, 3), 3.0), 0.0), (values, 1 - (26 / 9) / (14 / 3)), (-returns, -3.0))
    for guess, explained in cases:
        assert metrics.explained_variance(guess, returns, mask).value() == pytest.approx(explained)
    assert metrics.explained_variance(torch.rand(3), torch.full((3,), 0.7), torch.ones(3, dtype=torch.bool)).value() == 0.0


def test_quantiles_by_hand() -> None:
    values, mask = torch.tensor([[0.0, 0.02, NAN], [0.5, 3.0, 1e9]]), torch.tensor([[True, True, False], [True, True, True]])
    half, most, all_of_them = metrics.quantiles(values, mask, (0.4, 0.8, 1.0))
    assert half.value() == pytest.approx(0.02, rel=0.015)
    assert most.value() == pytest.approx(3.0, rel=0.015)
    assert all_of_them.value() > 100, "beyond the last bin"
    assert metrics.quantiles(values, mask, (0.2,))[0].value() == 0.0


@pytest.mark.parametrize("seed", seeds(4))
def test_quantiles_are_those_of_sorting_and_merge(seed: int) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(seed)).exp() / 10
    mask = torch.ones(1000, dtype=torch.bool)
    for at in (0.01, 0.5, 0.9, 0.99, 1.0):
        naive = float(values.sort().values[math.ceil(at * 1000) - 1])
        parts = [metrics.quantiles(part, mask[: len(part)], (at,))[0] for part in values.split(300)]
        whole = parts[0].merge(parts[1]).merge(parts[2]).merge(parts[3])
        assert whole.value() == metrics.quantiles(values, mask, (at,))[0].value() == pytest.approx(naive, rel=0.015)


def test_of_nothing_they_are_zero() -> None:
    nothing = torch.full((2, 2), NAN), torch.zeros(2, 2, dtype=torch.bool)
    for part in (nothing, (torch.zeros(0), torch.zeros(0, dtype=torch.bool))):
        assert metrics.maximum(*part).value() == metrics.effective_sample_size(*part).value() == 0.0
        assert metrics.quantiles(*part, (0.5,))[0].value() == 0.0
        assert metrics.explained_variance(part[0], *part).value() == 0.0
    assert metrics.effective_sample_size(torch.zeros(3), torch.ones(3, dtype=torch.bool)).value() == 0.0
    some = torch.tensor([-2.0]), torch.tensor([True])
    assert metrics.maximum(*nothing).merge(metrics.maximum(*some)).value() == -2.0


def parts(seed: int) -> tuple[list[dict[str, Tensor | Metric]], dict[str, float]]:
    """What three parts of a batch say, and what is true of the whole, worked out with plain numbers."""
    values, returns, _, mask = random_tokens(seed, torch.float32)
    weights = values.exp()
    rows = [slice(0, 1), slice(1, 3), slice(3, None)]
    said: list[dict[str, Tensor | Metric]] = [
        {
            "share": torch.where(mask[r], values[r], 0.0).sum() / 7,
            "largest": metrics.maximum(values[r], mask[r]),
            "ess": metrics.effective_sample_size(weights[r], mask[r]),
            "explained": metrics.explained_variance(values[r], returns[r], mask[r]),
        }
        for r in rows
    ]
    plain, heavy = values[mask].tolist(), weights[mask].tolist()
    squares = sum(w * w for w in heavy)
    ess = sum(heavy) ** 2 / (len(heavy) * squares) if heavy else 0.0
    targets = returns[mask].double()
    explained = 1 - float((targets - values[mask]).var(correction=0) / targets.var(correction=0)) if len(targets) > 1 else 0.0
    return said, {"share": sum(plain) / 7, "largest": max(plain, default=0.0), "ess": ess, "explained": explained}


@pytest.mark.parametrize("seed", seeds(4))
def test_parts_merge_to_the_whole_in_any_order(seed: int) -> None:
    said, expected = parts(seed)
    for order in permutations(said):
        assert metrics.read(metrics.merged(order)) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    nested = metrics.merged([said[0], metrics.merged(said[1:])])
    assert metrics.read(nested) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_from_rank_to_rank_they_are_pickled() -> None:
    said, expected = parts(1)
    said[0]["share"] = torch.tensor(0.0, requires_grad=True) + said[0]["share"]
    sent = [pickle.loads(pickle.dumps(metrics.host(part))) for part in said]
    assert metrics.read(metrics.merged(sent)) == pytest.approx(expected, rel=1e-5)
    share = metrics.host(said[0])["share"]
    assert isinstance(share, Tensor)
    assert not share.requires_grad
    assert share.device.type == "cpu"


def test_a_part_may_lack_some_and_none_is_empty() -> None:
    whole = metrics.merged([{"a": torch.tensor(1.0)}, {"b": torch.tensor(2.0)}, {"a": torch.tensor(4.0)}])
    assert metrics.read(whole) == {"a": 5.0, "b": 2.0}
    assert metrics.merged([]) == {}


def test_merging_changes_no_part() -> None:
    first, second = {"a": torch.tensor(1.0)}, {"a": torch.tensor(2.0)}
    assert metrics.read(metrics.merged([first, second])) == {"a": 3.0}
    assert first["a"].item() == 1.0


def test_two_kinds_of_one_name_are_refused() -> None:
    largest = metrics.maximum(torch.ones(1), torch.ones(1, dtype=torch.bool))
    with pytest.raises(BadInput, match="metric 'a' is a Tensor here and a Maximum there"):
        metrics.merged([{"a": torch.tensor(1.0)}, {"a": largest}])


def test_small_weights_do_not_vanish_beside_large_ones() -> None:
    large, small = (metrics.effective_sample_size(torch.tensor([w]), torch.tensor([True])) for w in (1e8, 1.0))
    assert float(large.merge(small).total) == 1e8 + 1  # which fp32 does not have


def test_gradients_are_not_kept() -> None:
    values = torch.ones(2, requires_grad=True)
    assert not metrics.maximum(values, torch.ones(2, dtype=torch.bool)).largest.requires_grad
    assert not metrics.effective_sample_size(values, torch.ones(2, dtype=torch.bool)).total.requires_grad
    assert math.isfinite(metrics.effective_sample_size(values * 4.8e8, torch.ones(2, dtype=torch.bool)).value())
