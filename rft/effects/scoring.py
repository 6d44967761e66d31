"""Old log-probs of the batch in hand, joined to mini-batches later by batch and row."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float32
from torch import Tensor
from torch.nn.functional import pad

from rft.effects.budget import needed_to_score, require_room
from rft.effects.runtime import runtime_of
from rft.errors import BadInput, TooStale, WrongBatch
from rft.experience import DEMONSTRATIONS, Minibatch, Rollouts
from rft.shapes import require_kind
from rft.state import BatchLogProbs, OldLogProbs, RuntimeState


def compute(state: RuntimeState[Any, Any, Any, Any], rollouts: Sequence[Rollouts], max_lag: int) -> OldLogProbs:
    """By a forward pass of the Actor, at the temperature that each was sampled at."""
    runtime = runtime_of(state)
    with runtime.lockstep.agreement():
        _check("compute_old_logprobs", state, rollouts, max_lag)
    require_room("compute_old_logprobs(state, *rollouts)", state, needed_to_score(state, *(r.mask for r in rollouts)))
    trainer = runtime.trainer
    values = [trainer.logprobs(r.tokens, r.mask, r.sampled, r.sampling.temperature or 1.0, r.images) for r in rollouts]
    batches = tuple(BatchLogProbs(batch=r.batch, values=each) for r, each in zip(rollouts, values, strict=True))
    return OldLogProbs(version=state.version, batches=batches, source="actor", lag=_lag(state, rollouts))


def adopt(
    state: RuntimeState[Any, Any, Any, Any], rollouts: Sequence[Rollouts], source: Literal["engine", "first_step"], max_lag: int
) -> OldLogProbs:
    """Without a forward pass: the sampled ones, or the new ones of the one step that is to come."""
    with runtime_of(state).lockstep.agreement():
        if source not in ("engine", "first_step"):
            raise BadInput(f"adopt_logprobs(state, …, source={source!r}): source must be 'engine' or 'first_step'")
        _check("adopt_logprobs", state, rollouts, max_lag)
    batches = tuple(BatchLogProbs(batch=r.batch, values=r.logprobs if source == "engine" else None) for r in rollouts)
    return OldLogProbs(version=state.version, batches=batches, source=source, lag=_lag(state, rollouts))


def join(call: str, old: OldLogProbs, minibatch: Minibatch) -> Float32[Tensor, "batch seq"] | None:
    """The old log-probs of a mini-batch's rows; None where they are the new ones. Raises `WrongBatch` for what is not of that batch."""
    if old.source == "first_step" and old.steps:
        raise WrongBatch(
            f"{call}: old log-probs adopted with source='first_step' stand for exactly one step, and it was taken; write instead: "
            "state = finish_batch(state), or use compute_old_logprobs for several steps on one batch"
        )
    known = {part.batch: part.values for part in old.batches}
    strangers = [batch for batch in minibatch.batches if batch not in known and batch != DEMONSTRATIONS]
    if strangers:
        raise WrongBatch(
            f"{call}: the mini-batch is of batch {', '.join(strangers)}, and the stored old log-probs are of {', '.join(known)}; "
            "write instead: state = finish_batch(state), then compute_old_logprobs(state, *rollouts) of the batch to train on"
        )
    return None if old.source == "first_step" else _joined(call, known, minibatch)


def _joined(call: str, known: dict[Any, Tensor | None], minibatch: Minibatch) -> Float32[Tensor, "batch seq"]:
    joined = torch.zeros(minibatch.tokens.shape)
    for index, batch in enumerate(minibatch.batches):
        if batch == DEMONSTRATIONS:
            continue
        values, here = known[batch], minibatch.origin == index
        assert values is not None
        width, rows = joined.shape[1], minibatch.rows[here]
        if strange := rows[rows >= len(values)].tolist():
            raise WrongBatch(
                f"{call}: the mini-batch has row {strange[0]} of batch {batch}, which has {len(values)} rows, counted from 0; take it from "
                "the experience of these rollouts, by `minibatches` or `take`"
            )
        joined[here] = pad(values, (0, max(width - values.shape[1], 0)))[rows, :width]
    return joined


def _lag(state: RuntimeState[Any, Any, Any, Any], rollouts: Sequence[Rollouts]) -> int:
    return max((state.version - r.version for r in rollouts if r.sampled.any()), default=0)  # nothing is stale of a rank without prompts


def _check(call: str, state: RuntimeState[Any, Any, Any, Any], rollouts: Sequence[Rollouts], max_lag: int) -> None:
    for r in rollouts:
        require_kind(f"{call}(state, *rollouts)", "each of rollouts", r, Rollouts)
    if not rollouts or type(max_lag) is not int or max_lag < 0:
        raise BadInput(f"{call}(state, *rollouts): needs at least one Rollouts and max_lag of at least 0; got {len(rollouts)}, {max_lag!r}")
    if len({r.batch for r in rollouts}) < len(rollouts):
        raise WrongBatch(f"{call}(state, *rollouts): the same batch was given twice: {', '.join(r.batch for r in rollouts)}")
    for r in rollouts:
        newest = int(r.versions[r.sampled].max()) if r.sampled.any() else 0
        if newest > state.version or runtime_of(state).lineage.is_of_another(r):
            raise WrongBatch(
                f"{call}(state, *rollouts): batch {r.batch} was sampled from version {newest} of other weights than this Actor has or had, "
                f"which is at version {state.version}: of another run, or of what a restore has taken back; sample anew"
            )
        if _lag(state, [r]) > max_lag:
            raise TooStale(
                f"{call}(state, *rollouts, max_lag={max_lag}): batch {r.batch} was sampled from version {r.version}, and the Actor is at "
                f"{state.version}; sample anew, or allow a larger max_lag (with a correction in the objective)"
            )
