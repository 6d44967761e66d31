import dataclasses as dc
import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import rft
from rft.errors import BadInput
from rft.experience import Minibatch, concatenate, demonstrations, take
from rft.objectives import (
    MicroBatch,
    Objective,
    TokenScores,
    Totals,
    combined,
    critic_loss,
    entropy_bonus,
    grpo,
    imitation,
    policy_loss,
    reference_kl,
    supervised,
)
from rft.ops import aggregation, corrections, entropy, kl, losses
from rft.ops.metrics import Metric, merged, read
from tests.trainers.batches import random_experience, rows_of, some_old
from tests.trainers.valued import CLIP as CLIPPED
from tests.trainers.valued import valued_experience

SOURCE = random_experience()
NEAR = torch.where(SOURCE.sampled, SOURCE.logprobs - 0.1, 0.0)
ENTROPY = torch.where(SOURCE.sampled, torch.rand(NEAR.shape, generator=torch.Generator().manual_seed(2)), 0.0)
OLD = some_old(SOURCE, NEAR)
TOTALS = Totals(tokens=int(SOURCE.sampled.sum()), sequences=7)
ALL = tuple(range(8))


def scored(logprobs: Tensor, *rows: int) -> TokenScores:
    return TokenScores(logprobs=logprobs, entropy=ENTROPY[list(rows or ALL)])


def micro(old: Tensor | None, *rows: int) -> MicroBatch:
    return MicroBatch(rows=rows_of(SOURCE, *rows), old=None if old is None else old[list(rows)])


def sampled_tokens(rows: Minibatch) -> list[tuple[int, int]]:
    return [(row, t) for row in range(len(rows)) for t in range(rows.tokens.shape[1]) if rows.sampled[row, t]]


def numbers(metrics: Mapping[str, Tensor | Metric]) -> dict[str, float]:
    return read(metrics)


def test_grpo_against_a_loop() -> None:
    terms = grpo(clip=0.1, correction_cap=1.3)(scored(NEAR), micro(OLD, *ALL), TOTALS)
    sums = dict.fromkeys(("policy_loss", "clip_fraction", "ratio_mean", "kl", "engine_kl", "entropy", "weight"), 0.0)
    sums["weight_clipped"], weights = 0.0, list[float]()
    for row, t in sampled_tokens(rows_of(SOURCE, *ALL)):
        ratio, gain = math.exp(NEAR[row, t] - OLD[row, t]), float(SOURCE.advantages[row, t])
        free = math.exp(OLD[row, t] - SOURCE.logprobs[row, t])
        weights.append(min(free, 1.3))
        bounded = min(max(ratio, 0.9), 1.1)
        sums["policy_loss"] -= weights[-1] * min(ratio * gain, bounded * gain)
        sums["clip_fraction"] += bounded * gain < ratio * gain
        sums["ratio_mean"] += ratio
        sums["kl"] += ratio - 1 - math.log(ratio)
        gap = float(NEAR[row, t] - SOURCE.logprobs[row, t])
        sums["engine_kl"] += math.exp(gap) - 1 - gap
        sums["entropy"] += float(ENTROPY[row, t])
        sums["weight"] += weights[-1]
        sums["weight_clipped"] += free > 1.3
    expected = {name: value / TOTALS.tokens for name, value in sums.items()}
    expected["weight_masked"] = 0.0
    expected["effective_sample_size"] = sum(weights) ** 2 / sum(w * w for w in weights) / TOTALS.tokens
    assert terms.loss.item() == pytest.approx(expected["policy_loss"], rel=1e-5)
    assert numbers(terms.metrics) == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_the_first_step_needs_no_old_logprobs() -> None:
    new = NEAR.clone().requires_grad_()
    terms = grpo()(scored(new), micro(None, *ALL), TOTALS)
    terms.loss.backward()
    seen = numbers(terms.metrics)
    assert seen["ratio_mean"] == pytest.approx(1.0)
    assert seen["kl"] == seen["clip_fraction"] == 0.0
    torch.testing.assert_close(new.grad, -SOURCE.advantages / TOTALS.tokens)


CLIP = partial(losses.ppo_clip, low=0.2, high=0.28)
WHOLE: dict[str, Objective] = {
    "grpo": grpo(),
    "corrected": grpo(correction_cap=2.0),
    "supervised": supervised(),
    "sequence means": policy_loss(CLIP, aggregate=aggregation.sequence_mean_of_token_means),
    "sequence sums": policy_loss(partial(losses.gspo, low=0.1, high=0.1), aggregate=aggregation.sequence_mean_of_token_sums),
    "constant length": policy_loss(CLIP, aggregate=partial(aggregation.constant_length, length=16)),
    "rejected": policy_loss(CLIP, correction=partial(corrections.geometric_rejection, low=0.9, high=1.1)),
    "chosen tokens": policy_loss(CLIP, tokens=partial(entropy.high_entropy_tokens, share=0.2)),
    "everything": combined(
        policy_loss(CLIP, correction=partial(corrections.icepop, low=0.5, high=2.0)),
        reference_kl(0.1, estimator=kl.k3, off_policy=True),
        entropy_bonus(0.01),
        imitation(0.5),
    ),
}
WITH_REFERENCE = dc.replace(SOURCE, reference=NEAR - 0.3)


@pytest.mark.parametrize("name", WHOLE)
def test_parts_add_up_to_the_whole(name: str) -> None:
    objective, new = WHOLE[name], NEAR.clone().requires_grad_()

    def terms_of(*rows: int) -> rft.LossTerms:
        part = MicroBatch(rows=rows_of(WITH_REFERENCE, *rows), old=OLD[list(rows)])
        return objective(scored(new[list(rows)], *rows), part, TOTALS)

    whole = terms_of(*ALL)
    (gradient,) = torch.autograd.grad(whole.loss, new)
    parts = [terms_of(*rows) for rows in ((5, 0), (3,), (1, 2, 4, 6, 7))]
    loss = torch.stack([part.loss for part in parts]).sum()
    torch.testing.assert_close(loss, whole.loss)
    torch.testing.assert_close(torch.autograd.grad(loss, new)[0], gradient)
    assert numbers(merged(part.metrics for part in parts)) == pytest.approx(numbers(whole.metrics), rel=1e-5, abs=1e-7)


def test_supervised_is_the_mean_negative_log_likelihood() -> None:
    terms = supervised()(scored(NEAR), micro(None, *ALL), TOTALS)
    expected = -sum(float(NEAR[row, t]) for row, t in sampled_tokens(rows_of(SOURCE, *ALL))) / TOTALS.tokens
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)


def test_adopted_engine_logprobs_have_a_correction_of_one() -> None:
    terms = grpo(correction_cap=2.0)(scored(NEAR), micro(SOURCE.logprobs, *ALL), TOTALS)
    assert numbers(terms.metrics)["weight"] == pytest.approx(1.0)
    assert numbers(terms.metrics)["effective_sample_size"] == pytest.approx(1.0)


def test_chosen_tokens_alone_have_a_gradient_and_all_of_them_stay_in_the_denominator() -> None:
    new = NEAR.clone().requires_grad_()
    chosen = entropy.high_entropy_tokens(ENTROPY, SOURCE.sampled, share=0.3)
    terms = policy_loss(losses.policy_gradient, tokens=partial(entropy.high_entropy_tokens, share=0.3))(
        scored(new), micro(None, *ALL), TOTALS
    )
    (gradient,) = torch.autograd.grad(terms.loss, new)
    torch.testing.assert_close(gradient, torch.where(chosen, -SOURCE.advantages, 0.0) / TOTALS.tokens)
    assert numbers(terms.metrics)["chosen_fraction"] == pytest.approx(int(chosen.sum()) / TOTALS.tokens)


def test_the_reference_kl_by_hand() -> None:
    # one token: log p = −1, log q = −1.5: k1 = 0.5, k2 = 0.125, k3 = e^−0.5 − 1 + 0.5 = 0.1065307
    rows = dc.replace(rows_of(SOURCE, 0), reference=torch.full((1, NEAR.shape[1]), -1.5))
    mask = torch.zeros_like(rows.sampled)
    mask[0, 5] = True
    part = MicroBatch(rows=dc.replace(rows, sampled=mask), old=None)
    new, totals = torch.full((1, NEAR.shape[1]), -1.0), Totals(tokens=1, sequences=1)
    for estimator, value in ((kl.k1, 0.5), (kl.k2, 0.125), (kl.k3, 0.1065307)):
        terms = reference_kl(0.1, estimator=estimator)(scored(new, 0), part, totals)
        assert terms.loss.item() == pytest.approx(0.1 * value, rel=1e-5)
        assert numbers(terms.metrics) == {"reference_kl": pytest.approx(value, rel=1e-5)}


def test_off_policy_the_reference_kl_has_the_gradient_of_k2_where_the_ratio_is_1() -> None:
    rows = rows_of(WITH_REFERENCE, *ALL)
    gradients = []
    for off_policy, estimator in ((True, kl.k3), (False, kl.k2)):
        for old in (None, NEAR):
            new = NEAR.clone().requires_grad_()
            terms = reference_kl(1.0, estimator=estimator, off_policy=off_policy)(scored(new), MicroBatch(rows=rows, old=old), TOTALS)
            gradients += torch.autograd.grad(terms.loss, new)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], atol=1e-6, rtol=1e-5)


def test_the_entropy_bonus_is_subtracted() -> None:
    terms = entropy_bonus(0.02)(scored(NEAR), micro(None, *ALL), TOTALS)
    assert terms.loss.item() == pytest.approx(-0.02 * float(ENTROPY.sum()) / TOTALS.tokens, rel=1e-5)


def test_demonstrations_are_imitated_and_nothing_else_is_done_with_them() -> None:
    shown = demonstrations(torch.tensor([[1, 2, 3, 4]]), torch.ones(1, 4, dtype=torch.bool), torch.tensor([[False, False, True, True]]))
    both = take(concatenate(SOURCE, shown), torch.tensor([0, 8]))
    new = torch.full(both.tokens.shape, -2.0).requires_grad_()
    scores = TokenScores(logprobs=new, entropy=torch.ones(both.tokens.shape))
    own = int(both.sampled[0].sum())
    totals = Totals(tokens=own, sequences=1, demonstrated=2)
    terms = combined(policy_loss(losses.policy_gradient), entropy_bonus(1.0), imitation(0.5))(
        scores, MicroBatch(rows=both, old=torch.zeros(both.tokens.shape)), totals
    )
    (gradient,) = torch.autograd.grad(terms.loss, new)
    assert gradient[1, :5].tolist() == [0.0, 0.0, -0.25, -0.25, 0.0]
    torch.testing.assert_close(gradient[0], torch.where(both.sampled[0], -both.advantages[0], 0.0) / own)
    seen = numbers(terms.metrics)
    assert seen["imitation_loss"] == 2.0
    assert seen["entropy"] == seen["entropy_bonus"] == pytest.approx(1.0)
    assert supervised()(scores, MicroBatch(rows=both, old=None), totals).loss.item() == pytest.approx(2.0)


def valued(*rows: int) -> MicroBatch:
    return MicroBatch(rows=rows_of(VALUED, *rows), old=None)


VALUED = valued_experience()
VALUES = torch.where(SOURCE.sampled, NEAR / 6 + 0.4, 0.0)


@pytest.mark.parametrize("clip", [None, CLIPPED])
def test_the_critic_s_loss_against_a_loop(clip: float | None) -> None:
    terms = critic_loss(clip=clip)(VALUES, valued(*ALL), TOTALS)
    assert VALUED.returns is not None
    assert VALUED.values is not None
    losses_, clipped, pairs = list[float](), 0, list[tuple[float, float]]()
    for at in sampled_tokens(rows_of(VALUED, *ALL)):
        new, old, target = float(VALUES[at]), float(VALUED.values[at]), float(VALUED.returns[at])
        free = (new - target) ** 2
        near = free if clip is None else (min(max(new, old - clip), old + clip) - target) ** 2
        losses_.append(0.5 * max(free, near))
        clipped += near > free
        pairs.append((new, target))
    returns, errors = [target for _, target in pairs], [target - new for new, target in pairs]
    expected = {
        "value_loss": sum(losses_) / len(losses_),
        "value_clip_fraction": clipped / len(losses_),
        "value_mean": sum(new for new, _ in pairs) / len(pairs),
        "return_mean": sum(returns) / len(returns),
        "explained_variance": 1 - statistics.pvariance(errors) / statistics.pvariance(returns),
    }
    assert (clipped > 0) == (clip is not None)
    assert terms.loss.item() == pytest.approx(expected["value_loss"], rel=1e-5)
    assert numbers(terms.metrics) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("aggregate", [aggregation.token_mean, aggregation.sequence_mean_of_token_means])
def test_parts_of_the_critic_s_loss_add_up_to_the_whole(aggregate: aggregation.Aggregation) -> None:
    objective, new = critic_loss(clip=CLIPPED, aggregate=aggregate), VALUES.clone().requires_grad_()
    whole = objective(new, valued(*ALL), TOTALS)
    parts = [objective(new[list(rows)], valued(*rows), TOTALS) for rows in ((5, 0), (3,), (1, 2, 4, 6, 7))]
    loss = torch.stack([part.loss for part in parts]).sum()
    torch.testing.assert_close(loss, whole.loss)
    torch.testing.assert_close(torch.autograd.grad(loss, new), torch.autograd.grad(whole.loss, new))
    assert numbers(merged(part.metrics for part in parts)) == pytest.approx(numbers(whole.metrics), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("missing", ["returns", "values"])
def test_a_critic_s_step_without_what_it_learns_says_what_to_write(missing: str) -> None:
    rows = dc.replace(rows_of(VALUED, *ALL), **{missing: None})
    with pytest.raises(BadInput, match=rf"critic_loss needs {missing}; write experience\(.*, returns=…, values=…\)"):
        _ = critic_loss(clip=CLIPPED)(VALUES, MicroBatch(rows=rows, old=None), TOTALS)


def test_a_step_without_the_reference_says_what_to_write() -> None:
    with pytest.raises(BadInput, match=r"experience\(rollouts, rewards, advantages, reference=…\)"):
        _ = reference_kl(0.1, estimator=kl.k3)(scored(NEAR), micro(OLD, *ALL), TOTALS)


@pytest.mark.parametrize(
    "compose",
    [
        lambda: grpo(clip=0.0),
        lambda: grpo(clip=-1.0),
        lambda: grpo(correction_cap=0.0),
        lambda: reference_kl(-0.1, estimator=kl.k3),
        lambda: reference_kl(0.1, estimator=kl.k2, off_policy=True),
        lambda: critic_loss(clip=0.0),
        lambda: critic_loss(clip=-1.0),
        lambda: critic_loss(aggregate=partial(aggregation.constant_length, length=0)),
        lambda: imitation(-1.0),
        lambda: imitation(math.nan),
        lambda: reference_kl(math.nan, estimator=kl.k3),
        lambda: entropy_bonus(math.inf),
        lambda: combined(),
        lambda: combined(grpo(), grpo()),
        lambda: policy_loss(losses.policy_gradient, tokens=partial(entropy.high_entropy_tokens, share=2.0)),
        lambda: policy_loss(CLIP, aggregate=partial(aggregation.constant_length, length=0)),
    ],
)
def test_nonsense_is_refused_when_it_is_composed(compose: object) -> None:
    assert callable(compose)
    with pytest.raises(BadInput):
        compose()


def vector(scores: TokenScores, *_: object) -> rft.LossTerms:
    return rft.LossTerms(loss=scores.logprobs, metrics={})


def own_mean(scores: TokenScores, part: MicroBatch, totals: Totals) -> rft.LossTerms:
    return rft.LossTerms(loss=-scores.logprobs[part.responses].mean() / totals.tokens, metrics={})


def float_metric(scores: TokenScores, *_: object) -> rft.LossTerms:
    return rft.LossTerms(loss=scores.logprobs.sum(), metrics={"x": 1.0})


def reserved(scores: TokenScores, *_: object) -> rft.LossTerms:
    return rft.LossTerms(loss=scores.logprobs.sum(), metrics={"grad_norm": scores.logprobs.sum()})


def bare_tensor(scores: TokenScores, *_: object) -> Tensor:
    return scores.logprobs.sum()


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        (vector, r"scalar tensor, divided by the totals; it gave a tensor \(2, 3\)"),
        (own_mean, "nothing sampled .* where it must be 0; divide by the totals"),
        (float_metric, "the metric 'x' is a scalar tensor or a Metric; the objective gave float"),
        (reserved, "cannot be called 'grad_norm'"),
        (bare_tensor, "returns LossTerms.* gave Tensor"),
        ("grpo", "part 1 must be a function"),
    ],
)
def test_an_objective_that_no_trainer_could_use_is_refused_when_it_is_composed(objective: object, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        combined(objective)


def test_names_of_other_systems_are_no_functions() -> None:
    with pytest.raises(BadInput, match=r"policy_loss: aggregate must be a function of \(values, mask, totals\), .* got 'token-mean'"):
        policy_loss(CLIP, aggregate="token-mean")


@pytest.mark.parametrize(
    ("factory", "wrong", "says"),
    [
        (grpo, "clipp", "grpo takes no 'clipp'; did you mean 'clip'"),
        (grpo, "low", "grpo takes no 'low'. It takes clip, correction_cap"),
        (partial(policy_loss, CLIP), "agregate", "did you mean 'aggregate'. It takes surrogate, aggregate, correction, tokens"),
        (partial(reference_kl, 0.1), "estimate", "did you mean 'estimator'"),
        (partial(entropy_bonus, 0.1), "aggregated", "did you mean 'aggregate'"),
        (imitation, "coeff", "did you mean 'coefficient'"),
        (critic_loss, "cliprange", "did you mean 'clip'"),
    ],
)
def test_a_keyword_that_is_misspelt_is_told_the_nearest_one(factory: Any, wrong: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        _ = factory(**{wrong: 1.0})


@pytest.mark.parametrize(
    ("compose", "says"),
    [
        (lambda: policy_loss(losses.ppo_clip), r"surrogate must be .*, and ppo_clip is none: .*'low'; .*functools\.partial\(ppo_clip, …\)"),
        (lambda: policy_loss(CLIP, correction=corrections.truncated), r"correction must be .*, and truncated is none: .*'cap'"),
        (lambda: policy_loss(CLIP, aggregate=aggregation.constant_length), r"call it .* what makes such a function, constant_length\(…\)"),
        (lambda: combined(grpo), r"part 1 must be a function of \(scores, micro-batch, totals\), and grpo is none: .*, grpo\(…\)"),
        (lambda: cast(Any, grpo)(clip="0.2"), "grpo: clip must be float, got '0.2'"),
        (lambda: cast(Any, entropy_bonus)("0.1"), "entropy_bonus: coefficient must be float, got '0.1'"),
        (lambda: cast(Any, policy_loss)(), "policy_loss: missing a required argument: 'surrogate'; it takes surrogate, aggregate"),
        (lambda: cast(Any, reference_kl)(0.1, estimator=None), r"estimator must be a function of \(p, q\), .* got None"),
    ],
)
def test_what_an_objective_cannot_be_made_of_is_an_error_when_it_is_composed(compose: Callable[[], object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        _ = compose()
