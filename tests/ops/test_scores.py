"""`head_scores` on a CPU; its kernels are compared on a GPU by tests/benchmarks/head.py."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rft.errors import BadInput, ShapeError
from rft.ops import scores
from rft.ops.scores import head_scores
from tests.launching import torchrun

QUICK = range(8)
EXHAUSTIVE = pytest.param(range(8, 208), marks=pytest.mark.slow)


def naive(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, *, bias: Tensor | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """With the whole logits, in double precision, by autograd."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    table = (logits / temperature.double().where(temperature > 0, 1.0)[:, None]).log_softmax(dim=1)
    return table.gather(1, targets[:, None]).squeeze(1), -(table.exp() * table).sum(dim=1)


def by_loop(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Token by token, by hand."""
    hidden, weight, bias = case["hidden"].double().tolist(), case["weight"].double().tolist(), case["bias"]
    logprobs, entropies = list[float](), list[float]()
    for state, target, temperature in zip(hidden, case["targets"].tolist(), case["temperature"].tolist(), strict=True):
        logits = [sum(a * b for a, b in zip(state, row, strict=True)) for row in weight]
        if bias is not None:
            logits = [logit + b for logit, b in zip(logits, bias.double().tolist(), strict=True)]
        if case["softcap"] is not None:
            logits = [case["softcap"] * math.tanh(logit / case["softcap"]) for logit in logits]
        shares = [math.exp((logit - max(logits)) / (temperature or 1)) for logit in logits]
        p = [share / sum(shares) for share in shares]
        logprobs.append(math.log(p[target]))
        entropies.append(-sum(each * math.log(each) for each in p))
    return torch.tensor(logprobs), torch.tensor(entropies)


def random_case(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    tokens, width, vocab = (int(torch.randint(1, high, (), generator=draw)) for high in (9, 12, 40))
    temperature = 0.3 + torch.rand(tokens, generator=draw)
    return {
        "hidden": torch.randn(tokens, width, generator=draw).to(dtype),
        "weight": torch.randn(vocab, width, generator=draw).to(dtype),
        "targets": torch.randint(0, vocab, (tokens,), generator=draw),
        "temperature": temperature.where(torch.rand(tokens, generator=draw) < 0.8, 0.0),
        "bias": torch.randn(vocab, generator=draw).to(dtype) if seed % 2 else None,
        "softcap": 2.0 if seed % 3 == 0 else None,
    }


@pytest.fixture(params=["one block", "blocks of four"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "blocks of four":
        for name, value in {"CHUNKS": {"cpu": 1}, "NARROWEST": {"cpu": 4}, "ALIGNED": 4}.items():
            monkeypatch.setattr(scores, name, value)


def test_by_hand() -> None:
    # head (1, 0), (0, 1): the logits are the hidden state. softmax(0, ln 3) = (1/4, 3/4), whose entropy is
    # ln 4 − 3/4 ln 3 = 0.562335; at temperature 1/2 the logits double: softmax(0, ln 9) = (1/10, 9/10), ln 10 − 9/10 ln 9 = 0.325083.
    hidden = torch.tensor([[0.0, math.log(3)]] * 3)
    logprob, entropy = head_scores(hidden, torch.eye(2), torch.tensor([0, 1, 1]), torch.tensor([1.0, 0.5, 0.0]))
    torch.testing.assert_close(logprob, torch.tensor([1 / 4, 9 / 10, 3 / 4]).log())
    torch.testing.assert_close(entropy, torch.tensor([0.562335, 0.325083, 0.562335]), atol=1e-6, rtol=0)


def test_gradients_by_hand() -> None:
    # As above at temperature 1, target 1, p = (1/4, 3/4). d logprob = onehot − p = (−1/4, 1/4).
    # d entropy = −p (ln p + H): H = 0.562335, ln p = (−1.386294, −0.287682): (0.205990, −0.205990).
    hidden = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    logprob, entropy = head_scores(hidden, torch.eye(2), torch.tensor([1]), torch.ones(1))
    (by_logprob,) = torch.autograd.grad(logprob, hidden, torch.ones(1), retain_graph=True)
    (by_entropy,) = torch.autograd.grad(entropy, hidden, torch.ones(1))
    torch.testing.assert_close(by_logprob, torch.tensor([[-0.25, 0.25]]))
    torch.testing.assert_close(by_entropy, torch.tensor([[0.205990, -0.205990]]), atol=1e-6, rtol=0)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seeds", [QUICK, EXHAUSTIVE])
def test_against_a_loop(seeds: range, dtype: torch.dtype) -> None:
    for case in (random_case(seed, dtype) for seed in seeds):
        results, expected = head_scores(**case), by_loop(case)
        # A CPU rounds bf16 logits to bf16: half of 2⁻⁷ of the largest one, doubled by the difference, over the temperature.
        top = float((case["hidden"].float() @ case["weight"].float().T).abs().max()) + 3
        tolerance = 1e-5 if dtype == torch.float32 else top * 2**-7 / 0.3
        for result, value in zip(results, expected, strict=True):
            assert result.dtype == torch.float32
            torch.testing.assert_close(result, value, atol=tolerance, rtol=1e-5)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("used", ["log-prob", "entropy", "both"])
@pytest.mark.parametrize("seeds", [QUICK, EXHAUSTIVE])
def test_gradients_are_those_of_the_naive_form(seeds: range, used: str) -> None:
    for seed in seeds:
        ours, plain = (
            {k: v.requires_grad_() if k in ("hidden", "weight", "bias") and v is not None else v for k, v in random_case(seed).items()}
            for _ in range(2)
        )
        logprob_factors, entropy_factors = torch.randn(2, len(ours["hidden"]), generator=torch.Generator().manual_seed(seed))
        for case, form in ((ours, head_scores), (plain, naive)):
            logprob, entropy = form(**case)
            total = (logprob_factors * logprob).sum() if used != "entropy" else 0
            total = total + (entropy_factors * entropy).sum() if used != "log-prob" else total
            total.backward()
        for name in ("hidden", "weight", "bias"):
            if plain[name] is not None:
                torch.testing.assert_close(ours[name].grad, plain[name].grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_have_the_dtypes_of_their_tensors(dtype: torch.dtype) -> None:
    hidden, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    ours, plain = ([t.clone().to(dtype).requires_grad_() for t in (hidden, weight, bias)] for _ in range(2))
    for form, tensors in ((head_scores, ours), (naive, plain)):
        logprob, entropy = form(tensors[0], tensors[1], torch.tensor([0, 4, 2]), torch.ones(3), bias=tensors[2])
        (logprob.sum() + 0.1 * entropy.sum()).backward()
    for ours_one, plain_one in zip(ours, plain, strict=True):
        assert ours_one.grad is not None
        assert ours_one.grad.dtype == dtype
        torch.testing.assert_close(ours_one.grad, plain_one.grad, atol={torch.float32: 1e-6}.get(dtype, 0.05), rtol=0.05)


def test_what_needs_no_gradient_gets_none() -> None:
    case = random_case(1)
    logprob, _ = head_scores(**{**case, "hidden": case["hidden"].requires_grad_()})
    logprob.sum().backward()
    assert case["hidden"].grad is not None
    assert case["weight"].grad is None


def test_nothing_hangs_on_the_graph_without_gradients() -> None:
    case = random_case(1)
    with torch.no_grad():
        logprob, entropy = head_scores(**{**case, "hidden": case["hidden"].requires_grad_()})
    assert not logprob.requires_grad
    assert not entropy.requires_grad
    torch.testing.assert_close(logprob, by_loop(case)[0])


def test_no_tokens_give_no_scores_and_gradients_of_zero() -> None:
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    logprob, entropy = head_scores(hidden, weight, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.shape == entropy.shape == (0,)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(5, 4))


@pytest.mark.usefixtures("blocks")
def test_a_view_of_the_states_is_as_good() -> None:
    case = random_case(5)
    wide = torch.randn(len(case["hidden"]), 2 * case["hidden"].shape[1])
    wide[:, ::2] = case["hidden"]
    leaf = wide.requires_grad_()
    logprob, _ = head_scores(**{**case, "hidden": leaf[:, ::2]})
    torch.testing.assert_close(logprob, by_loop(case)[0], atol=1e-5, rtol=1e-5)
    logprob.sum().backward()
    straight = case["hidden"].requires_grad_()
    head_scores(**case)[0].sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad[:, ::2], straight.grad)


def test_a_tied_heads_gradients_add_up() -> None:
    ids, targets, temperature = torch.tensor([3, 0, 3]), torch.tensor([1, 4, 0]), torch.ones(3)
    first = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    tied = [first.clone().requires_grad_() for _ in range(2)]
    for table, form in zip(tied, (head_scores, naive), strict=True):
        logprob, entropy = form(torch.tanh(table[ids]), table, targets, temperature)
        (logprob.sum() + entropy.sum()).backward()
    torch.testing.assert_close(tied[0].grad, tied[1].grad, atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("blocks")
def test_a_padded_vocabulary_has_no_probability() -> None:
    case = random_case(3)
    dtype, width = case["weight"].dtype, case["weight"].shape[1]
    padded = {**case, "weight": torch.cat([torch.randn(6, width, dtype=dtype), case["weight"], torch.randn(7, width, dtype=dtype)])}
    padded["bias"] = torch.cat([torch.full((6,), -torch.inf), case["bias"], torch.full((7,), -torch.inf)])
    padded |= {"targets": case["targets"] + 6, "softcap": None, "weight": padded["weight"].requires_grad_()}
    results, expected = head_scores(**padded), by_loop({**case, "softcap": None})
    torch.testing.assert_close(results, expected, atol=1e-5, rtol=1e-5)
    (results[0].sum() + results[1].sum()).backward()
    assert bool(padded["weight"].grad.isfinite().all())
    assert not bool(padded["weight"].grad[:6].any())


def test_far_apart_logits_stay_finite() -> None:
    hidden = torch.tensor([[1000.0, -1000.0]], requires_grad=True)
    logprob, entropy = head_scores(hidden, torch.eye(2), torch.tensor([1]), torch.tensor([0.5]))
    assert (logprob.item(), entropy.item()) == (-4000.0, 0.0)
    (logprob + entropy).sum().backward()
    torch.testing.assert_close(hidden.grad, torch.tensor([[-2.0, 2.0]]))


def test_what_is_not_a_number_is_not_hidden() -> None:
    logprob, entropy = head_scores(torch.tensor([[torch.nan], [1.0]]), torch.ones(3, 1), torch.tensor([0, 0]), torch.ones(2))
    assert logprob.isnan().tolist() == entropy.isnan().tolist() == [True, False]


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            self.elements = max(self.elements, each.numel() if isinstance(each, Tensor) else 0)
        return result


@pytest.mark.usefixtures("blocks")
def test_the_logits_are_never_held(request: pytest.FixtureRequest) -> None:
    hidden, weight = torch.randn(64, 3, requires_grad=True), torch.randn(500, 3, requires_grad=True)
    with Largest() as largest:
        logprob, entropy = head_scores(hidden, weight, torch.zeros(64, dtype=torch.int64), torch.ones(64))
        (logprob + entropy).sum().backward()
    assert largest.elements == (64 * 500 if "one block" in request.node.name else weight.numel())


@pytest.mark.parametrize("tokens", [1, 7, 512, 100_000])
@pytest.mark.parametrize("vocab", [1, 127, 50_257, 151_936])
def test_blocks_cover_the_vocabulary_once(tokens: int, vocab: int) -> None:
    parts = scores._blocks(torch.empty(tokens, 0), torch.empty(vocab, 0))
    assert [0, *(part.stop for part in parts)] == [*(part.start for part in parts), vocab]
    assert max(part.stop - part.start for part in parts) <= max(scores.CHUNKS["cpu"] / tokens + scores.ALIGNED, 256)


def test_bad_input_is_refused() -> None:
    case = random_case(1)
    with pytest.raises(BadInput, match="one dtype"):
        head_scores(**{**case, "hidden": case["hidden"].bfloat16()})
    with pytest.raises(BadInput, match="softcap"):
        head_scores(**{**case, "softcap": 0.0})
    with pytest.raises(BadInput, match="targets"):
        head_scores(**{**case, "targets": case["targets"] - 100})
    with pytest.raises(BadInput, match="temperatures"):
        head_scores(**{**case, "temperature": case["temperature"] - 5})
    with pytest.raises(ShapeError, match="head_scores"):
        head_scores(**{**case, "targets": torch.zeros(20, dtype=torch.int64)})


def test_a_sharded_head_tied_and_untied() -> None:
    assert torchrun(Path(__file__).with_name("sharded_head.py")).count("the sharded head agrees") == 4
