"""Compositions of steps, a few lines each: to be used, and to be read before writing your own.

They know nothing that a user's function could not know; none is a step.
"""

import dataclasses as dc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from rft.data.minibatches import Cut, minibatches
from rft.errors import BadInput, ConsumedState, IllegalStep, PeerFailed, ShapeError, TooFewGroups
from rft.experience import Experience, Prompts, Rollouts, assemble
from rft.ledger.admission import living
from rft.objectives import Objective
from rft.ops import groups
from rft.ops.parameters import require_function
from rft.rewards.scoring import RewardFunction, Rewards
from rft.sampling import Sampling
from rft.shapes import check_fields
from rft.state import A, Asleep, Awake, E, Fresh, NoOld, O, OldLogProbs, OnDevice, Role, RuntimeState, Stale, W, spelled
from rft.steps import Metrics, average, broadcast, finish_batch, generate, offload, reload, rewards, train_step, wake

T = TypeVar("T")


def refresh(state: RuntimeState[Asleep, Fresh | Stale, A, O], /) -> RuntimeState[Awake, Fresh, A, O]:
    """Broadcast, then wake: the engine generates from the current weights. An engine that is awake is refused before either."""
    if type(state) is RuntimeState and type(state.engine) is not Asleep:
        raise IllegalStep("refresh(state) is broadcast and wake, and the engine is awake; write instead: state = broadcast(state)")
    return wake(broadcast(state))


def use(
    state: RuntimeState[E, W, A, O], role: Role, observe: Callable[[RuntimeState[E, W, A, O]], T], /
) -> tuple[RuntimeState[E, W, A, O], T]:
    """Reloads a role, observes with it, and offloads it again.

        state, reference = use(state, REFERENCE, lambda s: reference_logprobs(s, rollouts))

    A role that is on the device already is refused, since it would not stay there: observe it directly. `observe` may only observe: a
    transition inside uses up the state that is to be offloaded. Where it raises, the role stays on the device, and
    `state = offload(living(state), role)` leads on.

    Raises `ConsumedState` where `observe` uses another state than the one that it is given, `IllegalStep` where it took a transition.
    """
    call = f"use(state, {spelled(role)}, observe)"
    require_function(call, "observe", observe, ("state",))
    there = reload(state, role)
    on = f"{spelled(role)} is on the device still: state = offload(living(state), {spelled(role)})"
    try:
        value = observe(there)
    except ConsumedState as error:
        only = "observe may only observe, and with the state that it is given: lambda there: reference_logprobs(there, …)"
        raise ConsumedState(f"{call}: {only}; {on}\n  inside it, {error}") from error
    if living(there) is not there:
        raise IllegalStep(f"{call}: observe took a transition, and may only observe; take it before or after `use`; {on}")
    return offload(there, role), value


@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Collected:
    """Rollouts and their rewards, row by row."""

    rollouts: Rollouts
    rewards: Rewards


def collect(
    state: RuntimeState[Awake, Fresh, A, O], prompts: Prompts, sampling: Sampling, reward: RewardFunction, /, *, draw: int = 0
) -> Collected:
    """Generate and score; the state lives on."""
    rollouts = generate(state, prompts, sampling, draw=draw)
    return Collected(rollouts=rollouts, rewards=rewards(state, rollouts, reward))


def teaches(collected: Collected) -> Bool[Tensor, "batch"]:
    """Rows of the groups whose rewards differ: the others have an advantage of 0, and nothing is to be learnt from them."""
    return ~groups.all_equal(collected.rewards.values, collected.rollouts.groups, collected.rewards.valid)


@dc.dataclass(frozen=True, kw_only=True)
class Wanted:
    """How much `collect_groups` brings together on each rank, and how long it tries."""

    groups: int
    """Groups that are kept."""
    bound: int
    """Batches of prompts that are tried at most."""
    at_bound: Literal["raise", "take"] = "raise"
    """With fewer groups after the last of them: raise `TooFewGroups`, or take those that there are (maybe none, and maybe not as many
    on each rank: cut no mini-batches from them by `size`)."""
    keep: Callable[[Collected], Bool[Tensor, "batch"]] = teaches
    """Which rows are kept; of a group all or none."""

    def __post_init__(self) -> None:
        check_fields(self, but=("at_bound",))
        if self.groups < 1 or self.bound < 1 or self.at_bound not in ("raise", "take"):
            raise BadInput(f"Wanted.groups and bound must be at least 1, at_bound 'raise' or 'take'; got {self}")


def collect_groups(
    state: RuntimeState[Awake, Fresh, A, O], batches: Iterator[Prompts], sampling: Sampling, reward: RewardFunction, wanted: Wanted, /
) -> Collected:
    """Dynamic sampling: generates for one batch of prompts after the other until every rank has enough groups that teach.

    The first `wanted.groups` of them are kept, in order, as rollouts of their own; what is left over goes, as it would be stale by the
    next step. The k-th batch is sampled with draw k, so a prompt that comes again gets other responses; once it is kept, it is not
    kept again. Collective: all ranks take equally many batches of prompts. Raises `TooFewGroups`, with the state living, and
    `BadInput` where `batches` ends too early or `wanted.keep` parts a group; what `keep` raises is raised here. `PeerFailed` on the other
    ranks then.

    Known as: verl `algorithm.filter_groups`; OpenRLHF `--dynamic_filtering`; LightRFT `--dynamic_sampling`.
    Source: Yu et al., DAPO, https://arxiv.org/abs/2503.14476
    """
    _require_iterator(batches)
    parts, missing = list[tuple[Collected, Int64[Tensor, "row"]]](), wanted.groups
    taken = torch.zeros(0, dtype=torch.int64)
    for attempt in range(wanted.bound):
        collected = collect(state, _next(state, batches), sampling, reward, draw=attempt)
        ids = collected.rollouts.groups
        kept, failure = _kept(wanted, collected)
        rows = _first_groups(ids, kept & ~torch.isin(ids, taken), missing)
        parts.append((collected, rows))
        taken = torch.cat([taken, ids[rows].unique()])
        missing = wanted.groups - len(taken)
        on_any_rank = average(state, {"missing": [missing], "failed": [failure is not None]})
        if failure is not None:
            raise failure
        if on_any_rank["failed"]:
            raise PeerFailed("collect_groups(state, …): Wanted.keep failed on another rank, whose own error says why")
        if not on_any_rank["missing"]:
            return _assembled(parts)
    if wanted.at_bound == "raise":
        raise TooFewGroups(
            f"collect_groups(state, …): after {wanted.bound} batches of prompts {missing} of {wanted.groups} groups are missing on this "
            "rank, others may miss more; raise the bound, take easier or harder prompts, or write at_bound='take'"
        )
    return _assembled(parts)


def _require_iterator(batches: object) -> None:
    """Raises `BadInput`: a list would begin anew at every call."""
    if not isinstance(batches, Iterator):
        what = type(batches).__name__
        raise BadInput(
            f"collect_groups(state, batches, …): batches must be an iterator, got {what}; write iter(batches), once before the loop"
        )


def _next(state: RuntimeState[Awake, Fresh, A, O], batches: Iterator[Prompts]) -> Prompts:
    """This rank's next batch. Raises `BadInput` where there is none, and `PeerFailed` on the other ranks then."""
    prompts = next(batches, None)
    ended = average(state, {"ended": [prompts is None]})["ended"]  # on any rank
    if prompts is None:
        raise BadInput("collect_groups(state, batches, …): there are no prompts left; give an iterator that goes on")
    if ended:
        raise PeerFailed("collect_groups(state, batches, …): another rank has no prompts left; give every rank an iterator that goes on")
    return prompts


def _kept(wanted: Wanted, collected: Collected) -> tuple[Bool[Tensor, "batch"], Exception | None]:
    """The rows that are kept; or none of them, and what `keep` raised or is wrong with what it gave."""
    try:
        return _whole_groups(wanted.keep(collected), collected.rollouts.groups), None
    except Exception as error:  # noqa: BLE001 (it is raised by `collect_groups`, once the other ranks know of it)
        return torch.zeros_like(collected.rollouts.groups, dtype=torch.bool), error


def _whole_groups(kept: Any, ids: Int64[Tensor, "batch"]) -> Bool[Tensor, "batch"]:
    if not isinstance(kept, Tensor) or kept.dtype != torch.bool or kept.shape != ids.shape:
        what = f"{tuple(kept.shape)} of {kept.dtype}" if isinstance(kept, Tensor) else f"a {type(kept).__name__}"
        raise ShapeError(f"Wanted.keep must give a tensor with a bool for each of the {len(ids)} rows, and gave {what}")
    if parted := sorted(set(ids[kept].tolist()) & set(ids[~kept].tolist())):
        raise BadInput(
            "Wanted.keep must keep all rows of a group or none, since their advantages are relative to each other; it parted group "
            f"{parted[0]}, {len(parted)} in all"
        )
    return kept


def _first_groups(ids: Int64[Tensor, "batch"], kept: Bool[Tensor, "batch"], count: int) -> Int64[Tensor, "row"]:
    """The kept rows of the first `count` groups that have any, in order."""
    first = list(dict.fromkeys(ids[kept].tolist()))[:count]
    return (kept & torch.isin(ids, torch.tensor(first, dtype=torch.int64))).nonzero()[:, 0]


def _assembled(parts: Sequence[tuple[Collected, Int64[Tensor, "row"]]]) -> Collected:
    rewards = [part.rewards for part, _ in parts]
    starts = itertools.accumulate((len(rows) for _, rows in parts), initial=0)
    new = [{old: start + place for place, old in enumerate(rows.tolist())} for (_, rows), start in zip(parts, starts, strict=False)]
    failures = [dc.replace(f, row=places[f.row]) for r, places in zip(rewards, new, strict=True) for f in r.failures if f.row in places]
    return Collected(
        rollouts=assemble(*((part.rollouts, rows) for part, rows in parts)),
        rewards=Rewards(
            values=torch.cat([part.rewards.values[rows] for part, rows in parts]),
            valid=torch.cat([part.rewards.valid[rows] for part, rows in parts]),
            failures=tuple(failures),
        ),
    )


def update(
    state: RuntimeState[E, Fresh | Stale, OnDevice, OldLogProbs], experience: Experience, objective: Objective, cut: Cut, /
) -> tuple[RuntimeState[E, Stale, OnDevice, NoOld], list[Metrics]]:
    """One `train_step` per mini-batch of `cut`, then `finish_batch`; the metrics of each step, in order."""
    first, *others = minibatches(experience, cut)
    trained, metrics = train_step(state, first, objective)
    history = [metrics]
    for minibatch in others:
        trained, metrics = train_step(trained, minibatch, objective)
        history.append(metrics)
    return finish_batch(trained), history


@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What `evaluate` saw: the mean reward and length over all ranks, and this rank's own rows."""

    reward: float
    length: float
    collected: Collected


def evaluate(state: RuntimeState[Awake, Fresh, A, O], prompts: Prompts, sampling: Sampling, reward: RewardFunction, /) -> Evaluation:
    """Mean reward by the same generation and reward path as training; trains on nothing and moves nothing."""
    collected = collect(state, prompts, sampling, reward)
    scored = collected.rewards
    means = average(state, {"reward": scored.values[scored.valid].tolist(), "length": collected.rollouts.sampled.sum(1).tolist()})
    return Evaluation(reward=means["reward"], length=means["length"], collected=collected)
