"""The models beside the Actor: the Reference, the Critic, local reward models, a moving average of the Actor. Built once, moved, asked.

Each is a role of the state, with a placement and a size. What a role computes, and on which rank it lies, is the trainers' matter.
"""

from typing import Any

from jaxtyping import Float32
from torch import Tensor

from rft.effects.budget import needed_to_score, needed_to_train, require_room
from rft.effects.runtime import runtime_of
from rft.errors import BadInput, NonFiniteGradient, RoleError, ShapeError
from rft.experience import Minibatch, Rollouts
from rft.objectives import VALUE_OBJECTIVE, ValueObjective
from rft.ops.parameters import require_function
from rft.rewards.scoring import Rewards, given
from rft.shapes import require_kind
from rft.state import CRITIC, CRITIC_OPTIMIZER, EMA, REFERENCE, OnDevice, Role, RuntimeState, spelled

State = RuntimeState[Any, Any, Any, Any]


def reference_logprobs(state: State, rollouts: Rollouts, role: Role) -> Float32[Tensor, "batch seq"]:
    """log p of the sampled tokens by a frozen model of the Actor's kind."""
    call = f"reference_logprobs(state, rollouts, role={spelled(role)})"
    runtime = runtime_of(state)
    with runtime.lockstep.agreement():
        require_kind(call, "rollouts", rollouts, Rollouts)
        if role not in (REFERENCE, EMA):
            raise RoleError(f"{call}: only REFERENCE and EMA give log-probs of rollouts")
        require_here(call, state, role)
    require_room(call, state, needed_to_score(state, rollouts.mask, role=role))
    model = runtime.beside.frozen[role]
    return model.logprobs(rollouts.tokens, rollouts.mask, rollouts.sampled, rollouts.sampling.temperature or 1.0, rollouts.images)


def values(state: State, rollouts: Rollouts) -> Float32[Tensor, "batch seq"]:
    """The Critic's value of the state that each sampled token was drawn in."""
    call, runtime = "values(state, rollouts)", runtime_of(state)
    with runtime.lockstep.agreement():
        require_kind(call, "rollouts", rollouts, Rollouts)
        require_here(call, state, CRITIC)
    require_room(call, state, needed_to_score(state, rollouts.mask, role=CRITIC))
    return runtime.beside.own_critic.values(rollouts.tokens, rollouts.mask, rollouts.sampled)


def model_rewards(state: State, rollouts: Rollouts, role: Role) -> Rewards:
    """One score per row by a local reward model."""
    call = f"model_rewards(state, rollouts, {spelled(role)})"
    runtime = runtime_of(state)
    with runtime.lockstep.agreement():
        require_kind(call, "rollouts", rollouts, Rollouts)
        require_here(call, state, role)
        if role not in runtime.beside.judges:
            raise RoleError(f"{call}: this role is no reward model; write reward_model(name), with a name of LaunchSpec.reward_models")
    require_room(call, state, needed_to_score(state, rollouts.mask, role=role))
    return given(runtime.beside.judges[role].scores(rollouts))


def train_critic(state: State, minibatch: Minibatch, objective: ValueObjective) -> dict[str, float]:
    """One optimizer step of the Critic; what is refused on all ranks before its optimizer moves leaves the state living."""
    call = "train_critic(state, minibatch, objective)"
    runtime = runtime_of(state)
    with runtime.lockstep.agreement():
        require_here(call, state, CRITIC, observing=False)
        require_here(call, state, CRITIC_OPTIMIZER, observing=False)
        require_kind(call, "minibatch", minibatch, Minibatch)
        _check(call, minibatch, objective)
    require_room(call, state, needed_to_train(state, minibatch.mask, role=CRITIC))
    with runtime.ledger.irreversible("runtime", but=(BadInput, NonFiniteGradient, RoleError, ShapeError)):
        return runtime.beside.own_critic.step(minibatch, objective)


def update_ema(state: State) -> None:
    """average <- decay · average + (1 - decay) · Actor."""
    runtime = runtime_of(state)
    with runtime.lockstep.agreement():
        require_here("update_ema(state)", state, EMA, observing=False)
    spec = runtime.spec.ema
    assert spec is not None
    with runtime.ledger.irreversible("runtime"):
        runtime.beside.frozen[EMA].mix(runtime.trainer.stream_weights(), 1 - spec.decay)


def require_here(call: str, state: State, role: Role, *, observing: bool = True) -> None:
    """Raises `RoleError` where `role` is not there, or not on the device; so it does where it is part of an Actor that is away.

    Only what observes is told of `use`, which refuses transitions.
    """
    name = spelled(role)
    if state.roles.of(role).where != "device":
        instead = f"state = reload(state, {name})" + (", or `use`" if observing else "")
        raise RoleError(f"{call}: {name} is on the host; write instead: {instead}")
    if role in runtime_of(state).beside.by_actor and type(state.actor) is not OnDevice:
        raise RoleError(f"{call}: {name} is computed by the Actor, which is offloaded; write before it: state = reload_actor(state)")


def _check(call: str, minibatch: Minibatch, objective: object) -> None:
    """Raises `BadInput` for returns that are missing, or not finite at a sampled token; and for what is no objective."""
    require_function(call, "objective", objective, VALUE_OBJECTIVE)
    read = {"returns": minibatch.returns, "values": minibatch.values}
    for name, column in read.items():
        if column is None and name == "returns":
            raise BadInput(f"{call}: the mini-batch has no returns; write experience(rollouts, rewards, advantages, returns=…, values=…)")
        if column is not None and not bool(column[minibatch.sampled].isfinite().all()):
            raise BadInput(f"{call}: {name} are not finite at sampled tokens; mend what gave them, or leave the rows out")
