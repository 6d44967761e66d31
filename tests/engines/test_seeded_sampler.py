"""What SGLang's sampler is exchanged for: its distribution, row by row, and its random numbers. SGLang itself is not needed for that."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.engines.sglang_sampler import distribution, uniforms_at
from rft.sampling import Sampling
from rft.testing.engines import distribution as plainly

MASK = 2**64 - 1
WAYS = [
    Sampling(), Sampling(temperature=0.5), Sampling(top_k=7), Sampling(top_p=0.6), Sampling(min_p=0.1),
    Sampling(temperature=2.0, top_k=20, top_p=0.8), Sampling(temperature=0.7, top_k=30, top_p=0.9, min_p=0.02),
]  # fmt: skip


def batch(ways: list[Sampling], vocab: int) -> Any:
    """As SGLang gives it to a sampler."""
    return SimpleNamespace(
        is_all_greedy=False,
        need_min_p_sampling=any(way.min_p for way in ways),
        need_top_k_sampling=any(way.top_k for way in ways),
        need_top_p_sampling=any(way.top_p < 1 for way in ways),
        temperatures=torch.tensor([[way.temperature] for way in ways]),
        top_ks=torch.tensor([way.top_k or vocab for way in ways]),
        top_ps=torch.tensor([way.top_p for way in ways]),
        min_ps=torch.tensor([way.min_p for way in ways]),
    )


@pytest.mark.parametrize("ways", [WAYS, WAYS[:2]], ids=["cut", "whole"])
def test_each_row_has_the_distribution_of_its_own_sampling(ways: list[Sampling]) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(len(ways), 50)
    found = distribution(logits, batch(ways, 50))
    for row, at, way in zip(found, logits, ways, strict=True):
        expected = plainly(at, way)
        assert torch.equal(row == -torch.inf, expected == -torch.inf)
        assert torch.allclose(row.exp(), expected.exp(), atol=1e-6)


def test_greedy_rows_have_the_models_own() -> None:
    logits = torch.randn(3, 50)
    assert torch.equal(distribution(logits, SimpleNamespace(is_all_greedy=True)), logits.log_softmax(-1))


def test_numbers_are_those_of_splitmix64() -> None:
    """By Python's own integers, which do not overflow."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    seeds, positions = (0, 1, 8, 2**62 + 8, 2**63 - 1), (0, 1, 2, 1000, 2**31)
    for seed in seeds:
        expected = [(mix((mix((seed + golden) & MASK) + (position + 1) * golden) & MASK) >> 11) * 2.0**-53 for position in positions]
        assert uniforms_at(torch.tensor([seed] * 5), torch.tensor(positions)).tolist() == expected


def test_numbers_are_even_over_seeds_and_over_positions() -> None:
    """χ² over ten equal bins; 27.9 is its 99.9th percentile with nine degrees of freedom."""
    many = torch.arange(20000)
    for numbers in (uniforms_at(many, torch.full_like(many, 3)), uniforms_at(torch.full_like(many, 5), many)):
        counts = torch.histc(numbers, 10, 0, 1)
        assert ((counts - 2000) ** 2 / 2000).sum() < 27.9
        assert len(set(numbers.tolist())) == len(many)
