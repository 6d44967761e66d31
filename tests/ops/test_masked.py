import math

import pytest
import torch

from rft.errors import BadInput
from rft.ops.masked import marked, masked_mean, masked_sum, row_mean, row_sum
from rft.ops.parameters import require_positive, require_within
from rft.ops.ratios import bounded_exp, log_ratio

NAN = float("nan")


def test_by_hand() -> None:
    values, mask = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, 8.0]]), torch.tensor([[True, True, False], [True, False, False]])
    assert marked(values, mask).tolist() == [[1.0, 2.0, 0.0], [4.0, 0.0, 0.0]]
    assert masked_sum(values, mask).item() == 7.0
    assert masked_mean(values, mask).item() == torch.tensor(7 / 3).item()
    assert masked_mean(values, mask, 14).item() == 0.5
    assert row_sum(values, mask).tolist() == [3.0, 4.0]
    assert row_mean(values, mask).tolist() == [1.5, 4.0]


def test_nothing_marked_is_zero_and_not_nan() -> None:
    values, mask = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)
    assert masked_sum(values, mask).item() == masked_mean(values, mask).item() == masked_mean(values, mask, 0).item() == 0.0
    assert row_sum(values, mask).tolist() == row_mean(values, mask).tolist() == [0.0, 0.0]


def test_what_is_not_marked_gets_no_gradient() -> None:
    values = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    masked_mean(values, torch.tensor([True, False, True])).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0, 0.5]


def test_bfloat16_is_added_up_in_float32() -> None:
    values = torch.ones(1000, dtype=torch.bfloat16)
    assert masked_sum(values, torch.ones(1000, dtype=torch.bool)).item() == 1000.0  # bf16 stops at 256
    assert row_sum(values[None], torch.ones(1, 1000, dtype=torch.bool)).item() == 1000.0


def test_ratios() -> None:
    p, q, mask = torch.tensor([-1.0, -2.0, NAN]), torch.tensor([-3.0, -2.0, 0.0]), torch.tensor([True, True, False])
    assert log_ratio(p, q, mask).tolist() == [2.0, 0.0, 0.0]
    assert bounded_exp(torch.tensor([0.0, 50.0, -50.0])).tolist() == pytest.approx([1.0, math.exp(20), math.exp(-20)], rel=1e-6)


def test_parameters() -> None:
    require_positive("here", low=0.1, high=3)
    require_within("here", 0, 1, low=0.0, high=1)
    with pytest.raises(BadInput, match="here: low is 0, high is nan, but must be above 0"):
        require_positive("here", low=0.0, high=NAN, other=1.0)
    with pytest.raises(BadInput, match=r"here: high is 1\.5, but must be between 0 and 1"):
        require_within("here", 0, 1, low=0.5, high=1.5)
