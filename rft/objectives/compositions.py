"""Objectives are composed of small ones, each with its own coefficient; their formulas are those of `rft.ops`, with parameters bound.

combined(
    policy_loss(partial(losses.ppo_clip, low=0.2, high=0.28), correction=partial(corrections.truncated, cap=2.0)),
    reference_kl(0.01, estimator=kl.k3),
    entropy_bonus(0.001),
)
"""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rft.errors import BadInput
from rft.objectives.protocol import (
    OBJECTIVE,
    LossTerms,
    MicroBatch,
    Objective,
    TokenScores,
    ValueObjective,
    check_terms,
    tried,
    tried_on_values,
)
from rft.ops import corrections, losses
from rft.ops import values as value_losses
from rft.ops.aggregation import Aggregation, Totals, token_mean
from rft.ops.corrections import Correction
from rft.ops.kl import importance_weighted, k1, k3
from rft.ops.masked import masked_mean
from rft.ops.metrics import Metric, explained_variance
from rft.ops.parameters import known_parameters, require_function

SurrogateFunction = Callable[[Tensor, Tensor, Tensor, Tensor], losses.Surrogate]
"""(new, old, advantages, mask), each `[batch, seq]` -> the loss of each token: a function of `ops.losses`, parameters bound."""
CorrectionFunction = Callable[[Tensor, Tensor, Tensor], Correction]
"""(old, engine, mask), each `[batch, seq]` -> weights: a function of `ops.corrections`, parameters bound."""
EstimatorFunction = Callable[[Tensor, Tensor], Tensor]
"""(p, q) -> KL(p ‖ q) of each token: a function of `ops.kl`."""
ChoiceFunction = Callable[[Tensor, Tensor], Tensor]
"""(entropy, mask) -> which of the marked tokens are trained on: a function of `ops.entropy`, parameters bound."""
TAKES = {
    "surrogate": ("new", "old", "advantages", "mask"),
    "aggregate": ("values", "mask", "totals"),
    "correction": ("old", "engine", "mask"),
    "tokens": ("entropy", "mask"),
    "estimator": ("p", "q"),
}
"""What the functions take that objectives are made of."""
OPTIONAL = ("correction", "tokens")
"""Those that may be None."""


def combined(*parts: Objective) -> Objective:
    """The sum of several objectives; of metrics too, so each needs names of its own.

        loss = Σ_k loss_k

    The whole is tried on made-up rows, a filler among them, so that what is wrong is said here and not in mid-step. Raises `BadInput` for
    no part, for what is no function, for two metrics of one name, for a loss or metric that no trainer could use, and what parts raise.
    """
    if not parts:
        raise BadInput("combined(*parts) needs at least one objective")
    for number, part in enumerate(parts, start=1):
        require_function("combined(*parts)", f"part {number}", part, OBJECTIVE)

    def objective(scores: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
        terms = [check_terms(part(scores, micro, totals)) for part in parts]
        names = Counter(name for term in terms for name in term.metrics)
        if twice := [name for name, count in names.items() if count > 1]:
            raise BadInput(f"combined(*parts): more than one part reports {', '.join(twice)}; a combination takes one part of a kind")
        metrics = {name: value for term in terms for name, value in term.metrics.items()}
        return LossTerms(loss=torch.stack([term.loss for term in terms]).sum(), metrics=metrics)

    return tried(objective)


@known_parameters
def grpo(*, clip: float = 0.2, correction_cap: float | None = None) -> Objective:
    """The clipped surrogate over the tokens of the global batch: the shortest way to an objective.

        loss = 1/N Σ_t min(exp(old_t − engine_t), correction_cap) · ppo_clip_t

    It is `policy_loss(partial(losses.ppo_clip, low=clip, high=clip))`, with `correction_cap` corrected by `corrections.truncated`.
    Raises `BadInput` for a clip or a cap that is not above 0.

    Source: Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300; averaged over tokens instead of responses: Yu et al., DAPO,
    https://arxiv.org/abs/2503.14476
    """
    correction = None if correction_cap is None else partial(corrections.truncated, cap=correction_cap)
    return policy_loss(partial(losses.ppo_clip, low=clip, high=clip), correction=correction)


@known_parameters
def policy_loss(
    surrogate: SurrogateFunction,
    *,
    aggregate: Aggregation = token_mean,
    correction: CorrectionFunction | None = None,
    tokens: ChoiceFunction | None = None,
) -> Objective:
    """A surrogate of `ops.losses`, corrected, restricted to some tokens, and aggregated.

        loss = aggregate_t( w_t · c_t · surrogate_t ),   w_t = correction(old_t, engine_t),   c_t = 1 where `tokens` chooses t, else 0

    Without old log-probs (the first step) old = new, detached, and every ratio is 1. w = 1 without `correction`, and where the old
    log-probs were adopted from the engine, as the ratio itself is then measured against the engine. Tokens that a correction or a choice
    leaves out stay in the denominator. Demonstrations are left out altogether.

    Metrics, means over the sampled tokens of the global batch: `policy_loss`, `clip_fraction`, `ratio_mean`, `entropy`, `kl` (k3 of old
    to new), `engine_kl` (k3 of the distribution sampled from to new); with a correction those of `corrections.weighting`; with `tokens`
    `chosen_fraction`. Raises `BadInput` for what is no function, and what the functions raise.
    """
    _require_functions("policy_loss", surrogate=surrogate, aggregate=aggregate, correction=correction, tokens=tokens)

    def objective(scores: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
        new, mask, engine = scores.logprobs, micro.responses, micro.rows.logprobs
        old = new.detach() if micro.old is None else micro.old
        terms = surrogate(new, old, micro.rows.advantages, mask)
        loss, metrics = terms.loss, _seen(scores, old, engine, mask, terms, totals)
        if correction is not None:
            corrected = correction(old, engine, mask)
            metrics |= corrections.weighting(corrected, mask, totals)
            loss = corrected.weights * loss
        if tokens is not None:
            chosen = tokens(scores.entropy.detach(), mask)
            metrics["chosen_fraction"] = masked_mean(chosen.float(), mask, totals.tokens)
            loss = torch.where(chosen, loss, 0.0)
        loss = aggregate(loss, mask, totals)
        return LossTerms(loss=loss, metrics={**metrics, "policy_loss": loss.detach()})

    return tried(objective)


def _seen(
    scores: TokenScores, old: Tensor, engine: Tensor, mask: Tensor, terms: losses.Surrogate, totals: Totals
) -> dict[str, Tensor | Metric]:
    new = scores.logprobs.detach()
    means = {
        "clip_fraction": terms.clipped.float(),
        "ratio_mean": terms.ratio,
        "entropy": scores.entropy.detach(),
        "kl": k3(old, new),
        "engine_kl": k3(engine, new),
    }
    return {name: masked_mean(value, mask, totals.tokens) for name, value in means.items()}


@known_parameters
def reference_kl(
    coefficient: float, *, estimator: EstimatorFunction, aggregate: Aggregation = token_mean, off_policy: bool = False
) -> Objective:
    """A penalty on the KL of the Actor to the Reference, in the loss.

        loss = coefficient · aggregate_t( w_t · estimator(new_t, reference_t) ),   w_t = 1

    What gradient an estimator has, and which one is that of the KL, is told in `ops.kl`. With `off_policy` w_t = exp(new_t − old_t), so
    that tokens of an older policy estimate the KL of the one in training, and with its gradient: `kl.importance_weighted`, which needs k1
    or k3. Reports `reference_kl`, the mean over the sampled tokens. Raises `BadInput` for a negative coefficient, for `off_policy` with
    another estimator, and in a step whose experience has no `reference`.

    Known as: TRL `beta` of `GRPOConfig`; verl `actor_rollout_ref.actor.use_kl_loss`; OpenRLHF `--use_kl_loss`.
    Source: Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300
    """
    _require_functions("reference_kl", estimator=estimator, aggregate=aggregate)
    if not 0 <= coefficient < math.inf:
        raise BadInput(f"reference_kl: the coefficient must be a number of at least 0, got {coefficient}")
    if off_policy and estimator not in (k1, k3):
        raise BadInput(
            "reference_kl: off_policy weights an estimator without bias, so it takes kl.k1 or kl.k3; its gradient is the KL's then"
        )

    def objective(scores: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
        reference, mask = micro.rows.reference, micro.responses
        if reference is None:
            raise BadInput("reference_kl needs the Reference's log-probs; write experience(rollouts, rewards, advantages, reference=…)")
        new = torch.where(mask, scores.logprobs, 0.0)
        values = estimator(new, torch.where(mask, reference, 0.0))
        if off_policy:
            values = importance_weighted(values, new, scores.logprobs.detach() if micro.old is None else micro.old, mask)
        metrics = {"reference_kl": masked_mean(values.detach(), mask, totals.tokens)}
        return LossTerms(loss=coefficient * aggregate(values, mask, totals), metrics=metrics)

    return tried(objective)


@known_parameters
def entropy_bonus(coefficient: float, *, aggregate: Aggregation = token_mean) -> Objective:
    """Rewards entropy, so that the policy does not collapse early.

        loss = −coefficient · aggregate_t( H_t ),   H_t = −Σ_v p_t(v) log p_t(v)

    The gradient is exact: over the whole vocabulary, not of the sampled token. A negative coefficient is a penalty. Raises `BadInput` for
    one that is not finite.

    Known as: verl `actor_rollout_ref.actor.entropy_coeff`.
    Source: Williams and Peng, Function Optimization Using Connectionist Reinforcement Learning Algorithms,
    https://doi.org/10.1080/09540099108946587
    """
    _require_functions("entropy_bonus", aggregate=aggregate)
    if not math.isfinite(coefficient):
        raise BadInput(f"entropy_bonus: the coefficient must be a finite number, got {coefficient}")

    def objective(scores: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
        loss = -coefficient * aggregate(scores.entropy, micro.responses, totals)
        return LossTerms(loss=loss, metrics={"entropy_bonus": -loss.detach()})

    return tried(objective)


@known_parameters
def imitation(coefficient: float) -> Objective:
    """The supervised auxiliary loss (PTX): imitates the demonstrations among the rows, in the same optimizer step.

        loss = −coefficient / N Σ_t log p(token t | before t),   N = tokens of demonstrations in the global batch

    Put them there with `concatenate(experience, demonstrations(…))`; without any it is 0. The global batch is that of one step: a batch cut
    into several mini-batches weighs its demonstrations by those that came into each. Reports `imitation_loss`, without the
    coefficient. Raises `BadInput` for a negative coefficient.

    Known as: OpenRLHF `--ptx_coef` (of its earlier releases).
    Source: Ouyang et al., Training language models to follow instructions with human feedback, https://arxiv.org/abs/2203.02155
    """
    if not 0 <= coefficient < math.inf:
        raise BadInput(f"imitation: the coefficient must be a number of at least 0, got {coefficient}")

    def objective(scores: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
        mask = micro.rows.sampled & micro.rows.demonstrated[:, None]
        loss = masked_mean(losses.negative_log_likelihood(scores.logprobs), mask, totals.demonstrated)
        return LossTerms(loss=coefficient * loss, metrics={"imitation_loss": loss.detach()})

    return tried(objective)


def supervised() -> Objective:
    """Negative log-likelihood of the tokens marked `sampled`, whatever row they are in.

        loss = −1/N Σ_t log p(token t | before t)

    Advantages and old log-probs are not read.
    """

    def objective(scores: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
        loss = masked_mean(losses.negative_log_likelihood(scores.logprobs), micro.rows.sampled, totals.tokens + totals.demonstrated)
        return LossTerms(loss=loss, metrics={})

    return objective


@known_parameters
def critic_loss(*, clip: float | None = None, aggregate: Aggregation = token_mean) -> ValueObjective:
    """The Critic's objective: squared error of its values against the returns, aggregated; for `train_critic`.

        loss = aggregate_t( ½ (V_t − R_t)² ),   or with `clip`   aggregate_t( ½ max((V_t − R_t)², (clip(V_t, O_t ± clip) − R_t)²) )

    R are the mini-batch's `returns`, O its `values`: those when the batch was collected. The formulas are `ops.values`'s.

    Metrics, over the sampled tokens of the global batch: `value_loss`, `value_clip_fraction`, `value_mean`, `return_mean`, and
    `explained_variance` of the returns. Raises `BadInput` for a clip that is not above 0, and in a step whose experience has no
    `returns`, or with a clip no `values`.

    Source: Schulman et al., Proximal Policy Optimization Algorithms, https://arxiv.org/abs/1707.06347, equation 9
    """
    _require_functions("critic_loss", aggregate=aggregate)

    def objective(new: Tensor, micro: MicroBatch, totals: Totals) -> LossTerms:
        mask, returns = micro.responses, _given(micro, "returns")
        if clip is None:
            terms = value_losses.value_loss(new, returns, mask)
        else:
            terms = value_losses.clipped_value_loss(new, _given(micro, "values"), returns, mask, clip=clip)
        loss = aggregate(terms.loss, mask, totals)
        means = {"value_clip_fraction": terms.clipped.float(), "value_mean": new.detach(), "return_mean": returns}
        metrics: dict[str, Tensor | Metric] = {name: masked_mean(value, mask, totals.tokens) for name, value in means.items()}
        metrics |= {"value_loss": loss.detach(), "explained_variance": explained_variance(new, returns, mask)}
        return LossTerms(loss=loss, metrics=metrics)

    return tried_on_values(objective)


def _given(micro: MicroBatch, name: str) -> Tensor:
    column: Tensor | None = getattr(micro.rows, name)
    if column is None:
        raise BadInput(f"critic_loss needs {name}; write experience(rollouts, rewards, advantages, returns=…, values=…)")
    return column


def _require_functions(where: str, **given: object) -> None:
    for name, value in given.items():
        if value is not None or name not in OPTIONAL:
            require_function(where, name, value, TAKES[name])
