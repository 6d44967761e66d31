import math

import pytest
import torch
from torch import Tensor

from rft.errors import ShapeError
from rft.ops import kl
from tests.ops.cases import random_tokens, seeds

NAN = float("nan")


def test_by_hand() -> None:
    # p = 1/2, q = 1/4: log p − log q = ln 2, half its square, and r = q/p = 1/2: (1/2 − 1) + ln 2
    p, q = torch.tensor([math.log(1 / 2)]), torch.tensor([math.log(1 / 4)])
    assert kl.k1(p, q).item() == pytest.approx(math.log(2))
    assert kl.k2(p, q).item() == pytest.approx(0.5 * math.log(2) ** 2)
    assert kl.k3(p, q).item() == pytest.approx(math.log(2) - 0.5)
    assert kl.k3(p, p).item() == kl.k2(p, p).item() == kl.k1(p, p).item() == 0.0
    # Sampled from a policy that gives the token 1/8, it stands for (1/2) / (1/8) = 4 tokens of p.
    assert kl.importance_weighted(kl.k1(p, q), p, torch.tensor([math.log(1 / 8)])).item() == pytest.approx(4 * math.log(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", seeds(4))
def test_against_a_loop(seed: int, dtype: torch.dtype) -> None:
    p, q, sampler, mask = random_tokens(seed, dtype)
    values = [estimate(p, q, mask) for estimate in (kl.k1, kl.k2, kl.k3)]
    values.append(kl.importance_weighted(values[2], p, sampler, mask))
    for row in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            x, y, z = (value[row, t].item() for value in (p, q, sampler))
            third = math.exp(y - x) - 1 - (y - x) if mask[row, t] else 0.0
            expected = [x - y, (x - y) ** 2 / 2, third, math.exp(x - z) * third] if mask[row, t] else [0.0] * 4
            assert [value[row, t].item() for value in values] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert all(value.dtype == torch.float32 for value in values)
    assert (values[2] >= 0).all()


# ---- means and gradients, exactly: every token of a small distribution, weighed by its probability ----

LOGITS, REFERENCE, SAMPLER = [0.3, -0.8, 1.1, 0.1], [1.0, 0.2, -0.5, 0.4], [-0.2, 0.6, 0.5, -1.0]


def divergence(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum()


def distributions() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits with gradient, and the log-probs of p (the logits'), q and the sampler over all tokens."""
    logits = torch.tensor(LOGITS, requires_grad=True)
    q, sampler = (torch.tensor(x).log_softmax(0) for x in (REFERENCE, SAMPLER))
    return logits, logits.log_softmax(0), q, sampler


def mean_gradient(loss: Tensor, tokens_of: Tensor, logits: Tensor) -> Tensor:
    """Σ_x P(x) ∇loss(x): the expected gradient where the tokens' distribution is constant, as it is to a trainer."""
    (grad,) = torch.autograd.grad((tokens_of.detach().exp() * loss).sum(), logits, retain_graph=True)
    return grad


def true_gradient(value: Tensor, logits: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(value, logits, retain_graph=True)
    return grad


def test_means() -> None:
    _, p, q, sampler = distributions()
    exact = divergence(p, q).item()
    assert exact > 0.1
    for estimate in (kl.k1, kl.k3):
        assert (p.exp() * estimate(p, q)).sum().item() == pytest.approx(exact, rel=1e-5)
        assert (sampler.exp() * kl.importance_weighted(estimate(p, q), p, sampler)).sum().item() == pytest.approx(exact, rel=1e-5)
        assert (sampler.exp() * estimate(p, q)).sum().item() != pytest.approx(exact, rel=0.1)
    assert (p.exp() * kl.k2(p, q)).sum().item() != pytest.approx(exact, rel=0.01)


def test_mean_gradients_are_those_that_the_docstrings_say() -> None:
    logits, p, q, sampler = distributions()
    right, reverse = true_gradient(divergence(p, q), logits), true_gradient(divergence(q, p), logits)
    assert (right - reverse).abs().max() > 0.1
    cases = {
        "k1": (kl.k1(p, q), p, torch.zeros(4)),
        "k2": (kl.k2(p, q), p, right),
        "k3": (kl.k3(p, q), p, reverse),
        "straight_through": (kl.straight_through(kl.k3(p, q), kl.k2(p, q)), p, right),
        "weighted k1": (kl.importance_weighted(kl.k1(p, q), p, sampler), sampler, right),
        "weighted k3": (kl.importance_weighted(kl.k3(p, q), p, sampler), sampler, right),
    }
    for name, (loss, tokens_of, expected) in cases.items():
        torch.testing.assert_close(mean_gradient(loss, tokens_of, logits), expected, rtol=1e-5, atol=1e-6, msg=name)


def test_on_policy_the_weighted_k3_has_the_gradient_of_k2_on_every_token() -> None:
    _, p, q, _ = distributions()
    leaf = p.detach().requires_grad_()
    (weighted,) = torch.autograd.grad(kl.importance_weighted(kl.k3(leaf, q), leaf, leaf).sum(), leaf)
    (second,) = torch.autograd.grad(kl.k2(leaf, q).sum(), leaf)
    torch.testing.assert_close(weighted, second)


def test_straight_through_takes_value_and_gradient_from_different_ones() -> None:
    leaf = torch.tensor([2.0], requires_grad=True)
    result = kl.straight_through(leaf.cos(), 3 * leaf)
    assert result.item() == torch.tensor(2.0).cos().item()
    (grad,) = torch.autograd.grad(result.sum(), leaf)
    assert grad.item() == 3.0


def test_small_differences_do_not_vanish() -> None:
    # k3 of a log-ratio x is x²/2 for small x; (e^x − 1) − x in fp32 would be rounding noise.
    assert kl.k3(torch.tensor([0.0]), torch.tensor([1e-3])).item() == pytest.approx(5e-7, rel=1e-2)


def test_what_is_not_marked_touches_neither_value_nor_gradient() -> None:
    p = torch.tensor([-1.0, NAN, -math.inf], requires_grad=True)
    q, mask = torch.tensor([-1.5, -1.0, NAN]), torch.tensor([True, False, False])
    for estimate in (kl.k1, kl.k2, kl.k3):
        for value in (estimate(p, q, mask), kl.importance_weighted(estimate(p, q, mask), p, q, mask)):
            (grad,) = torch.autograd.grad(value.sum(), p, retain_graph=True)
            assert value.isfinite().all()
            assert grad.isfinite().all()
            assert value[1:].tolist() == grad[1:].tolist() == [0.0, 0.0]
    assert kl.k3(p, q, torch.zeros(3, dtype=torch.bool)).tolist() == [0.0, 0.0, 0.0]


def test_ratios_beyond_all_bounds_stay_finite() -> None:
    p, q = torch.tensor([-200.0, 0.0], requires_grad=True), torch.tensor([0.0, -200.0])
    value = kl.importance_weighted(kl.k3(p, q), p, q)
    (grad,) = torch.autograd.grad(value.sum(), p)
    assert value.isfinite().all()
    assert grad.isfinite().all()
    assert kl.k3(p, q)[0].item() == pytest.approx(math.exp(20) - 1 - 20)


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="k3"):
        kl.k3(torch.zeros(2, 3), torch.zeros(3, 2))
