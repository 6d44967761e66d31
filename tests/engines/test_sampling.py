"""Drawing tokens, by literal numbers."""

import math

import pytest
import torch

from rft.engines.sampling import draw, uniforms
from rft.sampling import Sampling

# Probabilities 0.5, 0.25, 0.125, 0.125 of tokens 1, 3, 0, 2.
LOGITS = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()


def at(u: float, sampling: Sampling, logits: torch.Tensor = LOGITS) -> tuple[int, float]:
    tokens, logprobs = draw(logits, torch.tensor([u], dtype=torch.float64), sampling)
    return int(tokens), float(logprobs.exp())


@pytest.mark.parametrize(("u", "token"), [(0.0, 0), (0.124, 0), (0.126, 1), (0.62, 1), (0.63, 2), (0.74, 2), (0.76, 3), (1 - 2**-53, 3)])
def test_the_inverse_of_the_cumulative_distribution(u: float, token: int) -> None:
    drawn, probability = at(u, Sampling())
    assert drawn == token
    assert probability == pytest.approx([0.125, 0.5, 0.125, 0.25][token])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=1), {1: 1.0}),
        (Sampling(top_k=2), {1: 2 / 3, 3: 1 / 3}),
        (Sampling(top_k=99), {0: 0.125, 1: 0.5, 2: 0.125, 3: 0.25}),
        (Sampling(top_p=0.5), {1: 1.0}),
        (Sampling(top_p=0.51), {1: 2 / 3, 3: 1 / 3}),
        (Sampling(top_p=1e-9), {1: 1.0}),
        # The mass is that of what top-k has left: 2/3 and 1/3.
        (Sampling(top_k=2, top_p=0.6), {1: 1.0}),
        (Sampling(min_p=0.51), {1: 1.0}),
        (Sampling(min_p=0.49), {1: 2 / 3, 3: 1 / 3}),
        (Sampling(min_p=0.3, top_p=0.6), {1: 1.0}),
        # At temperature 0.5 probabilities are squared: 16, 4, 1 and 1 parts of 22.
        (Sampling(temperature=0.5, top_k=2), {1: 0.8, 3: 0.2}),
        (Sampling(temperature=0.5), {0: 1 / 22, 1: 16 / 22, 2: 1 / 22, 3: 4 / 22}),
    ],
    ids=str,
)
def test_what_is_cut_off_is_never_drawn(sampling: Sampling, kept: dict[int, float]) -> None:
    drawn = dict(at(u / 500, sampling) for u in range(500))
    assert drawn == pytest.approx(kept)


def test_greedy() -> None:
    assert at(0.99, Sampling(temperature=0)) == (1, 0.5)
    assert at(0.99, Sampling(temperature=0, top_k=1, top_p=0.1)) == (1, 0.5)


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000])
def test_vocabularies_of_any_size(vocab: int) -> None:
    """Blocks of 256 tokens, the last one padded: every token is drawn, at its place, and none beyond."""
    logits = torch.zeros(1, vocab)
    numbers = (torch.arange(vocab, dtype=torch.float64) + 0.5) / vocab
    tokens, logprobs = draw(logits.expand(vocab, -1), numbers, Sampling())
    assert tokens.tolist() == list(range(vocab))
    assert torch.allclose(logprobs, torch.full((vocab,), -math.log(vocab)))


def test_the_ends_of_the_interval_hold_no_impossible_token() -> None:
    logits = torch.full((2, 600), -torch.inf)
    logits[:, [17, 300, 301, 599 - 30]] = 0.0
    tokens, logprobs = draw(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), Sampling())
    assert tokens.tolist() == [17, 569]
    assert logprobs.isfinite().all()


def test_uniforms_are_of_the_seed_alone() -> None:
    assert torch.equal(uniforms(7, 5), uniforms(7, 9)[:5])
    assert not torch.equal(uniforms(7, 5), uniforms(8, 5))
    many = uniforms(2**63 - 1, 100_000)
    assert float(many.min()) >= 0
    assert float(many.max()) < 1
    assert abs(float(many.mean()) - 0.5) < 0.005


def test_logits_that_are_no_numbers_give_a_token_and_no_logprob() -> None:
    """A device would end with the process for a token that is none."""
    for vocab in (3, 300):
        tokens, logprobs = draw(torch.full((2, vocab), math.nan), torch.tensor([0.0, 0.99], dtype=torch.float64), Sampling())
        assert all(0 <= token < vocab for token in tokens.tolist())
        assert logprobs.isnan().all()
