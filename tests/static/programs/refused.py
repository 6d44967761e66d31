"""Never executed: every mistake fails on its own line, by the rule that `expect` names, and nothing else does."""

from pathlib import Path

from rft import (
    ACTOR_OPTIMIZER,
    EMA,
    REFERENCE,
    Asleep,
    Awake,
    Experience,
    Fresh,
    LaunchSpec,
    Minibatch,
    NoOld,
    Objective,
    Offloaded,
    OldLogProbs,
    OnDevice,
    PolicyVersion,
    Prompts,
    Role,
    Rollouts,
    RuntimeState,
    Sampling,
    Stale,
    ValueObjective,
    adopt_logprobs,
    compute_old_logprobs,
    finish_batch,
    generate,
    generate_stale,
    is_at,
    is_ready,
    launch,
    living,
    model_rewards,
    offload,
    offload_actor,
    reference_logprobs,
    refresh,
    reload,
    reload_actor,
    sleep,
    sleep_keeping,
    supervised_step,
    train_critic,
    train_step,
    update,
    update_ema,
    use,
    wake,
)
from rft.data.minibatches import Cut
from rft.data.prompts import Cursor
from rft.state import Devices, Roles
from rft.steps import restore, save

Ready = RuntimeState[Awake, Fresh, OnDevice, NoOld]


# ---- generating ----


def generate_while_asleep(state: Ready, prompts: Prompts, sampling: Sampling) -> Rollouts:
    slept = sleep_keeping(state)
    return generate(slept, prompts, sampling)  # expect: reportArgumentType


def generate_at_launch(spec: LaunchSpec, prompts: Prompts, sampling: Sampling) -> Rollouts:
    with launch(spec) as state:
        return generate(state, prompts, sampling)  # expect: reportArgumentType


def generate_while_asleep_on_purpose(state: Ready, prompts: Prompts, sampling: Sampling) -> Rollouts:
    return generate_stale(sleep_keeping(state), prompts, sampling, max_lag=1)  # expect: reportArgumentType


def generate_on_stale_weights(state: RuntimeState[Awake, Stale, OnDevice, NoOld], prompts: Prompts, sampling: Sampling) -> Rollouts:
    return generate(state, prompts, sampling)  # expect: reportArgumentType


def generate_after_a_step_without_a_broadcast(
    state: Ready, prompts: Prompts, sampling: Sampling, minibatch: Minibatch, objective: Objective
) -> Rollouts:
    rollouts = generate(state, prompts, sampling)
    old = compute_old_logprobs(state, rollouts)
    trained, _metrics = train_step(old, minibatch, objective)
    return generate(trained, prompts, sampling)  # expect: reportArgumentType


def generate_on_the_second_pass(state: Ready, prompts: Prompts, sampling: Sampling, minibatch: Minibatch, objective: Objective) -> None:
    batch = compute_old_logprobs(state, generate(state, prompts, sampling))
    for _ in range(2):
        _rollouts = generate(batch, prompts, sampling)  # expect: reportArgumentType
        batch, _metrics = train_step(batch, minibatch, objective)


def generate_in_a_loop_that_forgets_the_broadcast(
    ready: Ready, prompts: Prompts, sampling: Sampling, minibatch: Minibatch, objective: Objective
) -> None:
    state = ready
    while True:
        rollouts = generate(state, prompts, sampling)  # expect: reportArgumentType
        state = compute_old_logprobs(state, rollouts)
        state, _metrics = train_step(state, minibatch, objective)
        state = finish_batch(state)


def generate_without_narrowing(state: RuntimeState, prompts: Prompts, sampling: Sampling) -> Rollouts:
    return generate(state, prompts, sampling)  # expect: reportArgumentType


def generate_from_what_was_reached(state: Ready, prompts: Prompts, sampling: Sampling) -> Rollouts:
    return generate(living(state), prompts, sampling)  # expect: reportArgumentType


def train_where_narrowing_found_no_batch(
    state: RuntimeState, minibatch: Minibatch, objective: Objective
) -> RuntimeState[Asleep, Stale, OnDevice, OldLogProbs] | None:
    if is_at(state, Asleep, Stale, OnDevice, NoOld):
        return train_step(state, minibatch, objective)[0]  # expect: reportArgumentType
    return None


def generate_where_narrowing_says_no(state: RuntimeState, prompts: Prompts, sampling: Sampling) -> Rollouts | None:
    if is_ready(state):
        return None
    return generate(state, prompts, sampling)  # expect: reportArgumentType


def generate_after_supervision(state: Ready, prompts: Prompts, sampling: Sampling, minibatch: Minibatch) -> Rollouts:
    taught, _metrics = supervised_step(state, minibatch)
    return generate(taught, prompts, sampling)  # expect: reportArgumentType


# ---- checkpoints ----


def save_in_the_middle_of_a_batch(state: RuntimeState[Awake, Fresh, OnDevice, OldLogProbs], folder: Path) -> None:
    _path = save(state, folder, None)  # expect: reportArgumentType


def generate_from_what_was_restored(state: Ready, folder: Path, prompts: Prompts, sampling: Sampling) -> Rollouts:
    restored, _run = restore(state, folder, None)
    return generate(restored, prompts, sampling)  # expect: reportArgumentType


def restored_and_dropped(state: Ready, folder: Path) -> None:
    restore(state, folder, None)  # expect: reportUnusedCallResult


def restored_as_something_else(state: Ready, folder: Path, cursor: Cursor) -> int:
    _state, step = restore(state, folder, cursor)
    return step  # expect: reportReturnType


# ---- waking and sleeping ----


def wake_on_discarded_weights(state: Ready) -> Ready:
    return wake(sleep(state))  # expect: reportArgumentType


def wake_on_stale_weights(state: RuntimeState[Asleep, Fresh, OnDevice, OldLogProbs], minibatch: Minibatch, objective: Objective) -> None:
    trained, _metrics = train_step(state, minibatch, objective)
    _awake = wake(trained)  # expect: reportArgumentType


def wake_at_launch(spec: LaunchSpec) -> None:
    with launch(spec) as state:
        _awake = wake(state)  # expect: reportArgumentType


def wake_twice(state: Ready) -> None:
    _awake = wake(state)  # expect: reportArgumentType


def sleep_twice(state: Ready) -> None:
    slept = sleep(state)
    _slept = sleep(slept)  # expect: reportArgumentType


def sleep_keeping_twice(state: Ready) -> None:
    slept = sleep_keeping(state)
    _slept = sleep_keeping(slept)  # expect: reportArgumentType


def refresh_while_awake(state: Ready) -> None:
    _ready = refresh(state)  # expect: reportArgumentType


# ---- training ----


def train_with_the_actor_offloaded(
    state: RuntimeState[Asleep, Stale, Offloaded, OldLogProbs], minibatch: Minibatch, objective: Objective
) -> None:
    _trained, _metrics = train_step(state, minibatch, objective)  # expect: reportArgumentType


def score_with_the_actor_offloaded(state: Ready, rollouts: Rollouts) -> None:
    away = offload_actor(state)
    _scored = compute_old_logprobs(away, rollouts)  # expect: reportArgumentType


def supervise_with_the_actor_offloaded(state: Ready, minibatch: Minibatch) -> None:
    _taught, _metrics = supervised_step(offload_actor(state), minibatch)  # expect: reportArgumentType


def train_without_old_logprobs(state: Ready, minibatch: Minibatch, objective: Objective) -> None:
    _trained, _metrics = train_step(state, minibatch, objective)  # expect: reportArgumentType


def update_without_old_logprobs(state: Ready, experience: Experience, objective: Objective) -> None:
    _trained, _history = update(state, experience, objective, Cut())  # expect: reportArgumentType


def train_after_the_batch_was_finished(
    state: RuntimeState[Asleep, Stale, OnDevice, OldLogProbs], minibatch: Minibatch, objective: Objective
) -> None:
    finished = finish_batch(state)
    _trained, _metrics = train_step(finished, minibatch, objective)  # expect: reportArgumentType


def old_logprobs_twice(state: Ready, rollouts: Rollouts) -> None:
    scored = compute_old_logprobs(state, rollouts)
    _scored = compute_old_logprobs(scored, rollouts)  # expect: reportArgumentType


def adopt_over_old_logprobs(state: Ready, rollouts: Rollouts) -> None:
    scored = compute_old_logprobs(state, rollouts)
    _scored = adopt_logprobs(scored, rollouts, source="engine")  # expect: reportArgumentType


def adopt_from_nowhere(state: Ready, rollouts: Rollouts) -> None:
    _scored = adopt_logprobs(state, rollouts, source="memory")  # expect: reportArgumentType


def finish_no_batch(state: Ready) -> None:
    _finished = finish_batch(state)  # expect: reportArgumentType


def train_on_an_uncut_experience(
    state: RuntimeState[Asleep, Stale, OnDevice, OldLogProbs], experience: Experience, objective: Objective
) -> None:
    _trained, _metrics = train_step(state, experience, objective)  # expect: reportArgumentType


# ---- placement ----


def reload_an_actor_that_is_there(state: Ready) -> None:
    _there = reload_actor(state)  # expect: reportArgumentType


def offload_an_actor_that_is_away(state: Ready) -> None:
    away = offload_actor(state)
    _away = offload_actor(away)  # expect: reportArgumentType


def offload_no_role(state: Ready) -> None:
    _away = offload(state, "actor_optimizer")  # expect: reportArgumentType


def reload_no_role(state: Ready) -> None:
    _there = reload(state, "critic")  # expect: reportArgumentType


# ---- results ----


def dropped_transition(state: Ready) -> None:
    sleep(state)  # expect: reportUnusedCallResult


def dropped_observation(state: Ready, prompts: Prompts, sampling: Sampling) -> None:
    generate(state, prompts, sampling)  # expect: reportUnusedCallResult


def dropped_composition(state: RuntimeState[Asleep, Stale, OnDevice, NoOld]) -> None:
    refresh(state)  # expect: reportUnusedCallResult


def dropped_state_of_a_pair(state: RuntimeState[Asleep, Stale, OnDevice, OldLogProbs], minibatch: Minibatch, objective: Objective) -> None:
    train_step(state, minibatch, objective)  # expect: reportUnusedCallResult


def pair_taken_for_a_state(state: RuntimeState[Asleep, Stale, OnDevice, OldLogProbs], minibatch: Minibatch, objective: Objective) -> None:
    trained = train_step(state, minibatch, objective)
    _finished = finish_batch(trained)  # expect: reportArgumentType


# ---- values ----


def state_that_contradicts_its_type(devices: Devices, roles: Roles, version: PolicyVersion) -> None:
    _state: Ready = RuntimeState(  # expect: reportAssignmentType
        engine=Asleep(),
        weights=Fresh(version),
        actor=OnDevice(),
        old=NoOld(),
        roles=roles,
        version=version,
        generation=0,
        devices=devices,
    )


def field_that_is_no_axis(devices: Devices, roles: Roles, version: PolicyVersion) -> None:
    _ = RuntimeState(
        engine=Fresh(version),  # expect: reportArgumentType
        weights=Fresh(version),
        actor=OnDevice(),
        old=NoOld(),
        roles=roles,
        version=version,
        generation=0,
        devices=devices,
    )


def state_of_a_raw_version(devices: Devices, roles: Roles) -> None:
    _ = RuntimeState(
        engine=Asleep(),
        weights=Stale(None),
        actor=OnDevice(),
        old=NoOld(),
        roles=roles,
        version=3,  # expect: reportArgumentType
        generation=0,
        devices=devices,
    )


def axes_in_the_wrong_order(state: RuntimeState[Fresh, Awake]) -> None:  # expect: reportInvalidTypeArguments
    _ = state


def result_that_is_not_what_was_promised(state: Ready) -> Ready:
    return sleep(state)  # expect: reportReturnType


def raw_version() -> Fresh:
    return Fresh(3)  # expect: reportArgumentType


def raw_role() -> Role:
    return "reference"  # expect: reportReturnType


def assigned_field(state: Ready) -> None:
    state.weights = Fresh(PolicyVersion(1))  # expect: reportAttributeAccessIssue


def role_for_an_actor(state: Ready) -> None:
    _away = offload_actor(state, ACTOR_OPTIMIZER)  # expect: reportCallIssue


# ---- models beside the Actor ----


def role_by_a_plain_name(state: Ready, rollouts: Rollouts) -> None:
    _state, _scores = use(state, "reference", lambda there: reference_logprobs(there, rollouts))  # expect: reportArgumentType


def score_by_a_plain_name(state: Ready, rollouts: Rollouts) -> None:
    _scores = model_rewards(state, rollouts, "kind")  # expect: reportArgumentType


def role_by_position(state: Ready, rollouts: Rollouts) -> None:
    _logprobs = reference_logprobs(state, rollouts, EMA)  # expect: reportCallIssue


def dropped_update_of_the_average(state: Ready) -> None:
    update_ema(state)  # expect: reportUnusedCallResult


def dropped_step_of_the_critic(state: Ready, minibatch: Minibatch, objective: ValueObjective) -> None:
    train_critic(state, minibatch, objective)  # expect: reportUnusedCallResult


def critic_by_the_actor_s_objective(state: Ready, minibatch: Minibatch, objective: Objective) -> None:
    _state, _metrics = train_critic(state, minibatch, objective)  # expect: reportArgumentType


def actor_by_the_critic_s_objective(
    state: RuntimeState[Asleep, Stale, OnDevice, OldLogProbs], minibatch: Minibatch, objective: ValueObjective
) -> None:
    _state, _metrics = train_step(state, minibatch, objective)  # expect: reportArgumentType


def use_taken_for_a_state(state: Ready, rollouts: Rollouts) -> Ready:
    return use(state, REFERENCE, lambda there: reference_logprobs(there, rollouts))  # expect: reportReturnType


def generate_while_a_role_is_used_asleep(state: RuntimeState[Asleep, Fresh, OnDevice, NoOld], prompts: Prompts, sampling: Sampling) -> None:
    _state, _rollouts = use(state, EMA, lambda there: generate(there, prompts, sampling))  # expect: reportArgumentType
