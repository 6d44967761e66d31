import math

import pytest
import torch

from rft.ops.corrections import truncated_weights
from tests.ops.cases import random_tokens


def test_by_hand() -> None:
    trainer, engine = torch.tensor([[0.2, 0.6, 0.9, 0.5]]).log(), torch.tensor([[0.4, 0.2, 0.1, 0.5]]).log()
    mask = torch.tensor([[True, True, True, False]])
    torch.testing.assert_close(truncated_weights(trainer, engine, mask, cap=2.0), torch.tensor([[0.5, 2.0, 2.0, 1.0]]))
    torch.testing.assert_close(truncated_weights(trainer, engine, mask, cap=5.0), torch.tensor([[0.5, 3.0, 5.0, 1.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(10))
def test_against_a_loop(seed: int, dtype: torch.dtype) -> None:
    trainer, engine, _, mask = random_tokens(seed, dtype)
    result = truncated_weights(trainer, engine, mask, cap=1.1)
    assert result.dtype == torch.float32
    for row in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            expected = min(math.exp(trainer[row, t].item() - engine[row, t].item()), 1.1) if mask[row, t] else 1.0
            assert result[row, t].item() == pytest.approx(expected, rel=1e-5)


def test_no_gradient_flows() -> None:
    trainer = torch.zeros(1, 1, requires_grad=True)
    assert not truncated_weights(trainer, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), cap=2.0).requires_grad


def test_what_overflows_is_capped() -> None:
    weights = truncated_weights(torch.zeros(1, 1), torch.full((1, 1), -200.0), torch.ones(1, 1, dtype=torch.bool), cap=2.0)
    assert weights.item() == 2.0
