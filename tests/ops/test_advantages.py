import dataclasses as dc
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rft.errors import BadInput, ShapeError
from rft.ops import advantages
from rft.ops.normalisation import batch_normalise, whiten
from tests.ops.group_cases import DTYPES, SEEDS, Case, random_groups

NAN = float("nan")


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


# ---- by hand ----


def test_grpo_by_hand() -> None:
    # group 7: mean 1, deviations ±1, std 1; group 3: rewards 0, 0, 0, 4: mean 1, std √((1 + 1 + 1 + 9) / 4) = √3; mixed up by position
    rewards, groups, root = torch.tensor([0.0, 0.0, 4.0, 2.0, 0.0, 0.0]), ids(7, 3, 3, 7, 3, 3), math.sqrt(3)
    expected = torch.tensor([-1.0, -1 / root, 3 / root, 1.0, -1 / root, -1 / root])
    torch.testing.assert_close(advantages.grpo(rewards, groups, eps=0), expected)
    # as samples: std √2 and √(12 / 3) = 2
    expected = torch.tensor([-1 / math.sqrt(2), -1 / 2, 3 / 2, 1 / math.sqrt(2), -1 / 2, -1 / 2])
    torch.testing.assert_close(advantages.grpo(rewards, groups, ddof=1, eps=0), expected)
    # eps is added to the deviation: 1 / (1 + 1)
    assert advantages.grpo(rewards, groups, eps=1.0)[3].item() == 0.5


def test_dr_grpo_rloo_and_remax_by_hand() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 5.0, 0.0]), ids(1, 1, 2, 1)
    third = 1 / 3
    torch.testing.assert_close(advantages.dr_grpo(rewards, groups), torch.tensor([2 * third, -third, 0.0, -third]))
    # the others' means: 0, 1/2, none, 1/2
    assert advantages.rloo(rewards, groups).tolist() == [1.0, -0.5, 0.0, -0.5]
    greedy = torch.tensor([0.25, 0.25, 6.0, 0.25])
    assert advantages.remax(rewards, greedy=greedy).tolist() == [0.75, -0.25, -1.0, -0.25]


def test_opo_by_hand() -> None:
    # (3 · 1 + 1 · 0) / 4 = 3/4; the last group has no token
    rewards, groups = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0]), ids(1, 1, 2, 3, 3)
    assert advantages.opo(rewards, groups, lengths=ids(3, 1, 5, 0, 0)).tolist() == [0.25, -0.75, 0.0, 0.0, 0.0]


def test_cpgd_by_hand() -> None:
    # three groups, one of which differs: ω = min(cap, 3 / 1)
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), ids(1, 1, 2, 2, 3, 3)
    assert advantages.cpgd(rewards, groups, cap=9.0).tolist() == [1.5, -1.5, 0.0, 0.0, 0.0, 0.0]
    assert advantages.cpgd(rewards, groups, cap=2.0).tolist() == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    # a group whose rewards all failed is none
    valid = torch.tensor([True, True, True, True, False, False])
    assert advantages.cpgd(rewards, groups, valid, cap=9.0).tolist() == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]


def test_pass_at_k_by_hand() -> None:
    # n = 4, one success, k = 2: of 6 pairs 3 have it: R = 1/2, σ = 1/2. The success: (1 − 1/2) / (1/2) = 1. A failure is in 3 pairs,
    # one of which succeeds: (1/3 − 1/2) / (1/2) = −1/3.
    third = 1 / 3
    result = advantages.pass_at_k(torch.tensor([0.0, 1.0, 0.0, 0.0]), ids(5, 5, 5, 5), k=2)
    torch.testing.assert_close(result, torch.tensor([-third, 1.0, -third, -third]))


def test_max_at_k_by_hand() -> None:
    # rewards 0, 1, 3 and k = 2: J is each of the two others. 3 gains 3 and 2: 2 · 5/2 = 5; 1 gains 1 and 0: 1; 0 gains nothing.
    assert advantages.max_at_k(torch.tensor([1.0, 3.0, 0.0]), ids(5, 5, 5), k=2).tolist() == [1.0, 5.0, 0.0]
    # k = 3 = n: only the best gains, by its lead of 2: 3 · 2
    assert advantages.max_at_k(torch.tensor([1.0, 3.0, 0.0]), ids(5, 5, 5), k=3).tolist() == [0.0, 6.0, 0.0]


def test_reinforce_baseline_by_hand() -> None:
    # centred: 1, −1, 0, 0, counted 1, 3, 2, 2 times: mean −2/8 = −1/4; squares (1 + 3)/8 − 1/16 = 7/16
    rewards, groups = torch.tensor([2.0, 0.0, 1.0, 1.0]), ids(1, 1, 2, 2)
    result = advantages.reinforce_baseline(rewards, groups, lengths=ids(1, 3, 2, 2), eps=0)
    expected = torch.tensor([1.25, -0.75, 0.25, 0.25]) / math.sqrt(7 / 16)
    torch.testing.assert_close(result, expected)


def test_per_token() -> None:
    sampled = torch.tensor([[False, True, True], [False, False, False]])
    assert advantages.per_token(torch.tensor([2.0, 3.0]), sampled).tolist() == [[0.0, 2.0, 2.0], [0.0, 0.0, 0.0]]


# ---- against loops in double precision ----

Naive = Callable[[Case, int], float]


def centred(case: Case, row: int) -> float:
    group = [case.rewards[j].item() for j in case.members(row)]
    return case.rewards[row].item() - sum(group) / len(group)


def naive_grpo(case: Case, row: int, ddof: int) -> float:
    group = [centred(case, j) for j in case.members(row)]
    if len(set(group)) == 1:
        return 0.0
    return centred(case, row) / (math.sqrt(sum(x * x for x in group) / (len(group) - ddof)) + 1e-6)


def naive_rloo(case: Case, row: int) -> float:
    others = [case.rewards[j].item() for j in case.members(row) if j != row]
    return case.rewards[row].item() - sum(others) / len(others) if others else 0.0


def naive_opo(case: Case, row: int) -> float:
    tokens = [j for j in case.members(row) for _ in range(int(case.lengths[j]))]
    return case.rewards[row].item() - sum(case.rewards[j].item() for j in tokens) / len(tokens) if tokens else 0.0


def naive_cpgd(case: Case, row: int) -> float:
    rows = [j for j in range(len(case.rewards)) if case.valid[j]]
    names = {int(case.groups[j]) for j in rows}
    teaching = {int(case.groups[j]) for j in rows if len({case.rewards[i].item() for i in case.members(j)}) > 1}
    return min(2.0, len(names) / max(1, len(teaching))) * centred(case, row)


def naive_pass_at_k(case: Case, row: int, k: int) -> float:
    subsets = list(itertools.combinations(case.members(row), k))
    scores = [max(case.rewards[j].item() for j in subset) for subset in subsets]
    if len(set(scores)) < 2:
        return 0.0
    mean = sum(scores) / len(scores)
    deviation = math.sqrt(sum((s - mean) ** 2 for s in scores) / len(scores))
    own = [score for subset, score in zip(subsets, scores, strict=True) if row in subset]
    return (sum(own) / len(own) - mean) / deviation


def naive_max_at_k(case: Case, row: int, k: int) -> float:
    def best(rows: tuple[int, ...]) -> float:
        return max(case.rewards[j].item() for j in rows)

    subsets = list(itertools.combinations([j for j in case.members(row) if j != row], k - 1))
    gains = [best((row, *subset)) - best(subset) for subset in subsets]
    return k * sum(gains) / len(gains) if gains else 0.0


def naive_reinforce_baseline(case: Case, row: int) -> float:
    tokens = [centred(case, j) for j in range(len(case.rewards)) if case.valid[j] for _ in range(int(case.lengths[j]))]
    if len(set(tokens)) < 2:
        return 0.0
    mean = sum(tokens) / len(tokens)
    return (centred(case, row) - mean) / (math.sqrt(sum((x - mean) ** 2 for x in tokens) / len(tokens)) + 1e-8)


ESTIMATORS: dict[str, tuple[Callable[[Case], Tensor], Naive]] = {
    "grpo": (lambda c: advantages.grpo(c.rewards, c.groups, c.valid), lambda c, row: naive_grpo(c, row, 0)),
    "grpo_sample": (lambda c: advantages.grpo(c.rewards, c.groups, c.valid, ddof=1), lambda c, row: naive_grpo(c, row, 1)),
    "dr_grpo": (lambda c: advantages.dr_grpo(c.rewards, c.groups, c.valid), centred),
    "rloo": (lambda c: advantages.rloo(c.rewards, c.groups, c.valid), naive_rloo),
    "remax": (
        lambda c: advantages.remax(c.rewards, c.valid, greedy=c.lengths.to(c.rewards.dtype) / 4),
        lambda c, row: c.rewards[row].item() - c.lengths[row].item() / 4,
    ),
    "opo": (lambda c: advantages.opo(c.rewards, c.groups, c.valid, lengths=c.lengths), naive_opo),
    "cpgd": (lambda c: advantages.cpgd(c.rewards, c.groups, c.valid, cap=2.0), naive_cpgd),
    "max_at_2": (lambda c: advantages.max_at_k(c.rewards, c.groups, c.valid, k=2), lambda c, row: naive_max_at_k(c, row, 2)),
    "max_at_3": (lambda c: advantages.max_at_k(c.rewards, c.groups, c.valid, k=3), lambda c, row: naive_max_at_k(c, row, 3)),
    "reinforce_baseline": (
        lambda c: advantages.reinforce_baseline(c.rewards, c.groups, c.valid, lengths=c.lengths),
        naive_reinforce_baseline,
    ),
}
BINARY: dict[str, tuple[Callable[[Case], Tensor], Naive]] = {
    f"pass_at_{k}": (
        lambda c, k=k: advantages.pass_at_k(c.rewards, c.groups, c.valid, k=k),
        lambda c, row, k=k: naive_pass_at_k(c, row, k),
    )
    for k in (1, 2, 3)
}
ALL = ESTIMATORS | BINARY


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ALL)
def test_against_a_loop(name: str, seed: int, dtype: torch.dtype) -> None:
    case = random_groups(seed, dtype, binary=name in BINARY)
    estimate, naive = ALL[name]
    result = estimate(case)
    assert result.dtype == torch.float32
    expected = [naive(case, row) if case.valid[row] else 0.0 for row in range(len(case.rewards))]
    torch.testing.assert_close(result, torch.tensor(expected), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ALL)
def test_the_order_of_rows_does_not_matter(name: str, seed: int) -> None:
    case = random_groups(seed, torch.float32, binary=name in BINARY)
    order = torch.randperm(len(case.groups), generator=torch.Generator().manual_seed(seed))
    estimate, _ = ALL[name]
    torch.testing.assert_close(estimate(case.taken(order)), estimate(case)[order], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"remax"}))  # which knows no groups
def test_groups_that_teach_nothing_are_exactly_zero(name: str) -> None:
    # Three times 0.1, a reward alone, and a group without a valid row; for pass@k rewards of 1.
    reward = 1.0 if name in BINARY else 0.1
    rewards = torch.tensor([reward, NAN, reward, reward, reward, NAN])
    valid = torch.tensor([True, False, True, True, True, False])
    case = Case(rewards, ids(1, 1, 1, 1, 2, 3), valid, ids(3, 9, 1, 2, 4, 5))
    estimate, _ = ALL[name]
    assert estimate(case).tolist() == [0.0] * 6


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"cpgd", "reinforce_baseline"}))  # which look at the whole batch
def test_a_group_does_not_know_of_the_others(name: str) -> None:
    # The first group's advantages with another beside it whose rewards are a million times as large.
    first = torch.tensor([0.0, 1.0, 1.0, 0.0])
    beside = torch.tensor([0.0, 1.0]) if name in BINARY else torch.tensor([3e6, -7e6])
    everywhere = torch.ones(6, dtype=torch.bool)
    together = Case(torch.cat([beside, first]), ids(1, 1, 2, 2, 2, 2), everywhere, ids(1, 2, 3, 4, 5, 6))
    alone = together.taken(torch.arange(2, 6))
    estimate, _ = ALL[name]
    assert estimate(together)[2:].tolist() == estimate(alone).tolist()


# ---- what the papers claim ----


def expected_gradient(rewards: list[float], logits: Tensor, count: int, estimate: Callable[[Tensor], Tensor]) -> Tensor:
    """E[mean_i A_i ∇ log π(y_i)] over all `count`-tuples of responses that a softmax policy can draw."""
    gradient = torch.zeros_like(logits)
    for drawn in itertools.product(range(len(rewards)), repeat=count):
        logprobs = logits.log_softmax(0)
        chance = logprobs[list(drawn)].sum().exp().detach()
        got = estimate(torch.tensor([rewards[i] for i in drawn])).double()
        (own,) = torch.autograd.grad((got * logprobs[list(drawn)]).mean(), logits)
        gradient += chance * own
    return gradient


def value_gradient(rewards: list[float], logits: Tensor, count: int, value: Callable[[list[float]], float]) -> Tensor:
    """∇ E[value(rewards of `count` responses)]."""
    total = torch.zeros((), dtype=torch.float64)
    for drawn in itertools.product(range(len(rewards)), repeat=count):
        total = total + logits.log_softmax(0)[list(drawn)].sum().exp() * value([rewards[i] for i in drawn])
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient


REWARDS = [0.0, 0.25, 2.0]


def policy() -> Tensor:
    return torch.tensor([0.3, -0.2, -0.5], dtype=torch.float64, requires_grad=True)


def test_rloo_is_unbiased_and_dr_grpo_shrunk() -> None:
    true = value_gradient(REWARDS, policy(), 1, lambda r: r[0])
    group = ids(0, 0, 0)
    torch.testing.assert_close(expected_gradient(REWARDS, policy(), 3, lambda r: advantages.rloo(r, group)), true, atol=1e-7, rtol=1e-6)
    shrunk = expected_gradient(REWARDS, policy(), 3, lambda r: advantages.dr_grpo(r, group))
    torch.testing.assert_close(shrunk, true * 2 / 3, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(("count", "k"), [(2, 2), (3, 2), (3, 3), (4, 2), (4, 3)])
def test_max_at_k_is_the_unbiased_gradient_of_the_best_of_k(count: int, k: int) -> None:
    true = value_gradient(REWARDS, policy(), k, max)
    group = torch.zeros(count, dtype=torch.int64)
    got = expected_gradient(REWARDS, policy(), count, lambda r: advantages.max_at_k(r, group, k=k))
    torch.testing.assert_close(got, true, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_pass_at_one_is_grpo(seed: int) -> None:
    case = random_groups(seed, torch.float32, binary=True)
    grpo = advantages.grpo(case.rewards, case.groups, case.valid, eps=0)
    torch.testing.assert_close(advantages.pass_at_k(case.rewards, case.groups, case.valid, k=1), grpo)


def test_many_responses_do_not_overflow() -> None:
    # C(2000, 300) has 366 digits. One success of n: R = k / n.
    rewards = torch.zeros(2000)
    rewards[7] = 1.0
    group = torch.zeros(2000, dtype=torch.int64)
    result, share = advantages.pass_at_k(rewards, group, k=300), 300 / 2000
    assert result[7].item() == pytest.approx((1 - share) / math.sqrt(share * (1 - share)), rel=1e-5)
    gain = advantages.max_at_k(rewards, group, k=300)
    assert gain[7].item() == pytest.approx(300, rel=1e-5)
    assert gain.count_nonzero().item() == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_opo_balances_tokens(seed: int) -> None:
    # The baseline that is best for Σ l (r − b)² leaves Σ l A = 0 in every group.
    case = random_groups(seed, torch.float32)
    result = advantages.opo(case.rewards, case.groups, case.valid, lengths=case.lengths)
    for name in case.groups.unique():
        own = case.groups == name
        assert (result[own] * case.lengths[own]).sum().item() == pytest.approx(0, abs=1e-5)


# ---- composition ----


def test_baseline_then_batch_normalisation() -> None:
    rewards, groups, lengths = torch.tensor([2.0, 0.0, 1.0, NAN, 3.0]), ids(1, 1, 2, 2, 2), ids(1, 3, 2, 4, 0)
    valid = torch.tensor([True, True, True, False, True])
    sampled = torch.arange(4) < lengths[:, None]
    by_token = advantages.per_token(advantages.dr_grpo(rewards, groups, valid), sampled)
    by_token = whiten(by_token, sampled & valid[:, None])
    by_row = advantages.reinforce_baseline(rewards, groups, valid, lengths=lengths)
    torch.testing.assert_close(advantages.per_token(by_row, sampled), by_token)
    assert by_token[0, 0].item() > 1


def test_normalising_after_grpo_is_a_second_whitening_and_shows() -> None:
    # One of two groups differs. grpo gives it ±1; the batch's deviation is √(2/4), so a second whitening makes it ±√2.
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0]), ids(1, 1, 2, 2)
    once = advantages.grpo(rewards, groups, eps=0)
    assert once.tolist() == [1.0, -1.0, 0.0, 0.0]
    torch.testing.assert_close(batch_normalise(once, eps=0), math.sqrt(2) * once)


# ---- refusals ----

REFUSED: list[tuple[str, Callable[[Tensor, Tensor], Any]]] = [
    ("ddof is 0", lambda r, g: advantages.grpo(r, g, ddof=2)),
    ("grpo: eps is -1", lambda r, g: advantages.grpo(r, g, eps=-1.0)),
    ("cpgd: cap is 0", lambda r, g: advantages.cpgd(r, g, cap=0.0)),
    ("cpgd: cap is nan", lambda r, g: advantages.cpgd(r, g, cap=NAN)),
    ("pass_at_k: k is 0", lambda r, g: advantages.pass_at_k(r, g, k=0)),
    ("take max_at_k", lambda r, g: advantages.pass_at_k(r / 2, g, k=1)),
    ("max_at_k: k is 1", lambda r, g: advantages.max_at_k(r, g, k=1)),
    ("lengths count sampled tokens", lambda r, g: advantages.opo(r, g, lengths=g - 9)),
    ("numbers of tokens", lambda r, g: advantages.reinforce_baseline(r, g, lengths=g - 9)),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[message for message, _ in REFUSED])
def test_refusals(message: str, call: Callable[[Tensor, Tensor], Any]) -> None:
    with pytest.raises(BadInput, match=message):
        call(torch.tensor([0.0, 1.0]), ids(1, 1))


def test_what_failed_is_not_looked_at() -> None:
    # A reward of 0.5 would be refused, and so would a negative length.
    rewards, valid = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([True, True, False])
    assert advantages.pass_at_k(rewards, ids(1, 1, 1), valid, k=1).tolist() == [-1.0, 1.0, 0.0]
    assert advantages.opo(rewards, ids(1, 1, 1), valid, lengths=ids(1, 1, -1)).tolist() == [-0.5, 0.5, 0.0]


@pytest.mark.parametrize("name", ALL)
def test_advantages_are_constants(name: str) -> None:
    case = random_groups(2, torch.float32, binary=name in BINARY)
    estimate, _ = ALL[name]
    assert not estimate(dc.replace(case, rewards=case.rewards.clone().requires_grad_())).requires_grad


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="grpo"):
        advantages.grpo(torch.zeros(3), ids(1, 2))
