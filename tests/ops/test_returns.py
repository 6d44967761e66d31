import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rft import tree
from rft.errors import BadInput, ShapeError
from rft.ops import returns
from rft.ops.kl import k1
from tests.ops.cases import random_tokens
from tests.ops.group_cases import DTYPES, SEEDS

NAN, INF = float("nan"), float("inf")
HOLES = torch.tensor([[False, True, False, True, True, False], [False] * 6])
"""One response with a hole at column 2 (what a tool wrote), and an empty one."""


def marks(mask: Tensor, row: int) -> list[int]:
    return [t for t in range(mask.shape[1]) if mask[row, t]]


# ---- by hand ----


def test_token_rewards_by_hand() -> None:
    rewards = torch.tensor([2.0, NAN])  # the empty response's reward is not read
    result = returns.token_rewards(rewards, HOLES)
    assert result.tolist() == [[0, 0, 0, 0, 2, 0], [0] * 6]
    kl = torch.tensor([[NAN, 1.0, INF, 2.0, 4.0, NAN], [NAN] * 6])
    result = returns.token_rewards(rewards, HOLES, -0.25 * kl)
    assert result.tolist() == [[0, -0.25, 0, -0.5, 1.0, 0], [0] * 6]


def test_reinforce_by_hand() -> None:
    rewards = torch.tensor([[NAN, 1.0, INF, 2.0, 4.0, 9.0], [NAN] * 6])
    # from the right: 4; 2 + 4/2 = 4; 1 + 4/2 = 3, the hole costs no discount
    assert returns.reinforce(rewards, HOLES, gamma=0.5).tolist() == [[0, 3, 0, 4, 4, 0], [0] * 6]
    assert returns.reinforce(rewards, HOLES, gamma=1.0).tolist() == [[0, 7, 0, 6, 4, 0], [0] * 6]
    assert returns.reinforce(rewards, HOLES, gamma=0.0).tolist() == [[0, 1, 0, 2, 4, 0], [0] * 6]


def test_gae_by_hand() -> None:
    rewards = torch.tensor([[NAN, 0.0, INF, 0.0, 8.0, NAN], [NAN] * 6])
    values = torch.tensor([[NAN, 2.0, NAN, 4.0, 6.0, INF], [NAN] * 6])
    # γ = λ = 1/2. Ended by itself: δ = (0 + 4/2 − 2, 0 + 6/2 − 4, 8 + 0 − 6) = (0, −1, 2);
    # from the right: 2; −1 + 2/4 = −1/2; 0 − 1/8
    done = returns.gae(rewards, values, HOLES, torch.tensor([0.0, NAN]), gamma=0.5, lam=0.5)
    assert done.advantages.tolist() == [[0, -0.125, 0, -0.5, 2, 0], [0] * 6]
    assert done.returns.tolist() == [[0, 1.875, 0, 3.5, 8, 0], [0] * 6]
    # Cut off where the critic sees 4: the last δ is 8 + 4/2 − 6 = 4; then −1 + 4/4 = 0; 0
    cut = returns.gae(rewards, values, HOLES, torch.tensor([4.0, NAN]), gamma=0.5, lam=0.5)
    assert cut.advantages.tolist() == [[0, 0, 0, 0, 4, 0], [0] * 6]
    assert cut.returns.tolist() == [[0, 2, 0, 4, 10, 0], [0] * 6]


def test_reinforce_plus_plus_by_hand() -> None:
    # R = 3 and 1, kl 1 everywhere, β = 1/2: returns 3 − 1 = 2 and 3 − 1/2 = 5/2; 1/2. Mean 5/3, squares (2·(1/3)… )
    mask = torch.tensor([[True, False, True], [True, False, False]])
    rewards = returns.token_rewards(torch.tensor([3.0, 1.0]), mask, -0.5 * torch.ones(2, 3))
    togo = [2.0, 2.5, 0.5]
    mean = 5 / 3
    deviation = math.sqrt(((1 / 3) ** 2 + (5 / 6) ** 2 + (7 / 6) ** 2) / 3)
    result = returns.reinforce_plus_plus(rewards, mask, eps=0)
    expected = [[(togo[0] - mean) / deviation, 0, (togo[1] - mean) / deviation], [(togo[2] - mean) / deviation, 0, 0]]
    torch.testing.assert_close(result, torch.tensor(expected))


# ---- against loops in double precision ----


def naive_togo(rewards: Tensor, mask: Tensor, row: int, gamma: float) -> dict[int, float]:
    """From every token the sum over all later ones, written out: no recursion."""
    steps = marks(mask, row)
    return {t: sum(gamma**k * rewards[row, s].item() for k, s in enumerate(steps[i:])) for i, t in enumerate(steps)}


def naive_gae(rewards: Tensor, values: Tensor, mask: Tensor, after: float, row: int, gamma: float, lam: float) -> dict[int, float]:
    """The λ-weighted mean of the n-step advantages, in its sum of residuals written out."""
    steps = marks(mask, row)
    v = [*(values[row, t].item() for t in steps), after]
    residuals = [rewards[row, t].item() + gamma * v[i + 1] - v[i] for i, t in enumerate(steps)]
    return {t: sum((gamma * lam) ** k * d for k, d in enumerate(residuals[i:])) for i, t in enumerate(steps)}


def assert_tokens(result: Tensor, expected: list[dict[int, float]]) -> None:
    assert result.dtype == torch.float32
    for row, tokens in enumerate(expected):
        full = [tokens.get(t, 0.0) for t in range(result.shape[1])]
        assert result[row].tolist() == pytest.approx(full, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_against_loops(seed: int, dtype: torch.dtype) -> None:
    rewards, values, _, mask = random_tokens(seed, dtype)
    draw = torch.Generator().manual_seed(seed)
    gamma, lam = (torch.rand(2, generator=draw)).tolist()
    bootstrap = torch.randn(len(mask), generator=draw).to(dtype).where(mask.any(dim=1), torch.tensor(NAN, dtype=dtype))
    rows = range(len(mask))
    assert_tokens(returns.reinforce(rewards, mask, gamma=gamma), [naive_togo(rewards, mask, row, gamma) for row in rows])
    got = returns.gae(rewards, values, mask, bootstrap, gamma=gamma, lam=lam)
    expected = [naive_gae(rewards, values, mask, bootstrap[row].item(), row, gamma, lam) for row in rows]
    assert_tokens(got.advantages, expected)
    assert_tokens(got.returns, [{t: a + values[row, t].item() for t, a in expected[row].items()} for row in rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_token_rewards_and_reinforce_plus_plus_against_loops(seed: int, dtype: torch.dtype) -> None:
    new, old, _, mask = random_tokens(seed, dtype)
    scores = torch.randn(len(mask), generator=torch.Generator().manual_seed(seed)).to(dtype).where(mask.any(dim=1), NAN)
    rewards = returns.token_rewards(scores, mask, -0.125 * k1(new, old))
    expected = [
        {
            t: -0.125 * (new[row, t].item() - old[row, t].item()) + (scores[row].item() if t == marks(mask, row)[-1] else 0)
            for t in marks(mask, row)
        }
        for row in range(len(mask))
    ]
    assert_tokens(rewards, expected)
    togo = [naive_togo(rewards, mask, row, 1.0) for row in range(len(mask))]
    flat = [g for row in togo for g in row.values()]
    mean = sum(flat) / max(1, len(flat))
    deviation = math.sqrt(sum((g - mean) ** 2 for g in flat) / max(1, len(flat)))
    white = [{t: (g - mean) / (deviation + 1e-8) if len(flat) > 1 else 0.0 for t, g in row.items()} for row in togo]
    assert_tokens(returns.reinforce_plus_plus(rewards, mask), white)


# ---- identities ----


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_at_its_ends(seed: int) -> None:
    rewards, values, _, mask = random_tokens(seed, torch.float32)
    ended = torch.zeros(len(mask))
    # λ = 1: returns-to-go less the value. λ = 0: the residual of one step. No value at all and λ = 1: REINFORCE.
    togo = returns.reinforce(rewards, mask, gamma=0.9)
    far = returns.gae(rewards, values, mask, ended, gamma=0.9, lam=1.0)
    torch.testing.assert_close(far.returns, togo, atol=1e-5, rtol=1e-5)
    near = returns.gae(rewards, torch.zeros_like(values), mask, ended, gamma=0.9, lam=0.0)
    torch.testing.assert_close(near.advantages, torch.where(mask, rewards, 0.0))
    # A critic that knows the returns leaves no advantage, whatever λ.
    perfect = returns.gae(rewards, togo, mask, ended, gamma=0.9, lam=0.7)
    torch.testing.assert_close(perfect.advantages, torch.zeros_like(togo), atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_cutting_a_response_where_the_critic_is_right_changes_nothing(seed: int) -> None:
    # The bootstrap stands for what was cut off: the head of a response then has the advantages that it has in the whole.
    draw = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(3, 9, generator=draw), torch.randn(3, 9, generator=draw)
    whole = torch.rand(3, 9, generator=draw) < 0.7
    whole[:, 4] = whole[:, 5] = True
    values[:, 5] = returns.reinforce(rewards, whole, gamma=0.9)[:, 5]
    head = whole.clone()
    head[:, 5:] = False
    full = returns.gae(rewards, values, whole, torch.zeros(3), gamma=0.9, lam=1.0)
    cut = returns.gae(rewards, values, head, values[:, 5], gamma=0.9, lam=1.0)
    torch.testing.assert_close(cut.advantages, torch.where(head, full.advantages, 0.0), atol=1e-5, rtol=1e-5)
    assert cut.advantages[~head].count_nonzero().item() == 0  # no token is trained that was not sampled


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_do_not_know_of_each_other(seed: int) -> None:
    rewards, values, _, mask = random_tokens(seed, torch.float32)
    bootstrap = torch.arange(len(mask)).float()
    together = returns.gae(rewards, values, mask, bootstrap, gamma=0.99, lam=0.95)
    for row in range(len(mask)):
        own = slice(row, row + 1)
        alone = returns.gae(rewards[own], values[own], mask[own], bootstrap[own], gamma=0.99, lam=0.95)
        assert torch.equal(alone.advantages, together.advantages[own])
        assert torch.equal(alone.returns, together.returns[own])


def test_holes_and_padding_are_as_if_they_were_not_there() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0]])
    dense, wide = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[False, True, False, False, True, True, False]])
    spread = torch.full((1, 7), NAN).masked_scatter(wide, values)
    one = returns.reinforce(values, dense, gamma=0.9)
    assert torch.equal(returns.reinforce(spread, wide, gamma=0.9)[wide], one[0])


def test_a_long_response_is_added_up_accurately() -> None:
    count, gamma = 20_000, 0.9999
    rewards, mask = torch.full((1, count), 0.1), torch.ones(1, count, dtype=torch.bool)
    result = returns.reinforce(rewards, mask, gamma=gamma)
    exact = rewards[0, 0].item() * (1 - gamma**count) / (1 - gamma)
    assert result[0, 0].item() == pytest.approx(exact, rel=1e-4)
    total = returns.reinforce(rewards, mask, gamma=1.0)
    assert total[0, 0].item() == pytest.approx(count * rewards[0, 0].item(), rel=1e-6)


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (2, 1)])
def test_batches_without_anything(shape: tuple[int, int]) -> None:
    nothing, mask, row = torch.full(shape, NAN), torch.zeros(shape, dtype=torch.bool), torch.full((shape[0],), NAN)
    results = [
        returns.token_rewards(row, mask, nothing),
        returns.reinforce(nothing, mask, gamma=1.0),
        returns.reinforce_plus_plus(nothing, mask),
        returns.gae(nothing, nothing, mask, row, gamma=1.0, lam=1.0).returns,
    ]
    for result in results:
        assert result.shape == shape
        assert result.count_nonzero().item() == 0


def test_a_row_whose_reward_failed_is_taken_out_by_its_mask() -> None:
    sampled, valid = torch.ones(2, 2, dtype=torch.bool), torch.tensor([True, False])
    rewards = returns.token_rewards(torch.tensor([1.0, NAN]), sampled & valid[:, None])
    assert rewards.tolist() == [[0.0, 1.0], [0.0, 0.0]]


def test_targets_have_no_gradient() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    values, row = torch.ones(1, 2, requires_grad=True), torch.ones(1, requires_grad=True)
    got = returns.gae(values, values, mask, row, gamma=1.0, lam=1.0)
    for result in (got.advantages, got.returns, returns.token_rewards(row, mask, values), returns.reinforce(values, mask, gamma=1.0)):
        assert not result.requires_grad


def test_returns_are_a_tree_so_that_they_can_be_sliced_as_one() -> None:
    mask = torch.ones(3, 2, dtype=torch.bool)
    got = returns.gae(torch.arange(6.0).view(3, 2), torch.zeros(3, 2), mask, torch.zeros(3), gamma=1.0, lam=1.0)
    own: returns.Returns = tree.tree_map(lambda x: x[1:], got)
    assert own.returns.tolist() == got.returns[1:].tolist() == [[5.0, 3.0], [9.0, 5.0]]


# ---- refusals ----

REFUSED: list[tuple[str, Callable[[Tensor, Tensor], Any]]] = [
    ("gae: gamma is 1.5", lambda x, m: returns.gae(x, x, m, x[:, 0], gamma=1.5, lam=1.0)),
    ("gae: lam is -0.1", lambda x, m: returns.gae(x, x, m, x[:, 0], gamma=1.0, lam=-0.1)),
    ("reinforce: gamma is nan", lambda x, m: returns.reinforce(x, m, gamma=NAN)),
    ("reinforce: gamma is 2", lambda x, m: returns.reinforce_plus_plus(x, m, gamma=2.0)),
    ("whiten: eps", lambda x, m: returns.reinforce_plus_plus(x, m, eps=-1.0)),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[message for message, _ in REFUSED])
def test_refusals(message: str, call: Callable[[Tensor, Tensor], Any]) -> None:
    with pytest.raises(BadInput, match=message):
        call(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="gae"):
        returns.gae(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.zeros(3), gamma=1.0, lam=1.0)
