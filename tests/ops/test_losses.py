import math

import pytest
import torch

from rft.errors import ShapeError
from rft.ops.losses import clipped_surrogate, negative_log_likelihood
from tests.ops.cases import random_tokens


def one(ratio: float, advantage: float, clip: float = 0.2) -> tuple[float, bool]:
    surrogate = clipped_surrogate(
        torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1, dtype=torch.bool), clip=clip
    )
    return round(surrogate.loss.item(), 5), bool(surrogate.clipped.item())


def test_by_hand() -> None:
    assert one(1.0, 2.0) == (-2.0, False)
    assert one(1.5, 2.0) == (-2.4, True)  # a gain stops at 1.2
    assert one(0.5, 2.0) == (-1.0, False)  # and does not below
    assert one(0.5, -2.0) == (1.6, True)  # a loss stops at 0.8
    assert one(1.5, -2.0) == (3.0, False)  # and does not above
    assert one(1.5, 0.0) == (0.0, False)
    assert one(1.5, 2.0, clip=0.6) == (-3.0, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(20))
def test_against_a_loop(seed: int, dtype: torch.dtype) -> None:
    new, old, advantages, mask = random_tokens(seed, dtype)
    result = clipped_surrogate(new, old, advantages, mask, clip=0.2)
    assert result.loss.dtype == result.ratio.dtype == torch.float32
    for row in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            got = (result.loss[row, t].item(), result.ratio[row, t].item(), bool(result.clipped[row, t]))
            if not mask[row, t]:
                assert got == (0.0, 1.0, False)
                continue
            ratio, gain = math.exp(new[row, t].item() - old[row, t].item()), advantages[row, t].item()
            free, bounded = ratio * gain, min(max(ratio, 0.8), 1.2) * gain
            assert got[:2] == pytest.approx((-min(free, bounded), ratio), rel=1e-5)
            assert got[2] == (bounded < free)


def test_gradient_of_the_first_step_is_that_of_the_policy_gradient() -> None:
    new = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    advantages, mask = torch.tensor([[0.5, -1.5, float("nan")]]), torch.tensor([[True, True, False]])
    clipped_surrogate(new, new.detach(), advantages, mask, clip=0.2).loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [[-0.5, 1.5, 0.0]]


def test_clipped_tokens_have_no_gradient() -> None:
    new, old = torch.tensor([[0.5, -0.5]], requires_grad=True), torch.zeros(1, 2)
    clipped_surrogate(new, old, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool), clip=0.2).loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [[0.0, 0.0]]


def test_a_ratio_beyond_all_bounds_stays_finite() -> None:
    new, old = torch.tensor([[0.0, -200.0]]), torch.tensor([[-200.0, 0.0]])
    result = clipped_surrogate(new, old, torch.tensor([[-1.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool), clip=0.2)
    assert bool(result.loss.isfinite().all())
    assert result.ratio[0, 0].item() == pytest.approx(math.exp(20))


def test_the_ratio_is_taken_in_float32() -> None:
    # −3.0 and −3.015625 are both bf16 numbers; their difference is exact in fp32, and e^0.015625 would be 1.015625 in bf16.
    new, old = (torch.tensor([[x]], dtype=torch.bfloat16) for x in (-3.0, -3.015625))
    result = clipped_surrogate(new, old, torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), clip=0.2)
    assert result.ratio.item() == pytest.approx(math.exp(0.015625), rel=1e-6)


def test_negative_log_likelihood() -> None:
    result = negative_log_likelihood(torch.tensor([[-0.5, -2.0]], dtype=torch.bfloat16))
    assert result.dtype == torch.float32
    assert result.tolist() == [[0.5, 2.0]]


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="clipped_surrogate"):
        clipped_surrogate(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), clip=0.2)
