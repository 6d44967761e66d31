"""Every step: where it may be called, what it makes of the state, and one line that calls its effect.

Everything about legality stands in three modules: the records and their invariants in `state.py`, the living state and the
decorators in `ledger`, the steps here. What a step really does stands in `effects`, which knows no legality.

A transition uses its state up and returns the next: write `state = wake(state)`. An observation returns its value, and the state
lives on. Read a signature as a row of a table: `[Asleep, Fresh, A, O] -> [Awake, Fresh, A, O]` keeps the axes A and O as they are.
Print the table with `python -m rft.steps`.

Every step raises, and changes nothing: `IllegalStep` where the axes do not allow it, `ConsumedState` for a state that is not the
living one, `EnginePoisoned` or `RuntimePoisoned` after a failure, `RuntimeClosed` after `launch`, `RanksDiverged` where the ranks
are not all at this step. Only what comes beyond these stands in the docstrings below.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from jaxtyping import Float32
from torch import Tensor

from rft.effects import beside, checkpoint, exporting, launching, placement, rollout, scoring, sync, together, training
from rft.experience import Minibatch, Prompts, Rollouts
from rft.ledger import beginning, observation, recovery, restoration, transition
from rft.objectives import Objective, ValueObjective, supervised
from rft.rewards.scoring import RewardFunction, Rewards, score
from rft.sampling import Sampling
from rft.shapes import require_path
from rft.spec import LaunchSpec
from rft.state import (
    REFERENCE,
    A,
    Asleep,
    Awake,
    E,
    Fresh,
    NoOld,
    O,
    Offloaded,
    OldLogProbs,
    OnDevice,
    PolicyVersion,
    Role,
    RuntimeState,
    Stale,
    W,
    after_step,
    first_state,
    restored_state,
    then,
)

T = TypeVar("T")
Run = TypeVar("Run")
Metrics = dict[str, float]
"""Scalars of one optimizer step: `loss`, `grad_norm` (before the clip), `lr`, and what the objective reports."""


@beginning
def launch(spec: LaunchSpec) -> Generator[RuntimeState[Asleep, Stale, OnDevice, NoOld]]:
    """Opens the devices of a job: `with launch(spec) as state:`. Everything is given back however it is left.

    Process groups, then the engine (it is measured alone, and sleeps), then the Actor. Logs each rank's global, TP and DP rank and
    device. Raises `BadInput` for what cannot work, and `MissingEngine`; all ranks raise if one does.
    """
    with launching.opened(spec) as devices:
        yield first_state(devices, launching.roles(devices), managed=devices.trainer.managed)


# ---- the engine ----


@transition
def broadcast(state: RuntimeState[E, Fresh | Stale, A, O], /) -> RuntimeState[E, Fresh, A, O]:
    """Installs the Actor's weights in the engine, as a transaction; an offloaded Actor streams from the host.

    A sleeping engine's cache stays unmapped. Raises `DoesNotFit`, `SyncFailed`.
    """
    return then(state, state.engine, sync.broadcast(state), state.actor, state.old)


@transition
def wake(state: RuntimeState[Asleep, Fresh, A, O], /) -> RuntimeState[Awake, Fresh, A, O]:
    """Maps the engine's cache; never installs weights. Raises `DoesNotFit`, `EngineFailed`."""
    return then(state, placement.wake(state), state.weights, state.actor, state.old)


@transition
def sleep(state: RuntimeState[Awake, Fresh | Stale, A, O], /) -> RuntimeState[Asleep, Stale, A, O]:
    """Releases the engine's cache and weights: the cheapest sleep, since training makes the weights stale anyway. Raises `EngineFailed`."""
    return then(state, placement.sleep(state, "release"), Stale(None), state.actor, state.old)


@transition
def sleep_keeping(state: RuntimeState[Awake, W, A, O], /) -> RuntimeState[Asleep, W, A, O]:
    """Releases the cache and keeps the weights, on the device or on the host, as the engine can. Raises `EngineFailed`."""
    return then(state, placement.sleep(state, "keep"), state.weights, state.actor, state.old)


@recovery
def recover(state: RuntimeState[Any, Any, A, O], /) -> RuntimeState[Asleep, Stale, A, O]:
    """Leads on after an engine failure: give it the state last held. The engine is at rest then, and needs a broadcast.

    Without a failure it lets go of the weights that `sleep_keeping` kept. An engine that died is started anew by the broadcast after it.
    """
    return then(state, placement.recover(state), Stale(None), state.actor, state.old)


@observation
def generate(state: RuntimeState[Awake, Fresh, Any, Any], prompts: Prompts, sampling: Sampling, /, *, draw: int = 0) -> Rollouts:
    """Samples responses to this rank's prompts from the Actor's current weights.

    Each response has its own seed, from (run, epoch, prompt, `draw`, sample): the same on any rank and any number of ranks. Give
    another `draw` to sample the same prompts anew within an epoch. Raises `BadInput` for an empty or too long prompt, and for one that two
    ranks have in the same draw; `EngineFailed`.
    """
    return rollout.generate(state, prompts, sampling, draw)


@observation
def generate_stale(
    state: RuntimeState[Awake, Any, Any, Any], prompts: Prompts, sampling: Sampling, /, *, max_lag: int, draw: int = 0
) -> Rollouts:
    """Samples from weights up to `max_lag` versions old, for loops that skip broadcasts; the rollouts carry their version.

    Raises `TooStale`, and what `generate` raises.
    """
    rollout.check_lag(state, max_lag)
    return rollout.generate(state, prompts, sampling, draw)


# ---- placement of the Actor and of the other roles ----


@transition
def offload_actor(state: RuntimeState[E, W, OnDevice, O], /) -> RuntimeState[E, W, Offloaded, O]:
    """Moves the Actor's weights to the host, and what that frees back to the driver."""
    return then(state, state.engine, state.weights, placement.offload_actor(state), state.old)


@transition
def reload_actor(state: RuntimeState[E, W, Offloaded, O], /) -> RuntimeState[E, W, OnDevice, O]:
    """Moves the Actor's weights back to the device, bit-identical. Raises `DoesNotFit`."""
    return then(state, state.engine, state.weights, placement.reload_actor(state), state.old)


@transition
def offload(state: RuntimeState[E, W, A, O], role: Role, /) -> RuntimeState[E, W, A, O]:
    """Moves another role to the host. Raises `RoleError` where it is not there, or is on the host already."""
    return then(state, state.engine, state.weights, state.actor, state.old, roles=placement.offload(state, role))


@transition
def reload(state: RuntimeState[E, W, A, O], role: Role, /) -> RuntimeState[E, W, A, O]:
    """Moves another role back to the device. Raises `RoleError` as `offload` does, and `DoesNotFit`."""
    return then(state, state.engine, state.weights, state.actor, state.old, roles=placement.reload(state, role))


# ---- the batch in hand ----


@transition
def compute_old_logprobs(
    state: RuntimeState[E, W, OnDevice, NoOld], /, *rollouts: Rollouts, max_lag: int = 0
) -> RuntimeState[E, W, OnDevice, OldLogProbs]:
    """Scores the batch by the Actor as it is now; kept in the state, on the host, until `finish_batch`.

    log π_old(token t | before t), fp32, from logits / temperature. Raises `TooStale` where rollouts are more than `max_lag` versions
    behind the Actor, `WrongBatch` where one is given twice.
    """
    return then(state, state.engine, state.weights, state.actor, scoring.compute(state, rollouts, max_lag))


@transition
def adopt_logprobs(
    state: RuntimeState[E, W, OnDevice, NoOld], /, *rollouts: Rollouts, source: Literal["engine", "first_step"], max_lag: int = 0
) -> RuntimeState[E, W, OnDevice, OldLogProbs]:
    """Takes old log-probs without a forward pass. Raises as `compute_old_logprobs` does.

    `engine`: the sampled ones, as the engine gave them; the objective should correct for the two differing. `first_step`: those of
    the one `train_step` that follows, detached, so that its ratio is 1; a second step raises `WrongBatch`.
    """
    return then(state, state.engine, state.weights, state.actor, scoring.adopt(state, rollouts, source, max_lag))


@transition
def train_step(
    state: RuntimeState[E, Fresh | Stale, OnDevice, OldLogProbs], minibatch: Minibatch, objective: Objective, /
) -> tuple[RuntimeState[E, Stale, OnDevice, OldLogProbs], Metrics]:
    """One optimizer step of the Actor over the mini-batches of all ranks; the next version begins.

    Raises `WrongBatch` where the mini-batch is not of the batch in hand, `RoleError` where the optimizer is on the host,
    `NonFiniteGradient` (before anything is written), `BadInput`.
    """
    metrics = training.step("train_step(state, minibatch, objective)", state, minibatch, objective, state.old)
    engine, weights, version = state.engine, Stale(state.weights.version), PolicyVersion(state.version + 1)
    return then(state, engine, weights, state.actor, after_step(state.old), version=version), metrics


@transition
def supervised_step(
    state: RuntimeState[E, Fresh | Stale, OnDevice, O], minibatch: Minibatch, /
) -> tuple[RuntimeState[E, Stale, OnDevice, O], Metrics]:
    """One optimizer step of maximum likelihood on the tokens marked `sampled`; the next version begins. Raises as `train_step` does."""
    metrics = training.step("supervised_step(state, minibatch)", state, minibatch, supervised(), None)
    engine, weights, version = state.engine, Stale(state.weights.version), PolicyVersion(state.version + 1)
    return then(state, engine, weights, state.actor, state.old, version=version), metrics


@transition
def train_critic(
    state: RuntimeState[E, W, A, O], minibatch: Minibatch, objective: ValueObjective, /
) -> tuple[RuntimeState[E, W, A, O], Metrics]:
    """One optimizer step of the Critic towards the mini-batch's `returns`; Actor and engine are not touched, so it is also its warm-up.

    Raises `RoleError` where there is no Critic, or it or its optimizer is on the host, `NonFiniteGradient`, `BadInput`.
    """
    metrics = beside.train_critic(state, minibatch, objective)
    return then(state, state.engine, state.weights, state.actor, state.old), metrics


@transition
def update_ema(state: RuntimeState[E, W, A, O], /) -> RuntimeState[E, W, A, O]:
    """average <- decay · average + (1 - decay) · Actor, in the average's dtype. Raises `RoleError` where it is not on the device."""
    beside.update_ema(state)
    return then(state, state.engine, state.weights, state.actor, state.old)


@transition
def finish_batch(state: RuntimeState[E, W, A, OldLogProbs], /) -> RuntimeState[E, W, A, NoOld]:
    """Lets the batch's old log-probs go."""
    return then(state, state.engine, state.weights, state.actor, NoOld())


# ---- the models beside the Actor ----


@observation
def reference_logprobs(
    state: RuntimeState[Any, Any, Any, Any], rollouts: Rollouts, /, *, role: Role = REFERENCE
) -> Float32[Tensor, "batch seq"]:
    """log p of the sampled tokens by the frozen Reference (or the moving average, `role=EMA`), in fp32, at the temperature of sampling.

    0 where nothing was sampled. For `experience(…, reference=…)` and `ops.kl`. Raises `RoleError` where it is not there, or on the host.
    """
    return beside.reference_logprobs(state, rollouts, role)


@observation
def values(state: RuntimeState[Any, Any, Any, Any], rollouts: Rollouts, /) -> Float32[Tensor, "batch seq"]:
    """The Critic's value of the state that each sampled token was drawn in, in fp32; 0 elsewhere. For `ops.returns.gae`.

    Raises `RoleError` where there is no Critic, or it is on the host.
    """
    return beside.values(state, rollouts)


@observation
def model_rewards(state: RuntimeState[Any, Any, Any, Any], rollouts: Rollouts, role: Role, /) -> Rewards:
    """The score of each row by a local reward model, `role=reward_model(name)`.

    One that is not finite is a named failure of its row. Raises `RoleError` where it is not there, or on the host.
    """
    return beside.model_rewards(state, rollouts, role)


# ---- checkpoints ----


@observation
def save(state: RuntimeState[Any, Any, Any, NoOld], folder: Path | str, run: object, /, *, keep: int = 2) -> Path:
    """Writes the whole run as a checkpoint in `folder`: the runtime, and `run`, the loop's own values. Collective.

    Of the runtime: Actor, EMA and Critic with their optimizers and schedules, counters, every rank's random states. `run` is a tree of
    dataclasses, tuples, lists and dicts of tensors, int, float, bool, str and None (cursors, coefficients, running statistics), alike on
    all ranks. It is written aside and renamed, so a kill at any moment leaves what was there; then the newest `keep` stay. Raises
    `BadInput` with the path of what cannot be saved, and where ranks bring different arguments; `RoleError` where a backend must have a
    part on the device; `CheckpointFailed`.
    """
    return checkpoint.save(state, require_path("save(state, folder, run): folder", folder), run, keep)


@restoration
def restore(
    state: RuntimeState[Any, Any, Any, Any], folder: Path | str, run: Run, /
) -> tuple[RuntimeState[Asleep, Stale, OnDevice, NoOld], Run]:
    """Goes on from the newest whole checkpoint in `folder`, in a new launch or after any failure. Gives the loop's own values back, too.

    `run` is a tree like the saved one, which gives the classes of its records and the devices of its tensors. Any state of this launch may
    be given, a used-up one too; roles go where it has them. The number of ranks may be another, and the backend. Checkpoints that were cut
    off or damaged are passed over, and said. Raises `BadInput` where there is none, where `folder` is a checkpoint itself or not the same
    on all ranks, and for one of another model, with the names of the tensors that differ or the path of the value; `CheckpointFailed`
    where it cannot be read. Nothing has been touched then.
    """
    back = checkpoint.restore(state, require_path("restore(state, folder, run): folder", folder), run)
    return restored_state(state, back.actor, back.version, generation=back.generation), back.run


# ---- what needs no particular state ----


@observation
def rewards(
    state: RuntimeState[Any, Any, Any, Any],
    rollouts: Rollouts,
    reward: RewardFunction,
    /,
    *,
    deadline_s: float = 10.0,
    workers: int = 1,
) -> Rewards:
    """Scores each row by `reward`; one that raises, hangs or returns nonsense is a named failure of its row, never a silent 0."""
    del state  # a rule needs no device; the checks around this call are what it is for
    return score(rollouts, reward, deadline_s=deadline_s, workers=workers)


@observation
def average(state: RuntimeState[Any, Any, Any, Any], values: Mapping[str, Iterable[float]], /) -> Metrics:
    """Mean of each column over the entries of all ranks, which may bring different numbers of them; NaN for an empty column."""
    return together.average(state, values)


@observation
def all_rows(state: RuntimeState[Any, Any, Any, Any], /, *rows: Tensor) -> tuple[Tensor, ...]:
    """The rows of all ranks, in rank order, on every rank: for statistics of a whole batch.

    `rows` are tensors on the host, `[batch]` or `[batch, seq]` (padded on the right with zeros to the longest of all ranks). Raises
    `BadInput` for what are no such tensors, `ShapeError` where their rows or columns differ.
    """
    return together.all_rows(state, rows)


@observation
def over_ranks(state: RuntimeState[Any, Any, Any, Any], function: Callable[..., T], /, *rows: Tensor) -> T:
    """Applies a function of a whole batch to the rows of all ranks together, and gives this rank's rows of the result.

    For what is computed over a batch, such as `ops.advantages` and `ops.normalisation`: on any number of ranks it is what one rank
    would have computed. `function` gets by position what `all_rows` gives, and returns a tensor, or a record of tensors, with the same
    rows. Raises as `all_rows` does.
    """
    return together.over_ranks(state, function, rows)


@observation
def export(state: RuntimeState[Any, Any, Any, Any], path: Path | str, /, *, role: Role | None = None) -> Path:
    """Writes the Actor as an ordinary Hugging Face folder with its tokenizer, sharded weights gathered; rank 0 writes.

    With `role=EMA` or `role=REFERENCE` it is that model instead, on the host too. Raises `RoleError` for any other role, for one that the
    launch does not have, and for the Reference of an Actor with LoRA, which is `LaunchSpec.model` as it was; `BadInput` where it cannot
    be written, ranks name different folders, or anything but an earlier export lies there: that is replaced, and nothing else.
    """
    return exporting.export(state, require_path("export(state, path): path", path), role)


@observation
def export_adapter(state: RuntimeState[Any, Any, Any, Any], path: Path | str, /) -> Path:
    """Writes the adapter of an Actor with LoRA as a peft folder, which `PeftModel.from_pretrained` loads; rank 0 writes.

    Raises `BadInput` where the Actor has none, it cannot be written, or ranks name different folders.
    """
    return exporting.export_adapter(state, require_path("export_adapter(state, path): path", path))
