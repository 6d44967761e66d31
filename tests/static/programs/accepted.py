"""Never executed: correct loops, in which nothing fails, and whose states have exactly the types that are asserted."""

from pathlib import Path
from typing import assert_type

from rft import (
    ACTOR_OPTIMIZER,
    CRITIC,
    EMA,
    REFERENCE,
    A,
    Asleep,
    Awake,
    E,
    Experience,
    Fresh,
    LaunchSpec,
    Metrics,
    Minibatch,
    NonFiniteGradient,
    NoOld,
    O,
    Objective,
    Offloaded,
    OldLogProbs,
    OnDevice,
    Prompts,
    RewardFunction,
    Rewards,
    Rollouts,
    RuntimeState,
    Sampling,
    Stale,
    ValueObjective,
    W,
    adopt_logprobs,
    broadcast,
    collect,
    compute_old_logprobs,
    evaluate,
    experience,
    export,
    finish_batch,
    generate,
    generate_stale,
    grpo,
    is_at,
    is_ready,
    launch,
    legal,
    living,
    minibatches,
    model_rewards,
    observation,
    offload,
    offload_actor,
    recover,
    reference_logprobs,
    refresh,
    reload,
    reload_actor,
    reward_model,
    rewards,
    sleep,
    sleep_keeping,
    supervised_step,
    then,
    train_critic,
    train_step,
    transition,
    update,
    update_ema,
    use,
    values,
    wake,
)
from rft.checkpoint.folder import newest_checkpoint
from rft.data.minibatches import Cut
from rft.data.prompts import Cursor
from rft.errors import EngineFailed
from rft.steps import restore, save

Ready = RuntimeState[Awake, Fresh, OnDevice, NoOld]
Rested = RuntimeState[Asleep, Stale, OnDevice, NoOld]


# ---- loops ----


def sleeping_every_iteration(spec: LaunchSpec, prompts: list[Prompts], sampling: Sampling, objective: Objective) -> None:
    with launch(spec) as state:
        for batch in prompts:
            state = broadcast(state)
            state = wake(state)
            rollouts = generate(state, batch, sampling)
            state = sleep(state)
            state = compute_old_logprobs(state, rollouts)
            for minibatch in minibatches(experience_of(rollouts), Cut()):
                state, _metrics = train_step(state, minibatch, objective)
            state = finish_batch(state)
        _ = assert_type(state, Rested)


def never_sleeping(state: Ready, prompts: list[Prompts], sampling: Sampling, minibatch: Minibatch, objective: Objective) -> Ready:
    for batch in prompts:
        scored = compute_old_logprobs(state, generate(state, batch, sampling))
        trained, _metrics = train_step(scored, minibatch, objective)
        state = finish_batch(broadcast(trained))
    return state


def skipping_broadcasts(
    state: RuntimeState[Awake, Fresh | Stale, OnDevice, NoOld],
    prompts: list[Prompts],
    sampling: Sampling,
    minibatch: Minibatch,
    objective: Objective,
) -> None:
    for number, batch in enumerate(prompts):
        rollouts = generate_stale(state, batch, sampling, max_lag=3)
        scored = compute_old_logprobs(state, rollouts, max_lag=3)
        trained, _metrics = train_step(scored, minibatch, objective)
        state = finish_batch(broadcast(trained) if number % 4 == 3 else trained)


def several_steps_on_one_batch(
    state: RuntimeState[Asleep, Fresh, OnDevice, NoOld], rollouts: Rollouts, batches: list[Minibatch], objective: Objective
) -> RuntimeState[Asleep, Fresh | Stale, OnDevice, NoOld]:
    batch = adopt_logprobs(state, rollouts, source="engine")
    for minibatch in batches:
        batch, _metrics = train_step(batch, minibatch, objective)
    return finish_batch(batch)


def actor_away_between_broadcast_and_wake(rested: Rested, prompts: Prompts, sampling: Sampling) -> Rested:
    state = broadcast(rested)
    state = offload_actor(state)
    state = wake(state)
    _ = assert_type(state, RuntimeState[Awake, Fresh, Offloaded, NoOld])
    _rollouts = generate(state, prompts, sampling)
    state = sleep(state)
    return reload_actor(state)


def in_one_expression(state: Rested, prompts: Prompts, sampling: Sampling) -> Rollouts:
    return generate(wake(offload_actor(broadcast(state))), prompts, sampling)


def compositions(rested: Rested, prompts: list[Prompts], sampling: Sampling, reward: RewardFunction, objective: Objective) -> list[float]:
    seen, state = list[float](), rested
    for batch in prompts:
        state = refresh(state)
        collected = collect(state, batch, sampling, reward)
        seen.append(evaluate(state, batch, sampling, reward).reward)
        state = sleep(state)
        state = compute_old_logprobs(state, collected.rollouts)
        state, history = update(state, experience_of(collected.rollouts), objective, Cut(epochs=2))
        seen += [metrics["loss"] for metrics in history]
        _ = assert_type(state, RuntimeState[Asleep, Stale, OnDevice, NoOld])
    return seen


def supervision_without_an_engine(spec: LaunchSpec, batches: list[Minibatch]) -> None:
    with launch(spec) as state:
        for minibatch in batches:
            state, metrics = supervised_step(state, minibatch)
            _ = assert_type(metrics, Metrics)


def keeping_the_weights(ready: Ready) -> Ready:
    state = sleep_keeping(ready)
    state = offload(state, ACTOR_OPTIMIZER)
    state = reload(state, ACTOR_OPTIMIZER)
    return wake(state)


def leading_on(state: Ready, prompts: Prompts, sampling: Sampling) -> Ready:
    try:
        _rollouts = generate(state, prompts, sampling)
    except EngineFailed:
        return refresh(recover(state))
    return state


def roles_beside_the_actor(rested: Rested, rollouts: Rollouts, minibatch: Minibatch, objective: ValueObjective) -> Rested:
    state = compute_old_logprobs(rested, rollouts)
    state, reference = use(state, REFERENCE, lambda there: reference_logprobs(there, rollouts))
    state, scores = use(state, reward_model("kind"), lambda there: model_rewards(there, rollouts, reward_model("kind")))
    _ = assert_type(scores, Rewards)
    state = reload(state, CRITIC)
    valued = experience(rollouts, scores.values, reference, reference=reference, values=values(state, rollouts))
    state, _metrics = assert_type(
        train_critic(state, minibatch, objective), tuple[RuntimeState[Asleep, Stale, OnDevice, OldLogProbs], Metrics]
    )
    state, _history = update(state, valued, grpo(), Cut())
    return update_ema(reload(offload(state, CRITIC), EMA))


def averages_are_scored_and_exported(state: RuntimeState, rollouts: Rollouts, folder: Path) -> Path:
    _ = reference_logprobs(state, rollouts, role=EMA)
    return export(state, folder, role=EMA)


# ---- states of unknown axes ----


def narrowed(state: RuntimeState, prompts: Prompts, sampling: Sampling) -> Rollouts | None:
    if not is_ready(state):
        return None
    return generate(state, prompts, sampling)


def narrowed_keeps_the_other_axes(state: RuntimeState[Awake | Asleep, Fresh | Stale, OnDevice, NoOld]) -> Ready | None:
    return state if is_ready(state) else None


def what_an_update_had_reached(
    start: RuntimeState[Asleep, Stale, OnDevice, OldLogProbs], experience_: Experience
) -> RuntimeState[Asleep, Stale, OnDevice, NoOld]:
    try:
        return update(start, experience_, grpo(), Cut())[0]
    except NonFiniteGradient:
        reached = living(start)
        if not is_at(reached, Asleep, Stale, OnDevice, OldLogProbs):
            raise
        return finish_batch(assert_type(reached, RuntimeState[Asleep, Stale, OnDevice, OldLogProbs]))


def two_axes_are_enough_to_write(state: RuntimeState[Awake, Fresh], prompts: Prompts, sampling: Sampling) -> Rollouts:
    return generate(state, prompts, sampling)


def what_may_come_next(state: RuntimeState) -> tuple[str, ...]:
    return legal(state)


# ---- helpers that are generic in the axes ----


def without_the_optimizer(state: RuntimeState[E, W, A, O]) -> RuntimeState[E, W, A, O]:
    return offload(state, ACTOR_OPTIMIZER)


def to_rest(state: RuntimeState[Awake, W, A, O]) -> RuntimeState[Asleep, Stale, A, O]:
    return sleep(state)


def helpers_keep_types(ready: Ready) -> RuntimeState[Asleep, Stale, OnDevice, NoOld]:
    state = assert_type(without_the_optimizer(ready), Ready)
    return to_rest(state)


# ---- checkpoints ----


def goes_on(spec: LaunchSpec, folder: Path, cursor: Cursor) -> Cursor:
    with launch(spec) as state:
        if newest_checkpoint(folder) is not None:
            state, cursor = restore(state, folder, cursor)
        ready = assert_type(refresh(state), Ready)
        _path = assert_type(save(ready, folder, cursor, keep=3), Path)
        state, back = restore(sleep(ready), folder, (cursor, 1.5))
        _ = assert_type(state, RuntimeState[Asleep, Stale, OnDevice, NoOld])
        return assert_type(back, tuple[Cursor, float])[0]


# ---- steps of one's own ----


@transition
def drop_batch(state: RuntimeState[E, W, A, OldLogProbs], reason: str, /, *, loud: bool = False) -> RuntimeState[E, W, A, NoOld]:
    """A transition of one's own."""
    if loud:
        print(reason)
    return then(state, state.engine, state.weights, state.actor, NoOld())


@observation
def lag(state: RuntimeState[Awake, Stale, A, O], /) -> int:  # pyright: ignore[reportInvalidTypeVarUse] (any axis may be named)
    """An observation of one's own."""
    return state.version - (state.weights.version or 0)


def own_steps_keep_their_types(state: RuntimeState[Awake, Stale, OnDevice, OldLogProbs]) -> int:
    dropped = drop_batch(state, "too old", loud=True)
    _ = assert_type(dropped, RuntimeState[Awake, Stale, OnDevice, NoOld])
    return assert_type(lag(dropped), int)


def experience_of(rollouts: Rollouts) -> Experience:
    return experience(rollouts, rollouts.logprobs.sum(1), rollouts.logprobs)


def scored(state: RuntimeState, rollouts: Rollouts, reward: RewardFunction) -> float:
    return rewards(state, rollouts, reward, deadline_s=1.0).mean()
