import math

import pytest
import torch
from torch import Tensor

from rft.errors import ShapeError
from rft.ops import logprobs
from rft.ops.logprobs import predictors, token_logprobs


def naive(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Token by token, in double precision."""
    result = torch.zeros(tokens.shape, dtype=torch.float64)
    for row in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            scaled = [x / temperature for x in logits[row, t - 1].double().tolist()]
            top = max(scaled)
            result[row, t] = scaled[int(tokens[row, t])] - top - math.log(sum(math.exp(x - top) for x in scaled))
    return result


def random_case(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    draw = torch.Generator().manual_seed(seed)
    batch, seq, vocab = (int(torch.randint(low, 9, (), generator=draw)) for low in (1, 2, 3))
    logits = (5 * torch.randn(batch, seq, vocab, generator=draw)).to(dtype)
    return logits, torch.randint(0, vocab, (batch, seq), generator=draw), float(0.3 + torch.rand((), generator=draw))


def test_by_hand() -> None:
    # softmax(0, ln 3) = (1/4, 3/4); at temperature 1/2 the logits double: softmax(0, ln 9) = (1/10, 9/10)
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, math.log(3)], [7.0, 7.0]]])
    tokens = torch.tensor([[1, 0, 1]])
    torch.testing.assert_close(token_logprobs(logits, tokens, 1.0), torch.tensor([[0.0, math.log(1 / 4), math.log(3 / 4)]]))
    torch.testing.assert_close(token_logprobs(logits, tokens, 0.5), torch.tensor([[0.0, math.log(1 / 10), math.log(9 / 10)]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(20))
def test_against_a_loop(seed: int, dtype: torch.dtype) -> None:
    logits, tokens, temperature = random_case(seed, dtype)
    result = token_logprobs(logits, tokens, temperature)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), naive(logits, tokens, temperature), atol=2e-5, rtol=1e-6)


def test_temperature_zero_has_the_logprobs_of_one() -> None:
    logits, tokens, _ = random_case(0, torch.float32)
    assert torch.equal(token_logprobs(logits, tokens, 0.0), token_logprobs(logits, tokens, 1.0))


@pytest.mark.parametrize("seed", range(10))
def test_chunks_and_kept_columns_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tokens, temperature = random_case(seed, torch.float32)
    whole = token_logprobs(logits, tokens, temperature)
    wanted = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    wanted[:, 0] = False
    columns = predictors(wanted)
    monkeypatch.setattr(logprobs, "CHUNKS", {"cpu": 1})
    some = token_logprobs(logits[:, columns], tokens, temperature, columns)
    torch.testing.assert_close(some[wanted], whole[wanted])


@pytest.mark.parametrize("seed", range(10))
def test_gradient_is_that_of_log_softmax(seed: int) -> None:
    logits, tokens, temperature = random_case(seed, torch.float32)
    weights = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(seed))
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (weights * token_logprobs(ours, tokens, temperature)).sum().backward()
    table = (plain / temperature).log_softmax(dim=-1)
    (weights[:, 1:] * table[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_gradient_has_the_dtype_of_the_logits() -> None:
    logits, tokens, _ = random_case(1, torch.bfloat16)
    token_logprobs(logits.requires_grad_(), tokens, 1.0).sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_predictors_stand_one_before_and_one_is_always_kept() -> None:
    wanted = torch.tensor([[False, False, True, False, False], [False, False, False, False, True]])
    assert predictors(wanted).tolist() == [1, 3]
    assert predictors(torch.zeros(2, 4, dtype=torch.bool)).tolist() == [0]
    assert predictors(torch.tensor([[True, False]])).tolist() == [0]


def test_nothing_wanted_still_hangs_on_the_graph() -> None:
    logits, tokens, _ = random_case(2, torch.float32)
    columns = predictors(torch.zeros(tokens.shape, dtype=torch.bool))
    result = token_logprobs(logits[:, columns].requires_grad_(), tokens, 1.0, columns)
    assert result.requires_grad


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="token_logprobs"):
        token_logprobs(torch.zeros(2, 3, 5), torch.zeros(3, 3, dtype=torch.int64), 1.0)
