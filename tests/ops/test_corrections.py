import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from rft.errors import BadInput, ShapeError
from rft.ops import corrections, losses, metrics
from rft.ops.aggregation import Totals
from rft.ops.corrections import Correction
from tests.ops.cases import gradient, random_tokens, seeds

NAN = float("nan")
PARAMETERS: dict[str, dict[str, float]] = {
    "truncated": {"cap": 1.2},
    "truncated_sequence": {"cap": 1.2},
    "masked": {"cap": 1.2},
    "masked_sequence": {"cap": 1.2},
    "icepop": {"low": 0.8, "high": 1.3},
    "geometric_rejection": {"low": 0.9, "high": 1.1},
    "decoupled": {"cap": 1.5},
}
ALL = list(PARAMETERS)
CORRECTIONS: dict[str, Callable[..., Correction]] = {name: partial(getattr(corrections, name), **PARAMETERS[name]) for name in ALL}

# Ratios 1/2, 3, 2 and one that does not count; then 1 and 1.5. Products 3 and 1.5, geometric means ∛3 and √1.5.
RATIOS = torch.tensor([[0.5, 3.0, 2.0, NAN], [1.0, 1.5, NAN, NAN]])
MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])
ENGINE = torch.full((2, 4), -2.0)


def by_hand(name: str, **parameters: float) -> tuple[Tensor, list[list[int]], list[list[int]]]:
    result = getattr(corrections, name)(ENGINE + RATIOS.log(), ENGINE, MASK, **parameters)
    assert result.weights.dtype == torch.float32
    return result.weights, result.kept.int().tolist(), result.clipped.int().tolist()


def same(got: tuple[Tensor, list[list[int]], list[list[int]]], weights: list[list[float]], kept: str, clipped: str) -> None:
    torch.testing.assert_close(got[0], torch.tensor(weights))
    assert ["".join(map(str, row)) for row in got[1]] == kept.split()
    assert ["".join(map(str, row)) for row in got[2]] == clipped.split()


def test_by_hand() -> None:
    same(by_hand("truncated", cap=2.5), [[0.5, 2.5, 2.0, 1.0], [1.0, 1.5, 1.0, 1.0]], "1111 1111", "0100 0000")
    same(by_hand("truncated_sequence", cap=2), [[2.0, 2.0, 2.0, 1.0], [1.5, 1.5, 1.0, 1.0]], "1111 1111", "1110 0000")
    same(by_hand("masked", cap=2.5), [[0.5, 0.0, 2.0, 1.0], [1.0, 1.5, 1.0, 1.0]], "1011 1111", "0000 0000")
    same(by_hand("masked_sequence", cap=2), [[0.0, 0.0, 0.0, 1.0], [1.5, 1.5, 1.0, 1.0]], "0001 1111", "0000 0000")
    same(by_hand("icepop", low=0.6, high=2.5), [[0.0, 0.0, 2.0, 1.0], [1.0, 1.5, 1.0, 1.0]], "0011 1111", "0000 0000")
    same(by_hand("geometric_rejection", low=0.9, high=1.3), [[0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]], "0001 1111", "0000 0000")
    same(by_hand("decoupled"), [[0.5, 3.0, 2.0, 1.0], [1.0, 1.5, 1.0, 1.0]], "1111 1111", "0000 0000")
    same(by_hand("decoupled", cap=2.5), [[0.5, 0.0, 2.0, 1.0], [1.0, 1.5, 1.0, 1.0]], "1011 1111", "0000 0000")


def test_combined_by_hand() -> None:
    old = ENGINE + RATIOS.log()
    rejected = corrections.geometric_rejection(old, ENGINE, MASK, low=0.9, high=1.3)
    both = corrections.combined(rejected, corrections.truncated(old, ENGINE, MASK, cap=1.2))
    got = (both.weights, both.kept.int().tolist(), both.clipped.int().tolist())
    same(got, [[0.0, 0.0, 0.0, 1.0], [1.0, 1.2, 1.0, 1.0]], "0001 1111", "0000 0100")


Naive = tuple[float, bool, bool]
"""Weight, kept, clipped."""


def select(ratio: float, low: float, high: float) -> Naive:
    return (ratio, True, False) if low <= ratio <= high else (0.0, False, False)


def naive(name: str, changes: list[float], marks: list[bool], t: int) -> Naive:
    """In double precision, of the log-ratios of one row."""
    if not marks[t]:
        return 1.0, True, False
    counted, bounds = [x for x, mark in zip(changes, marks, strict=True) if mark], PARAMETERS[name]
    token, product, mean = math.exp(changes[t]), math.exp(sum(counted)), math.exp(sum(counted) / len(counted))
    match name:
        case "truncated" | "truncated_sequence":
            ratio = token if name == "truncated" else product
            return min(ratio, bounds["cap"]), True, ratio > bounds["cap"]
        case "masked" | "decoupled":
            return select(token, 0, bounds["cap"])
        case "masked_sequence":
            return select(product, 0, bounds["cap"])
        case "icepop":
            return select(token, bounds["low"], bounds["high"])
        case _:
            kept = select(mean, bounds["low"], bounds["high"])[1]
            return float(kept), kept, False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", seeds(4))
def test_against_a_loop(seed: int, name: str, dtype: torch.dtype) -> None:
    old, engine, _, mask = random_tokens(seed, dtype)
    result = CORRECTIONS[name](old, engine, mask)
    assert result.weights.dtype == torch.float32
    changes = (old.double() - engine.double()).tolist()
    for row in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            weight, kept, clipped = naive(name, changes[row], mask[row].tolist(), t)
            assert result.weights[row, t].item() == pytest.approx(weight, rel=1e-5)
            assert (bool(result.kept[row, t]), bool(result.clipped[row, t])) == (kept, clipped)


@pytest.mark.parametrize("name", ALL)
def test_what_agrees_is_left_alone(name: str) -> None:
    old, _, _, mask = random_tokens(5, torch.bfloat16)
    result = CORRECTIONS[name](old, old, mask)
    assert (result.weights == 1).all()
    assert result.kept.all()
    assert not result.clipped.any()


@pytest.mark.parametrize("name", ALL)
def test_no_gradient_flows_and_what_overflows_stays_finite(name: str) -> None:
    old, engine = torch.tensor([[0.0, -200.0], [0.0, 0.0]], requires_grad=True), torch.tensor([[-200.0, 0.0], [-150.0, -150.0]])
    result = CORRECTIONS[name](old, engine, torch.ones(2, 2, dtype=torch.bool))
    assert not result.weights.requires_grad
    assert result.weights.isfinite().all()
    assert (result.weights <= max(PARAMETERS[name].get("cap", 0.0), PARAMETERS[name].get("high", 0.0), 1.0)).all()


@pytest.mark.parametrize("name", ALL)
def test_rows_do_not_mix_nor_does_padding_matter(name: str) -> None:
    old, engine, _, mask = random_tokens(7, torch.float32)
    whole = CORRECTIONS[name](old, engine, mask)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(0))
    mixed = CORRECTIONS[name](old[order], engine[order], mask[order])
    wider = CORRECTIONS[name](
        *(torch.nn.functional.pad(x, (0, 2), value=NAN) for x in (old, engine)), torch.nn.functional.pad(mask, (0, 2))
    )
    torch.testing.assert_close(mixed.weights, whole.weights[order])
    torch.testing.assert_close(wider.weights[:, :-2], whole.weights)
    assert torch.equal(mixed.kept, whole.kept[order])
    assert not whole.kept.all() or "truncated" in name


def test_the_weighted_mean_over_the_engines_tokens_is_the_trainers() -> None:
    """All tokens of a small distribution, weighed by the engine's probabilities."""
    trainer, engine = (torch.tensor([logits]).log_softmax(1) for logits in ([0.2, -0.5, 0.9], [-0.1, 0.3, 0.4]))
    values, everything = torch.tensor([[1.0, -2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool)
    weights = corrections.decoupled(trainer, engine, everything).weights
    assert (engine.exp() * weights * values).sum().item() == pytest.approx((trainer.exp() * values).sum().item(), rel=1e-5)


def test_decoupled_ppo_is_the_importance_weighted_objective() -> None:
    """Hilton et al., equation 5: behaviour is corrected for outside of the clip, which is measured from the proximal policy."""
    new, proximal, behaviour = torch.tensor([[-0.5]], requires_grad=True), torch.tensor([[-0.6]]), torch.tensor([[-1.0]])
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss = losses.ppo_clip(new, proximal, torch.ones(1, 1), mask, low=0.2, high=0.2).loss
    weighted = (corrections.decoupled(proximal, behaviour, mask).weights * loss).sum()
    assert weighted.item() == pytest.approx(-math.exp(0.4) * math.exp(0.1))  # π/behaviour A, as r = e^0.1 is within the clip
    assert gradient(weighted, new).item() == pytest.approx(-math.exp(0.5))


# ---- diagnostics ----


def test_mismatch_by_hand() -> None:
    numbers = metrics.read(corrections.mismatch(ENGINE + RATIOS.log(), ENGINE, MASK, Totals(tokens=5, sequences=2)))
    for name, gap in (("p50", math.log(2)), ("p90", math.log(3)), ("p99", math.log(3))):
        assert numbers.pop(f"engine_gap_{name}") == pytest.approx(gap, rel=0.015)
    assert numbers == pytest.approx(
        {
            "engine_gap": (math.log(2) + math.log(3) + math.log(2) + math.log(1.5)) / 5,
            "engine_gap_max": math.log(3),
            "engine_ratio_outside": 4 / 5,
        }
    )


def test_weighting_by_hand() -> None:
    correction = corrections.masked(ENGINE + RATIOS.log(), ENGINE, MASK, cap=2.5)
    assert metrics.read(corrections.weighting(correction, MASK, Totals(tokens=5, sequences=2))) == pytest.approx(
        {
            "weight": (0.5 + 0 + 2 + 1 + 1.5) / 5,
            "weight_clipped": 0.0,
            "weight_masked": 1 / 5,
            "effective_sample_size": 5.0**2 / (5 * (0.25 + 4 + 1 + 2.25)),
        }
    )


@pytest.mark.parametrize("seed", seeds(4))
def test_what_parts_say_merges_to_what_is_true_of_the_whole(seed: int) -> None:
    old, engine, _, mask = random_tokens(seed, torch.float32)
    totals = Totals(tokens=int(mask.sum()), sequences=int(mask.any(1).sum()))

    def of(rows: slice) -> dict[str, Tensor | metrics.Metric]:
        parts = old[rows], engine[rows], mask[rows]
        weights = corrections.weighting(corrections.truncated(*parts, cap=1.1), mask[rows], totals)
        return {**corrections.mismatch(*parts, totals), **weights}

    whole = metrics.read(of(slice(None)))
    assert metrics.read(metrics.merged([of(slice(0, 1)), of(slice(1, 3)), of(slice(3, None))])) == pytest.approx(whole, rel=1e-5, abs=1e-7)
    assert all(math.isfinite(value) for value in whole.values())
    if mask.any():
        assert 0 < whole["effective_sample_size"] <= 1
        assert whole["engine_gap_max"] >= whole["engine_gap"] > 0
        gaps = (old - engine)[mask].abs()
        assert whole["engine_gap"] == pytest.approx(float(gaps.mean()), rel=1e-4)
        assert whole["engine_gap_p50"] == pytest.approx(float(gaps.sort().values[(len(gaps) - 1) // 2]), rel=0.016)
        outside = [not 0.9 <= math.exp(change) <= 1.1 for change in (old - engine)[mask].tolist()]
        assert whole["engine_ratio_outside"] == pytest.approx(sum(outside) / len(outside))


# ---- what is refused ----


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("truncated", {"cap": 0.9}),
        ("truncated", {"cap": NAN}),
        ("truncated_sequence", {"cap": 0.0}),
        ("masked", {"cap": 0.5}),
        ("masked_sequence", {"cap": -1.0}),
        ("decoupled", {"cap": 0.5}),
        ("icepop", {"low": -0.1, "high": 2.0}),
        ("icepop", {"low": 1.1, "high": 2.0}),
        ("icepop", {"low": 0.5, "high": 0.9}),
        ("geometric_rejection", {"low": 0.9, "high": NAN}),
    ],
)
def test_bad_parameters_are_refused(name: str, parameters: dict[str, float]) -> None:
    value = torch.zeros(1, 1)
    with pytest.raises(BadInput, match=f"^{name}: .* must be between"):
        getattr(corrections, name)(value, value, value.bool(), **parameters)


@pytest.mark.parametrize("name", ALL)
def test_shapes_are_checked(name: str) -> None:
    with pytest.raises(ShapeError, match=name):
        CORRECTIONS[name](torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3, dtype=torch.bool))
