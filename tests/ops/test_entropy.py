import math

import pytest
import torch

from rft.errors import BadInput, ShapeError
from rft.ops.entropy import entropy_threshold, high_entropy_tokens
from tests.ops.cases import random_tokens, seeds

NAN = float("nan")


def test_high_entropy_tokens_by_hand() -> None:
    entropies = torch.tensor([[0.1, 2.0, NAN, 0.5, 1.0, 0.2], [1.0, 1.0, 1.0, NAN, NAN, NAN], [NAN] * 6])
    mask = torch.tensor([[True, True, False, True, True, True], [True, True, True, False, False, False], [False] * 6])
    # ⌈0.4 · 5⌉ = 2 of the first row, ⌈0.4 · 3⌉ = 2 of the second, the earlier ones as all are equal, none of the third
    assert high_entropy_tokens(entropies, mask, share=0.4).int().tolist() == [[0, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 0], [0] * 6]
    assert torch.equal(high_entropy_tokens(entropies, mask, share=1), mask)
    assert high_entropy_tokens(entropies, mask, share=1e-9).sum(1).tolist() == [1, 1, 0]


def test_entropy_threshold_by_hand() -> None:
    entropies, mask = torch.tensor([[0.1, 2.0, NAN], [0.5, 1.0, 0.2]]), torch.tensor([[True, True, False], [True, True, True]])
    assert entropy_threshold(entropies, mask, share=0.2).item() == 2.0  # ⌈1⌉ of 5
    assert entropy_threshold(entropies, mask, share=0.21).item() == 1.0  # ⌈1.05⌉ of 5
    assert entropy_threshold(entropies, mask, share=1.0).item() == torch.tensor(0.1).item()
    assert entropy_threshold(entropies, torch.zeros_like(mask), share=0.2).item() == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.2, 0.55, 1.0])
@pytest.mark.parametrize("seed", seeds(4))
def test_against_a_loop(seed: int, share: float, dtype: torch.dtype) -> None:
    entropies, _, _, mask = random_tokens(seed, dtype)
    entropies = (entropies * 2).round() / 2  # many are equal
    got, threshold = high_entropy_tokens(entropies, mask, share=share), entropy_threshold(entropies, mask, share=share)
    for row, values, marks in zip(got.tolist(), entropies.tolist(), mask.tolist(), strict=True):
        marked = [t for t, mark in enumerate(marks) if mark]
        best = sorted(marked, key=lambda t: (-values[t], t))[: math.ceil(round(share * len(marked), 6))]
        assert [t for t, chosen in enumerate(row) if chosen] == sorted(best)
    everything = sorted(entropies[mask].tolist(), reverse=True)
    assert threshold.dtype == torch.float32
    assert threshold.item() == (everything[math.ceil(round(share * len(everything), 6)) - 1] if everything else math.inf)
    selected = mask & (entropies >= threshold)
    assert int(selected.sum()) >= math.ceil(round(share * len(everything), 6))


def test_of_many_equal_entropies_the_earlier_tokens_are_chosen() -> None:
    chosen = high_entropy_tokens(torch.ones(2, 5000), torch.ones(2, 5000, dtype=torch.bool), share=0.3)
    assert chosen[:, :1500].all()
    assert not chosen[:, 1500:].any()


@pytest.mark.parametrize("tokens", [10, 30, 100, 1000])
def test_a_whole_number_of_tokens_is_not_rounded_up(tokens: int) -> None:
    """0.07 · 100 is 7.000000000000001 in double precision."""
    entropies = torch.arange(tokens, dtype=torch.float32)[None]
    for percent in range(10, 100, 10 if tokens < 100 else 1):
        share, expected = percent / 100, tokens * percent // 100
        assert int(high_entropy_tokens(entropies, torch.ones_like(entropies).bool(), share=share).sum()) == expected
        assert entropy_threshold(entropies, torch.ones_like(entropies).bool(), share=share).item() == tokens - expected


def test_the_threshold_needs_the_whole_batch_and_does_not_care_for_its_order() -> None:
    entropies, _, _, mask = random_tokens(7, torch.float32)
    whole = entropy_threshold(entropies, mask, share=0.3)
    assert torch.equal(entropy_threshold(entropies.flip(0), mask.flip(0), share=0.3), whole)
    rows = [entropy_threshold(entropies[i : i + 1], mask[i : i + 1], share=0.3) for i in range(len(mask))]
    assert any(row != whole for row in rows)


@pytest.mark.parametrize("share", [0.0, -0.2, 1.2, NAN])
@pytest.mark.parametrize("function", [high_entropy_tokens, entropy_threshold])
def test_a_bad_share_is_refused(function: object, share: float) -> None:
    assert callable(function)
    with pytest.raises(BadInput, match="share is"):
        function(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), share=share)


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="high_entropy_tokens"):
        high_entropy_tokens(torch.zeros(2, 3), torch.ones(2, 2, dtype=torch.bool), share=0.5)
