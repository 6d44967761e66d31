import math

import pytest
import torch
from torch import Tensor

from rft.errors import BadInput
from rft.experience import Minibatch
from rft.objectives import MicroBatch, TokenScores, Totals, grpo, supervised
from tests.trainers.batches import random_experience, rows_of, some_old

SOURCE = random_experience()
NEAR = torch.where(SOURCE.sampled, SOURCE.logprobs - 0.1, 0.0)
TOTALS = Totals(tokens=int(SOURCE.sampled.sum()), sequences=7)


def scored(logprobs: Tensor) -> TokenScores:
    return TokenScores(logprobs=logprobs, entropy=torch.zeros_like(logprobs))


def micro(old: Tensor | None, *rows: int) -> MicroBatch:
    return MicroBatch(rows=rows_of(SOURCE, *rows), old=None if old is None else old[list(rows)])


def sampled_tokens(rows: Minibatch) -> list[tuple[int, int]]:
    return [(row, t) for row in range(len(rows)) for t in range(rows.tokens.shape[1]) if rows.sampled[row, t]]


def test_grpo_against_a_loop() -> None:
    old = some_old(SOURCE, NEAR)
    terms = grpo(clip=0.1, correction_cap=1.3)(scored(NEAR), micro(old, *range(8)), TOTALS)
    loss = clipped = ratios = kl = engine_kl = corrections = 0.0
    for row, t in sampled_tokens(rows_of(SOURCE, *range(8))):
        ratio, gain = math.exp(NEAR[row, t] - old[row, t]), float(SOURCE.advantages[row, t])
        weight = min(math.exp(old[row, t] - SOURCE.logprobs[row, t]), 1.3)
        bounded = min(max(ratio, 0.9), 1.1)
        loss -= weight * min(ratio * gain, bounded * gain) / TOTALS.tokens
        clipped += (bounded * gain < ratio * gain) / TOTALS.tokens
        ratios += ratio / TOTALS.tokens
        kl += (ratio - 1 - math.log(ratio)) / TOTALS.tokens
        gap = float(NEAR[row, t] - SOURCE.logprobs[row, t])
        engine_kl += (math.exp(gap) - 1 - gap) / TOTALS.tokens
        corrections += weight / TOTALS.tokens
    assert terms.loss.item() == pytest.approx(loss, rel=1e-5)
    expected = {"clip_fraction": clipped, "ratio_mean": ratios, "kl": kl, "engine_kl": engine_kl, "correction_mean": corrections}
    assert {name: value.item() for name, value in terms.metrics.items()} == pytest.approx(expected, rel=1e-4)


def test_the_first_step_needs_no_old_logprobs() -> None:
    new = NEAR.clone().requires_grad_()
    terms = grpo()(scored(new), micro(None, *range(8)), TOTALS)
    terms.loss.backward()
    assert terms.metrics["ratio_mean"].item() == pytest.approx(1.0)
    assert terms.metrics["kl"].item() == terms.metrics["clip_fraction"].item() == 0.0
    torch.testing.assert_close(new.grad, -SOURCE.advantages / TOTALS.tokens)


@pytest.mark.parametrize("objective", [grpo(), grpo(correction_cap=2.0), supervised()])
def test_parts_add_up_to_the_whole(objective: object) -> None:
    assert callable(objective)
    old = some_old(SOURCE, NEAR)
    whole = objective(scored(NEAR), micro(old, *range(8)), TOTALS)
    parts = [objective(scored(NEAR[list(rows)]), micro(old, *rows), TOTALS) for rows in ((5, 0), (3,), (1, 2, 4, 6, 7))]
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(sum(part.metrics[name] for part in parts), value)


def test_supervised_is_the_mean_negative_log_likelihood() -> None:
    terms = supervised()(scored(NEAR), micro(None, *range(8)), TOTALS)
    expected = -sum(float(NEAR[row, t]) for row, t in sampled_tokens(rows_of(SOURCE, *range(8)))) / TOTALS.tokens
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)


def test_adopted_engine_logprobs_have_a_correction_of_one() -> None:
    terms = grpo(correction_cap=2.0)(scored(NEAR), micro(SOURCE.logprobs, *range(8)), TOTALS)
    assert terms.metrics["correction_mean"].item() == pytest.approx(1.0)


@pytest.mark.parametrize("options", [{"clip": 0.0}, {"clip": -1.0}, {"correction_cap": 0.0}])
def test_nonsense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="above 0"):
        grpo(**options)
