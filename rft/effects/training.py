"""Optimizer steps of the Actor."""

import dataclasses as dc
from typing import Any

from torch import Tensor

from rft.effects.budget import needed_to_train, require_room
from rft.effects.runtime import runtime_of
from rft.effects.scoring import join
from rft.errors import BadInput, NonFiniteGradient, RoleError, ShapeError
from rft.experience import Minibatch
from rft.objectives import OBJECTIVE, LossTerms, MicroBatch, Objective, TokenScores, Totals, check_terms
from rft.ops import corrections
from rft.ops.parameters import require_function
from rft.shapes import require_kind
from rft.state import ACTOR_OPTIMIZER, OldLogProbs, RuntimeState


def step(
    call: str,
    state: RuntimeState[Any, Any, Any, Any],
    minibatch: Minibatch,
    objective: Objective,
    old: OldLogProbs | None,
) -> dict[str, float]:
    """One optimizer step; beside the objective's metrics it reports how far the engine that sampled is from the trainer.

    What a trainer refuses on all ranks before it touches the optimizer, a gradient that is not finite too, leaves the state living.
    """
    runtime = runtime_of(state)
    with runtime.lockstep.agreement():
        _check(call, state, minibatch, objective)
        joined = None if old is None else join(call, old, minibatch)
        _check_numbers(call, minibatch, joined)
    require_room(call, state, needed_to_train(state, minibatch.mask))
    # Adopted from the engine, they say what the engine says; and after the first step the Actor is another one.
    compared = False
    if old is not None and not (old.source == "engine" and old.steps):
        objective, compared = _compared(objective, computed=old.source == "actor"), True
    with runtime.ledger.irreversible("runtime", but=(BadInput, NonFiniteGradient, RoleError, ShapeError)):
        metrics = runtime.trainer.step(minibatch, joined, objective)
    if compared and runtime.has_engine and old is not None and not old.lag:  # of older weights the engine rightly said something else
        gaps, after = (metrics["engine_gap"], metrics["engine_gap_max"]), runtime.sampled_after
        runtime.watch.see_rollouts(*gaps, after, state.version, runtime.engine.dtype, runtime.trainer.dtype)
    return metrics


def _compared(objective: Objective, *, computed: bool) -> Objective:
    """The objective, with those of `corrections.mismatch` beside its own metrics: of the old log-probs, if computed, else the new."""

    def both(scores: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
        terms = check_terms(objective(scores, micro, totals))
        trainer = micro.old if computed and micro.old is not None else scores.logprobs.detach()
        seen = corrections.mismatch(trainer, micro.rows.logprobs, micro.responses, totals)
        return dc.replace(terms, metrics={**seen, **terms.metrics})

    return both


def _check(call: str, state: RuntimeState[Any, Any, Any, Any], minibatch: object, objective: object) -> None:
    require_kind(call, "minibatch", minibatch, Minibatch)
    require_function(call, "objective", objective, OBJECTIVE)
    if state.roles.of(ACTOR_OPTIMIZER).where != "device":
        raise RoleError(f"{call}: the Actor's optimizer is on the host; write instead: state = reload(state, ACTOR_OPTIMIZER)")


def _check_numbers(call: str, minibatch: Minibatch, old: Tensor | None) -> None:
    """Raises `BadInput` for NaN or infinity at a sampled token: some would lose their gradient there, and nothing would show it."""
    mask = minibatch.sampled & ~minibatch.demonstrated[:, None]
    read = {"advantages": minibatch.advantages, "logprobs": minibatch.logprobs, "reference": minibatch.reference, "old log-probs": old}
    for name, values in read.items():
        if values is not None and not bool(values[mask].isfinite().all()):
            rows = (~values.isfinite() & mask).any(dim=1).nonzero()[:, 0].tolist()
            raise BadInput(
                f"{call}: {name} are not finite at sampled tokens of rows {rows[:8]}; mend what gave them, or leave the rows out"
            )
    if rows := (~minibatch.rewards.isfinite() & ~minibatch.demonstrated).nonzero()[:, 0].tolist():
        raise BadInput(f"{call}: the rewards of rows {rows[:8]} are not finite; mend what gave them, or leave the rows out")
