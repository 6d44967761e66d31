import pytest
import torch

from rft.errors import BadInput, ShapeError
from rft.ops.values import clipped_value_loss, value_loss
from tests.ops.cases import gradient, random_tokens, seeds, slopes

NAN = float("nan")


def one(new: float, old: float, target: float, clip: float) -> tuple[float, bool]:
    values = [torch.tensor([[x]]) for x in (new, old, target)]
    result = clipped_value_loss(*values, torch.ones(1, 1, dtype=torch.bool), clip=clip)
    return round(result.loss.item(), 6), bool(result.clipped.item())


def test_by_hand() -> None:
    assert value_loss(torch.tensor([[3.0]]), torch.tensor([[1.0]]), torch.ones(1, 1, dtype=torch.bool)).loss.item() == 2.0
    assert one(1.1, 1.0, 2.0, 0.2) == (0.405, False)  # within: ½ 0.9²
    assert one(1.5, 1.0, 2.0, 0.2) == (0.32, True)  # towards the return, held to 1.2: ½ 0.8², more than ½ 0.5²
    assert one(0.5, 1.0, 2.0, 0.2) == (1.125, False)  # away from it: ½ 1.5², more than ½ 1.2²
    assert one(2.9, 1.0, 2.0, 0.2) == (0.405, False)  # past it, and further off than 1.2 is


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", seeds(4))
def test_against_a_loop(seed: int, dtype: torch.dtype) -> None:
    new, old, returns, mask = random_tokens(seed, dtype)
    leaf = new.clone().requires_grad_()
    plain, bounded = value_loss(leaf, returns, mask), clipped_value_loss(leaf, old, returns, mask, clip=0.3)
    assert plain.loss.dtype == bounded.loss.dtype == torch.float32
    assert not plain.clipped.any()
    before, targets, marks = old.double().tolist(), returns.double().tolist(), mask.tolist()

    def naive(value: float, row: int, t: int, clip: bool) -> float:
        if not marks[row][t]:
            return 0.0
        nearest = min(max(value, before[row][t] - 0.3), before[row][t] + 0.3) if clip else value
        return max((value - targets[row][t]) ** 2, (nearest - targets[row][t]) ** 2) / 2

    for clip, result in ((False, plain), (True, bounded)):
        expected = [[naive(x, i, t, clip) for t, x in enumerate(row)] for i, row in enumerate(new.double().tolist())]
        torch.testing.assert_close(result.loss, torch.tensor(expected).reshape(mask.shape), rtol=1e-5, atol=1e-6)
        table = slopes(lambda at, c=clip: sum(naive(x, i, t, c) for i, r in enumerate(at) for t, x in enumerate(r)), new.tolist(), marks)
        got = gradient(result.loss.sum(), leaf)
        torch.testing.assert_close(got, torch.tensor(table).reshape(mask.shape), rtol=1e-2, atol=1e-2 if dtype != torch.float32 else 1e-4)
    assert (gradient(bounded.loss.sum(), leaf)[bounded.clipped] == 0).all()


def test_what_has_moved_less_than_the_clip_is_not_clipped_not_even_by_a_rounding_error() -> None:
    draw = torch.Generator().manual_seed(0)
    old, mask = torch.rand(500, 4, generator=draw) / 2, torch.ones(500, 4, dtype=torch.bool)
    for new in (old, torch.rand(500, 4, generator=draw) / 100):
        result = clipped_value_loss(new, old, torch.ones(500, 4), mask, clip=0.6)
        assert not result.clipped.any()
        assert torch.equal(result.loss, 0.5 * (new - 1).square())


def test_nothing_marked_and_only_new_is_differentiated() -> None:
    new, old, returns = (torch.full((1, 2), x, requires_grad=True) for x in (1.0, 2.0, NAN))
    mask = torch.zeros(1, 2, dtype=torch.bool)
    result = clipped_value_loss(new, old, returns, mask, clip=0.1)
    result.loss.sum().backward()
    assert result.loss.tolist() == [[0.0, 0.0]]
    assert new.grad is not None
    assert new.grad.tolist() == [[0.0, 0.0]]
    assert old.grad is None
    assert returns.grad is None


@pytest.mark.parametrize("clip", [0.0, -1.0, NAN])
def test_a_bad_clip_is_refused(clip: float) -> None:
    value = torch.zeros(1, 1)
    with pytest.raises(BadInput, match=r"clipped_value_loss: clip is .* above 0"):
        clipped_value_loss(value, value, value, value.bool(), clip=clip)


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="value_loss"):
        value_loss(torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3, dtype=torch.bool))
