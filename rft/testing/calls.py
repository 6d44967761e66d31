"""Steps as the walk calls them: with which arguments, and what must be refused beyond the axes."""

import dataclasses as dc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

import rft
from rft.checkpoint.folder import newest_checkpoint
from rft.effects.runtime import runtime_of
from rft.errors import BadInput, DoesNotFit, RftError, RoleError, TooStale, WrongBatch
from rft.experience import Rollouts
from rft.ledger import TABLE, Edge
from rft.objectives.compositions import critic_loss
from rft.sampling import Sampling
from rft.state import ACTOR_OPTIMIZER, CRITIC, CRITIC_OPTIMIZER, EMA, REFERENCE, OldLogProbs, OnDevice, Role, RuntimeState, reward_model
from rft.steps import restore, save
from rft.testing.scripted import scripted_devices, scripted_minibatch, scripted_prompts, scripted_roles

State = RuntimeState[Any, Any, Any, Any]
SAMPLING = Sampling(samples=2, max_new_tokens=3)
JUDGES = (reward_model("kind"), reward_model("brief"))
ROLES = (
    *(ACTOR_OPTIMIZER, ACTOR_OPTIMIZER, REFERENCE, EMA, EMA, CRITIC, CRITIC, CRITIC_OPTIMIZER, CRITIC_OPTIMIZER),
    *(*JUDGES, Role("actor"), Role("nobody")),
)
"""Those that a walk moves, and some that are none."""


class Stash(Protocol):
    """What a walk has gathered so far, for arguments to be taken from."""

    folder: Path
    """Where checkpoints go."""

    def rollouts(self, pick: int) -> Rollouts:
        """Some rollouts: those of an earlier `generate`, of this launch or another, or made by hand."""
        ...


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Refusals = set[type[RftError]]


def _none(stash: Stash, pick: int) -> Arguments:
    del stash, pick
    return (), {}


def _never(state: State, arguments: Arguments) -> Refusals:
    del state, arguments
    return set()


@dc.dataclass(frozen=True)
class Call:
    """A step, how to make its arguments from a stash and a number, and which errors a legal state may still get, and must."""

    step: Callable[..., Any]
    arguments: Callable[[Stash, int], Arguments] = _none
    refusals: Callable[[State, Arguments], Refusals] = _never

    @property
    def edge(self) -> Edge:
        """The step's row in the table."""
        return TABLE[self.step.__module__, self.step.__name__]


def _prompts(stash: Stash, pick: int) -> Arguments:
    del stash
    return (scripted_prompts(1 + pick % 2, epoch=pick % 3), SAMPLING), {"draw": pick % 2}


def _prompts_and_lag(stash: Stash, pick: int) -> Arguments:
    positional, named = _prompts(stash, pick)
    return positional, {**named, "max_lag": (0, 2, 4)[pick % 3]}


def _one_batch(stash: Stash, pick: int) -> Arguments:
    return (stash.rollouts(pick),), {"max_lag": (0, 2)[pick % 2]}


def _adopted(stash: Stash, pick: int) -> Arguments:
    positional, named = _one_batch(stash, pick)
    return positional, {**named, "source": ("engine", "first_step")[pick % 2]}


def _minibatch(stash: Stash, pick: int) -> Arguments:
    return (scripted_minibatch(stash.rollouts(pick)),), {}


def _minibatch_and_objective(stash: Stash, pick: int) -> Arguments:
    return (*_minibatch(stash, pick)[0], rft.grpo()), {}


def _a_run(stash: Stash, pick: int) -> Arguments:
    return (stash.folder, {"pick": pick, "coefficient": torch.tensor(float(pick))}), {}


def _role(stash: Stash, pick: int) -> Arguments:
    del stash
    return (ROLES[pick % len(ROLES)],), {}


def _batch_for(*roles: Role) -> Callable[[Stash, int], Arguments]:
    def arguments(stash: Stash, pick: int) -> Arguments:
        return (stash.rollouts(pick), roles[pick % len(roles)]), {}

    return arguments


def _frozen(stash: Stash, pick: int) -> Arguments:
    (rollouts, role), _ = _batch_for(REFERENCE, EMA, REFERENCE, EMA, CRITIC)(stash, pick)
    return (rollouts,), {"role": role}


def _some_rollouts(stash: Stash, pick: int) -> Arguments:
    return (stash.rollouts(pick),), {}


def _values_to_learn(stash: Stash, pick: int) -> Arguments:
    (minibatch,), _ = _minibatch(stash, pick)
    return (dc.replace(minibatch, returns=minibatch.advantages), critic_loss()), {}


def _behind_engine(state: State, arguments: Arguments) -> Refusals:
    held = state.weights.version
    return {TooStale} if held is None or state.version - held > arguments[1]["max_lag"] else set()


def _behind_rollouts(state: State, arguments: Arguments) -> Refusals:
    (rollouts,), named = arguments
    if int(rollouts.versions.max()) > state.version:
        return {WrongBatch}
    return {TooStale} if state.version - rollouts.version > named["max_lag"] else set()


def _elsewhere(where: str) -> Callable[[State, Arguments], Refusals]:
    def refusals(state: State, arguments: Arguments) -> Refusals:
        (role,), _ = arguments
        known = {p.role: p.where for p in state.roles.placements}
        return set() if known.get(role) == where else {RoleError}

    return refusals


def _optimizer_away(state: State, arguments: Arguments) -> Refusals:
    del arguments
    return _elsewhere("device")(state, ((ACTOR_OPTIMIZER,), {}))


def _nothing_saved(state: State, arguments: Arguments) -> Refusals:
    del state
    return {BadInput} if newest_checkpoint(arguments[0][0]) is None else set()


def _away(state: State, *roles: Role) -> Refusals:
    """`RoleError`, where one of some roles is not there, or on the host, or computed by an Actor that is."""
    placed = {p.role: p.where for p in state.roles.placements}
    by_actor = runtime_of(state).beside.by_actor
    here = [placed.get(role) == "device" and (role not in by_actor or type(state.actor) is OnDevice) for role in roles]
    return set() if all(here) else {RoleError}


def _no_frozen(state: State, arguments: Arguments) -> Refusals:
    role = arguments[1]["role"]
    return _away(state, role) if role in (REFERENCE, EMA) else {RoleError}


def _no_judge(state: State, arguments: Arguments) -> Refusals:
    role = arguments[0][1]
    return _away(state, role) if role in JUDGES else {RoleError}


def _needs(*roles: Role) -> Callable[[State, Arguments], Refusals]:
    def refusals(state: State, arguments: Arguments) -> Refusals:
        del arguments
        return _away(state, *roles)

    return refusals


def _in_the_way(state: State, adding: int) -> Refusals:
    """`DoesNotFit`, where `adding` bytes are too many for the scripted device; its parts are added up here independently."""
    engine, trainer = scripted_devices(state).engine, scripted_devices(state).trainer
    used = trainer.sizes["model"] * trainer.on_device["model"]
    used += sum(runtime_of(state).movable[role].bytes for role, there in scripted_roles(state).items() if there)
    if engine is not None:
        used += engine.sizes[0] * engine.mapped + engine.sizes[1] * engine.awake
    limit = runtime_of(state).spec.device_bytes
    return {DoesNotFit} if limit is not None and used + adding > limit else set()


def _no_room_to_send(state: State, arguments: Arguments) -> Refusals:
    del arguments
    engine, largest = scripted_devices(state).engine, max(tensor.nbytes for tensor in scripted_devices(state).trainer.weights.values())
    return _in_the_way(state, largest + (0 if engine is None or engine.mapped else engine.sizes[0]))


def _no_room_to_wake(state: State, arguments: Arguments) -> Refusals:
    del arguments
    engine = scripted_devices(state).engine
    return set() if engine is None else _in_the_way(state, engine.sizes[1] + (0 if engine.mapped else engine.sizes[0]))


def _no_room_for_the_actor(state: State, arguments: Arguments) -> Refusals:
    del arguments
    return _in_the_way(state, scripted_devices(state).trainer.sizes["model"])


def _not_to_be_offloaded(state: State, arguments: Arguments) -> Refusals:
    return _elsewhere("device")(state, arguments) or _is_not_moved(state, arguments[0][0])


def _not_to_be_reloaded(state: State, arguments: Arguments) -> Refusals:
    (role,), _ = arguments
    return (
        _elsewhere("host")(state, arguments)
        or _is_not_moved(state, role)
        or ({RoleError} if role in JUDGES and any(scripted_roles(state)[other] for other in JUDGES) else set())
        or _in_the_way(state, runtime_of(state).movable[role].bytes)
    )


def _is_not_moved(state: State, role: Role) -> Refusals:
    """What the Actor computes without memory of its own stays where it is."""
    return set() if role in scripted_roles(state) else {RoleError}


def _other_batch(state: State, arguments: Arguments) -> Refusals:
    old, (minibatch, _) = state.old, arguments[0]
    if not isinstance(old, OldLogProbs):
        return set()
    known = {part.batch for part in old.batches}
    spent = old.source == "first_step" and old.steps > 0
    wrong = spent or not set(minibatch.batches) <= known
    return ({WrongBatch} if wrong else set()) | _optimizer_away(state, arguments)


LIBRARY: tuple[Call, ...] = (
    Call(rft.broadcast, refusals=_no_room_to_send),
    Call(rft.wake, refusals=_no_room_to_wake),
    Call(rft.sleep),
    Call(rft.sleep_keeping),
    Call(rft.recover),
    Call(rft.generate, _prompts),
    Call(rft.generate_stale, _prompts_and_lag, _behind_engine),
    Call(rft.offload_actor),
    Call(rft.reload_actor, refusals=_no_room_for_the_actor),
    Call(rft.offload, _role, _not_to_be_offloaded),
    Call(rft.reload, _role, _not_to_be_reloaded),
    Call(rft.compute_old_logprobs, _one_batch, _behind_rollouts),
    Call(rft.adopt_logprobs, _adopted, _behind_rollouts),
    Call(rft.train_step, _minibatch_and_objective, _other_batch),
    Call(rft.supervised_step, _minibatch, _optimizer_away),
    Call(rft.finish_batch),
    Call(rft.reference_logprobs, _frozen, _no_frozen),
    Call(rft.model_rewards, _batch_for(*JUDGES, *JUDGES, REFERENCE), _no_judge),
    Call(rft.values, _some_rollouts, _needs(CRITIC)),
    Call(rft.train_critic, _values_to_learn, _needs(CRITIC, CRITIC_OPTIMIZER)),
    Call(rft.update_ema, refusals=_needs(EMA)),
    Call(save, _a_run, _optimizer_away),
    Call(restore, _a_run, _nothing_saved),
)
"""The library's steps that a walk takes: all transitions, and the observations that touch the devices."""
