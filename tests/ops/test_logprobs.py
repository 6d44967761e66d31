import pytest
import torch

from rft.errors import ShapeError
from rft.ops.logprobs import Predictions, predictions


def test_by_hand() -> None:
    # Tokens 20, 30 and 60 are wanted, at 1, 2 and 5: the states at 0, 1 and 4 predict them.
    run = torch.tensor([10, 20, 30, 40, 50, 60])
    found = predictions(run, torch.tensor([False, True, True, False, False, True]))
    assert found.predictors.tolist() == [0, 1, 4]
    assert found.targets.tolist() == [20, 30, 60]


@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_where_nothing_is_wanted_nothing_is_asked(length: int) -> None:
    found = predictions(torch.zeros(length, dtype=torch.int64), torch.zeros(length, dtype=torch.bool))
    assert found.predictors.shape == found.targets.shape == (0,)


@pytest.mark.parametrize("seed", range(8))
def test_against_a_loop(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    length = int(torch.randint(1, 12, (), generator=draw))
    run, wanted = torch.randint(0, 99, (length,), generator=draw), torch.rand(length, generator=draw) < 0.5
    pairs = [(t - 1, int(run[t])) for t in range(1, length) if wanted[t]]
    found = predictions(run, wanted)
    assert list(zip(found.predictors.tolist(), found.targets.tolist(), strict=True)) == pairs


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="predictions"):
        predictions(torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"Predictions\.targets"):
        Predictions(predictors=torch.zeros(3, dtype=torch.int64), targets=torch.zeros(4, dtype=torch.int64))
