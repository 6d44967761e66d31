import math

import pytest
import torch

from rft.ops.kl import k1, k3
from tests.ops.cases import random_tokens


def test_by_hand() -> None:
    # p = 1/2, q = 1/4: log p − log q = ln 2, and r = q/p = 1/2: (1/2 − 1) + ln 2
    p, q = torch.tensor([math.log(1 / 2)]), torch.tensor([math.log(1 / 4)])
    assert k1(p, q).item() == pytest.approx(math.log(2))
    assert k3(p, q).item() == pytest.approx(math.log(2) - 0.5)
    assert k3(p, p).item() == k1(p, p).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(10))
def test_against_a_loop(seed: int, dtype: torch.dtype) -> None:
    p, q, _, mask = random_tokens(seed, dtype)
    first, third = k1(p, q)[mask], k3(p, q)[mask]
    assert first.dtype == third.dtype == torch.float32
    for got1, got3, x, y in zip(first.tolist(), third.tolist(), p[mask].tolist(), q[mask].tolist(), strict=True):
        assert got1 == pytest.approx(x - y, abs=1e-6)
        assert got3 == pytest.approx(math.exp(y - x) - 1 - (y - x), rel=1e-4, abs=1e-6)
        assert got3 >= 0


@pytest.mark.parametrize("estimate", [k1, k3])
def test_their_mean_is_the_divergence(estimate: object) -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    divergence = float((p.exp() * (p - q)).sum())
    assert callable(estimate)
    assert float((p.exp() * estimate(p, q)).sum()) == pytest.approx(divergence, rel=1e-5)


def test_small_differences_do_not_vanish() -> None:
    # k3 of a log-ratio x is x²/2 for small x; (e^x − 1) − x in fp32 would be rounding noise.
    assert k3(torch.tensor([0.0]), torch.tensor([1e-3])).item() == pytest.approx(5e-7, rel=1e-2)
