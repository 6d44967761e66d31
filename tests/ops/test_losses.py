import dataclasses as dc
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rft.errors import BadInput, ShapeError
from rft.ops import aggregation, losses
from rft.ops.aggregation import Totals
from tests.ops.cases import Table, gradient, random_tokens, seeds, slopes

NAN = float("nan")
PARAMETERS: dict[str, dict[str, float]] = {
    "policy_gradient": {},
    "ppo_clip": {"low": 0.2, "high": 0.28},
    "dual_clip": {"low": 0.2, "high": 0.28, "limit": 1.5},
    "gspo": {"low": 0.1, "high": 0.15},
    "gspo_token": {"low": 0.1, "high": 0.15},
    "gmpo": {"low": 0.3, "high": 0.4},
    "cispo": {"low": 0.4, "high": 0.3},
    "sapo": {"positive": 1.0, "negative": 1.3},
    "cpg": {"low": 0.2, "high": 0.28},
    "cpgd": {"low": 0.2, "high": 0.28, "drift": 0.7, "drift_limit": 0.25},
    "topr": {},
}
ALL = list(PARAMETERS)
LOSSES: dict[str, Callable[..., losses.Surrogate]] = {name: partial(getattr(losses, name), **PARAMETERS[name]) for name in ALL}


# ---- an independent form: token by token, in double precision; `held` is what the gradient does not see ----


@dc.dataclass
class Row:
    new: list[float]
    held: list[float]
    old: list[float]
    gains: list[float]
    marks: list[bool]

    @property
    def marked(self) -> list[int]:
        return [t for t, mark in enumerate(self.marks) if mark]

    def ratio(self, t: int, held: bool = False) -> float:
        return math.exp((self.held if held else self.new)[t] - self.old[t])

    def product(self, held: bool) -> float:
        return math.prod(self.ratio(t, held) for t in self.marked)


Naive = tuple[float, float, bool]
"""Loss, ratio, clipped."""


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def surrogate(ratio: float, gain: float, low: float, high: float) -> Naive:
    free, bounded = ratio * gain, clip(ratio, 1 - low, 1 + high) * gain
    return -min(free, bounded), ratio, bounded < free


def naive_policy_gradient(row: Row, t: int) -> Naive:
    return -row.gains[t] * row.new[t], row.ratio(t), False


def naive_ppo_clip(row: Row, t: int, low: float, high: float) -> Naive:
    return surrogate(row.ratio(t), row.gains[t], low, high)


def naive_dual_clip(row: Row, t: int, low: float, high: float, limit: float) -> Naive:
    loss, ratio, clipped = surrogate(row.ratio(t), row.gains[t], low, high)
    if row.gains[t] < 0 and -loss < limit * row.gains[t]:
        return -limit * row.gains[t], ratio, True
    return loss, ratio, clipped


def naive_gspo(row: Row, t: int, low: float, high: float) -> Naive:
    return surrogate(row.product(held=False) ** (1 / len(row.marked)), row.gains[t], low, high)


def naive_gspo_token(row: Row, t: int, low: float, high: float) -> Naive:
    ratio = row.product(held=True) ** (1 / len(row.marked)) * math.exp(row.new[t]) / math.exp(row.held[t])
    return surrogate(ratio, row.gains[t], low, high)


def naive_gmpo(row: Row, t: int, low: float, high: float) -> Naive:
    def kept(u: int) -> float:
        ratio = row.ratio(u)
        return min(ratio, math.exp(high)) if row.gains[u] > 0 else max(ratio, math.exp(-low))

    mean = math.prod(kept(u) for u in row.marked) ** (1 / len(row.marked))
    return -row.gains[t] * mean, row.ratio(t), kept(t) != row.ratio(t)


def naive_cispo(row: Row, t: int, low: float, high: float) -> Naive:
    ratio = row.ratio(t, held=True)
    weight = clip(ratio, 1 - low, 1 + high)
    return -weight * row.gains[t] * row.new[t], ratio, weight != ratio


def naive_sapo(row: Row, t: int, positive: float, negative: float) -> Naive:
    temperature = positive if row.gains[t] > 0 else negative
    gate = 4 / temperature / (1 + math.exp(-temperature * (row.ratio(t) - 1)))
    return -gate * row.gains[t], row.ratio(t), False


def naive_cpg(row: Row, t: int, low: float, high: float) -> Naive:
    change = math.log(row.ratio(t))
    free, bounded = change * row.gains[t], clip(change, math.log(1 - low), math.log(1 + high)) * row.gains[t]
    return -min(free, bounded), row.ratio(t), bounded < free


def naive_cpgd(row: Row, t: int, low: float, high: float, drift: float, drift_limit: float) -> Naive:
    loss, ratio, clipped = naive_cpg(row, t, low, high)
    before = row.ratio(t, held=True)
    distance = before - 1 - math.log(before) + min(before - 1, drift_limit) * (row.new[t] - row.held[t])
    return loss + drift * distance, ratio, clipped


def naive_topr(row: Row, t: int) -> Naive:
    ratio, bad = row.product(held=True), row.gains[t] < 0
    above = ratio > 1 + 1e-9  # a product of 1 may be off by a rounding error
    return -(min(ratio, 1.0) if bad else 1.0) * row.gains[t] * row.new[t], ratio, bad and above


def naive(name: str, new: Table, held: Table, old: Table, gains: Table, marks: list[list[bool]]) -> list[list[Naive]]:
    one = globals()[f"naive_{name}"]
    rows = [Row(*lists) for lists in zip(new, held, old, gains, marks, strict=True)]
    return [[one(row, t, **PARAMETERS[name]) if row.marks[t] else (0.0, 1.0, False) for t in range(len(row.marks))] for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", seeds(4))
def test_values_and_gradients_against_a_loop(seed: int, name: str, dtype: torch.dtype) -> None:
    new, old, advantages, mask = random_tokens(seed, dtype)
    shares = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
    leaf = new.clone().requires_grad_()
    result = LOSSES[name](leaf, old, advantages, mask)
    assert result.loss.dtype == result.ratio.dtype == torch.float32
    assert not result.ratio.requires_grad

    lists: list[Table] = [value.double().tolist() for value in (new, old, advantages)]
    held, marks, weights = lists[0], mask.tolist(), shares.double().tolist()
    expected = naive(name, held, held, *lists[1:], marks)
    for row in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            got = (result.loss[row, t].item(), result.ratio[row, t].item())
            assert got == pytest.approx(expected[row][t][:2], rel=1e-5, abs=1e-6)
            assert bool(result.clipped[row, t]) == expected[row][t][2]

    def total(moved: Table) -> float:
        table = naive(name, moved, held, *lists[1:], marks)
        return sum(w * loss for ws, ts in zip(weights, table, strict=True) for w, (loss, _, _) in zip(ws, ts, strict=True))

    got = gradient((shares * result.loss).sum(), leaf)
    tolerance = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2}}[dtype]
    torch.testing.assert_close(got, torch.tensor(slopes(total, held, marks)).reshape(mask.shape), **tolerance)


# ---- by hand ----


def one(name: str, ratio: float, advantage: float, **parameters: float) -> tuple[float, bool]:
    old, ones = torch.full((1, 1), -1.0), torch.ones(1, 1)
    result = getattr(losses, name)(old + math.log(ratio), old, advantage * ones, ones.bool(), **parameters)
    assert result.ratio.item() == pytest.approx(ratio)
    return round(result.loss.item(), 5), bool(result.clipped.item())


def test_policy_gradient_by_hand() -> None:
    # −A log p with log p = −1 + ln 1 = −1
    assert one("policy_gradient", 1.0, 2.0) == (2.0, False)
    assert one("policy_gradient", 1.0, -0.5) == (-0.5, False)


def test_ppo_clip_by_hand() -> None:
    higher = {"low": 0.2, "high": 0.28}
    assert one("ppo_clip", 1.0, 2.0, **higher) == (-2.0, False)
    assert one("ppo_clip", 1.5, 2.0, **higher) == (-2.56, True)  # a gain stops at 1.28
    assert one("ppo_clip", 1.25, 2.0, **higher) == (-2.5, False)  # and not at 1.2
    assert one("ppo_clip", 0.5, 2.0, **higher) == (-1.0, False)  # nor below
    assert one("ppo_clip", 0.5, -2.0, **higher) == (1.6, True)  # a loss stops at 0.8
    assert one("ppo_clip", 1.5, -2.0, **higher) == (3.0, False)  # and does not above
    assert one("ppo_clip", 1.5, 0.0, **higher) == (0.0, False)
    assert one("ppo_clip", 0.1, -2.0, low=1.0, high=0.28) == (0.2, False)  # no lower bound


def test_dual_clip_by_hand() -> None:
    dual = {"low": 0.2, "high": 0.2}
    assert one("dual_clip", 2.5, -2.0, **dual) == (5.0, False)  # below the limit of 3: as PPO
    assert one("dual_clip", 4.0, -2.0, **dual) == (6.0, True)  # held to 3 · 2
    assert one("dual_clip", 4.0, -2.0, **dual, limit=3.5) == (7.0, True)
    assert one("dual_clip", 4.0, 2.0, **dual) == (-2.4, True)
    assert one("dual_clip", 0.5, -2.0, **dual) == (1.6, True)


def test_gspo_by_hand() -> None:
    # Ratios 4 and 1 over two tokens: s = √4 = 2; the third token does not count. With A = 1 it is clipped to 1.5, with A = −1 free.
    new, old = torch.tensor([[math.log(4.0), 0.0, NAN]] * 2), torch.tensor([[0.0, 0.0, 5.0]] * 2)
    advantages, mask = torch.tensor([[1.0, 1.0, NAN], [-1.0, -1.0, NAN]]), torch.tensor([[True, True, False]] * 2)
    for loss in (losses.gspo, losses.gspo_token):
        result = loss(new, old, advantages, mask, low=0.5, high=0.5)
        torch.testing.assert_close(result.loss, torch.tensor([[-1.5, -1.5, 0.0], [2.0, 2.0, 0.0]]))
        torch.testing.assert_close(result.ratio, torch.tensor([[2.0, 2.0, 1.0]] * 2))
        assert result.clipped.tolist() == [[True, True, False], [False, False, False]]


def test_gmpo_by_hand() -> None:
    # Log-ratios 1 and 0.2, bounds ±0.4. A = 2: c = 0.4 and 0.2, mean 0.3. A = −2: nothing is too low, mean 0.6.
    new, old, mask = torch.tensor([[1.0, 0.2]] * 2), torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    result = losses.gmpo(new, old, torch.tensor([[2.0, 2.0], [-2.0, -2.0]]), mask)
    torch.testing.assert_close(result.loss, torch.tensor([[-2 * math.exp(0.3)] * 2, [2 * math.exp(0.6)] * 2]))
    assert result.clipped.tolist() == [[True, False], [False, False]]


def test_cispo_by_hand() -> None:
    # log p = −1 + ln r; −w A log p
    assert one("cispo", 1.0, 2.0, high=0.5) == (2.0, False)
    assert one("cispo", 2.0, 2.0, high=0.5) == (round(1.5 * 2 * (1 - math.log(2)), 5), True)
    assert one("cispo", 2.0, -2.0, high=0.5) == (round(-1.5 * 2 * (1 - math.log(2)), 5), True)
    assert one("cispo", 0.1, 1.0, high=0.5) == (round(0.1 * (1 + math.log(10)), 5), False)
    assert one("cispo", 0.1, 1.0, high=0.5, low=0.6) == (round(0.4 * (1 + math.log(10)), 5), True)


def test_sapo_by_hand() -> None:
    assert one("sapo", 1.0, 3.0) == (-6.0, False)  # 4 σ(0) A = 2 A
    assert one("sapo", 1.0, -3.0) == (round(2 / 1.05 * 3, 5), False)
    assert one("sapo", 2.0, 1.0) == (round(-4 / (1 + math.exp(-1)), 5), False)


def test_cpg_and_cpgd_by_hand() -> None:
    bounds = {"low": 0.5, "high": 0.5}
    assert one("cpg", math.exp(0.1), 2.0, **bounds) == (-0.2, False)
    assert one("cpg", 2.0, 2.0, **bounds) == (round(-2 * math.log(1.5), 5), True)
    assert one("cpg", 0.25, -2.0, **bounds) == (round(2 * math.log(0.5), 5), True)
    # d at r = 2: 2 − 1 − ln 2
    assert one("cpgd", 2.0, 2.0, **bounds, drift=0.5) == (round(-2 * math.log(1.5) + 0.5 * (1 - math.log(2)), 5), True)


def test_topr_by_hand() -> None:
    # Token ratios 4 and 1/2: 2 for the sequence; the second row 1/4 and 1/2: 1/8. All log p = −1 + log ratio.
    old, mask = torch.full((2, 2), -1.0), torch.ones(2, 2, dtype=torch.bool)
    ratios = torch.tensor([[4.0, 0.5], [0.25, 0.5]])
    new = old + ratios.log()
    good, bad = (losses.topr(new, old, torch.full((2, 2), gain), mask) for gain in (1.0, -1.0))
    torch.testing.assert_close(good.loss, -new)
    torch.testing.assert_close(bad.loss, new * torch.tensor([[1.0], [1 / 8]]))
    torch.testing.assert_close(bad.ratio, torch.tensor([[2.0, 2.0], [1 / 8, 1 / 8]]))
    assert bad.clipped.tolist() == [[True, True], [False, False]]
    assert not good.clipped.any()


def test_negative_log_likelihood() -> None:
    result = losses.negative_log_likelihood(torch.tensor([[-0.5, -2.0]], dtype=torch.bfloat16))
    assert result.dtype == torch.float32
    assert result.tolist() == [[0.5, 2.0]]


# ---- what all share ----


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_the_first_step_the_ratio_is_1_and_the_gradient_the_policy_gradient(name: str, dtype: torch.dtype) -> None:
    new, _, _, mask = random_tokens(5, dtype)
    leaf = new.clone().requires_grad_()
    gains = torch.linspace(-2, 2, len(mask))[:, None].expand_as(mask).contiguous()
    totals = Totals(tokens=int(mask.sum()), sequences=int(mask.any(1).sum()))
    result = LOSSES[name](leaf, leaf.detach(), gains, mask)
    assert (result.ratio == 1).all()
    assert not result.clipped.any()
    got, plain = (
        gradient(aggregation.sequence_mean_of_token_means(loss, mask, totals), leaf)
        for loss in (result.loss, losses.policy_gradient(leaf, leaf.detach(), gains, mask).loss)
    )
    assert plain.abs().sum() > 0
    torch.testing.assert_close(got, plain, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_a_ratio_beyond_all_bounds_stays_finite(name: str) -> None:
    new, old = torch.tensor([[0.0, -200.0], [0.0, 0.0]]), torch.tensor([[-200.0, 0.0], [-200.0, -300.0]])
    for gain in (-1.0, 0.0, 1.0):
        leaf = new.clone().requires_grad_()
        result = LOSSES[name](leaf, old, torch.full((2, 2), gain), torch.ones(2, 2, dtype=torch.bool))
        for value in (result.loss, result.ratio, gradient(result.loss.sum(), leaf)):
            assert value.isfinite().all()
        assert result.ratio.max() <= math.exp(20) * (1 + 1e-6)


@pytest.mark.parametrize("name", ALL)
def test_the_ratio_is_taken_in_float32(name: str) -> None:
    # −3.0 and −3.015625 are both bf16 numbers; their difference is exact in fp32, and e^0.015625 would be 1.015625 in bf16.
    new, old = (torch.tensor([[x]], dtype=torch.bfloat16) for x in (-3.0, -3.015625))
    result = LOSSES[name](new, old, torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert result.ratio.item() == pytest.approx(math.exp(0.015625), rel=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_only_new_is_differentiated(name: str) -> None:
    new, old, gains = (torch.tensor([[x, x / 2]], requires_grad=True) for x in (-1.0, -1.1, 0.7))
    LOSSES[name](new, old, gains, torch.ones(1, 2, dtype=torch.bool)).loss.sum().backward()
    assert new.grad is not None
    assert old.grad is None
    assert gains.grad is None


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "gspo", "gspo_token", "cpg"])
def test_clipped_tokens_have_no_gradient(name: str) -> None:
    leaf = torch.tensor([[0.9], [-0.9], [0.9]], requires_grad=True)
    result = LOSSES[name](leaf, torch.zeros(3, 1), torch.tensor([[1.0], [-1.0], [-1.0]]), torch.ones(3, 1, dtype=torch.bool))
    assert result.clipped.flatten().tolist() == [True, True, name == "dual_clip"]
    got = gradient(result.loss.sum(), leaf).flatten()
    assert (got == 0).tolist() == result.clipped.flatten().tolist()


@pytest.mark.parametrize("name", ALL)
def test_rows_do_not_mix_nor_does_padding_matter(name: str) -> None:
    new, old, advantages, mask = random_tokens(7, torch.float32)
    whole = LOSSES[name](new, old, advantages, mask)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(0))
    mixed = LOSSES[name](*(value[order] for value in (new, old, advantages, mask)))
    padded: list[Any] = [torch.nn.functional.pad(value, (0, 3), value=NAN) for value in (new, old, advantages)]
    wider = LOSSES[name](*padded, torch.nn.functional.pad(mask, (0, 3), value=False))
    for field in ("loss", "ratio", "clipped"):
        value: Tensor = getattr(whole, field)
        assert torch.equal(getattr(mixed, field), value[order])
        torch.testing.assert_close(getattr(wider, field)[:, : mask.shape[1]], value)


@pytest.mark.parametrize("name", ALL)
def test_nothing_marked_is_zero(name: str) -> None:
    nothing = torch.full((2, 3), NAN, requires_grad=True)
    result = LOSSES[name](nothing, nothing, nothing, torch.zeros(2, 3, dtype=torch.bool))
    assert (result.loss == 0).all()
    assert (result.ratio == 1).all()
    assert not result.clipped.any()
    assert (gradient(result.loss.sum(), nothing) == 0).all()
    empty = torch.zeros(0, 3)
    assert LOSSES[name](empty, empty, empty, empty.bool()).loss.shape == (0, 3)


def test_gspo_and_gspo_token_train_alike_on_one_advantage_per_row() -> None:
    new, old, _, mask = random_tokens(4, torch.float32)
    gains = torch.linspace(-1, 1.5, len(mask))[:, None].expand_as(mask).contiguous()
    totals = Totals(tokens=1, sequences=int(mask.any(1).sum()))
    leaf = new.clone().requires_grad_()
    first, second = (
        aggregation.sequence_mean_of_token_means(loss(leaf, old, gains, mask, low=0.1, high=0.1).loss, mask, totals)
        for loss in (losses.gspo, losses.gspo_token)
    )
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(gradient(first, leaf), gradient(second, leaf))
    assert gradient(first, leaf).abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("ppo_clip", {"low": 0.0, "high": 0.2}),
        ("ppo_clip", {"low": 0.2, "high": -0.2}),
        ("ppo_clip", {"low": NAN, "high": 0.2}),
        ("dual_clip", {"low": 0.2, "high": 0.2, "limit": 1.1}),
        ("gspo", {"low": 0.0, "high": 0.2}),
        ("gspo_token", {"low": 0.2, "high": 0.0}),
        ("gmpo", {"low": -0.4}),
        ("cispo", {"high": 0.0}),
        ("cispo", {"high": 0.3, "low": 1.5}),
        ("sapo", {"positive": 0.0}),
        ("cpg", {"low": 1.0, "high": 0.2}),
        ("cpgd", {"low": 0.2, "high": 0.2, "drift": -1.0}),
        ("cpgd", {"low": 0.2, "high": 0.2, "drift": 1.0, "drift_limit": 0.0}),
    ],
)
def test_bad_parameters_are_refused(name: str, parameters: dict[str, float]) -> None:
    value = torch.zeros(1, 1)
    with pytest.raises(BadInput, match=rf"^{name[:3]}.*must be"):
        getattr(losses, name)(value, value, value, value.bool(), **parameters)


@pytest.mark.parametrize("name", ALL)
def test_shapes_are_checked(name: str) -> None:
    value = torch.zeros(2, 3)
    with pytest.raises(ShapeError, match=name):
        LOSSES[name](value, torch.zeros(2, 4), value, value.bool())
    with pytest.raises(ShapeError, match=name):
        LOSSES[name](value, value, value, value)
