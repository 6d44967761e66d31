"""A runtime whose engine and trainer are scripted: real states and real steps over exact, instant devices."""

import dataclasses as dc
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from rft.effects.launching import roles
from rft.effects.runtime import Beside, Runtime, runtime_of
from rft.engines.faults import Faults
from rft.engines.scripted import VOCABULARY, ScriptedEngine
from rft.experience import Minibatch, Prompts, Rollouts, experience, take
from rft.ledger import beginning
from rft.models import ModelFolder
from rft.parallel.lockstep import Lockstep
from rft.parallel.world import World
from rft.spec import Critic, LaunchSpec, MovingAverage, Reference, RewardModel, SharedCritic
from rft.state import (
    ACTOR_OPTIMIZER,
    CRITIC,
    CRITIC_OPTIMIZER,
    EMA,
    REFERENCE,
    Asleep,
    NoOld,
    OnDevice,
    Role,
    RuntimeState,
    Stale,
    first_state,
    reward_model,
)
from rft.trainers.scripted import ScriptedTrainer
from rft.trainers.scripted_roles import ScriptedCritic, ScriptedFrozen, ScriptedJudge, ScriptedRole


@dc.dataclass(frozen=True)
class ScriptedDevices:
    """What lies behind a scripted state: look at it, and arm its faults."""

    engine: ScriptedEngine | None
    trainer: ScriptedTrainer
    faults: Faults
    beside: Beside


Company = Literal["own", "by actor"]
"""Who is beside a scripted Actor: a Reference, a moving average (decay 0.25), a Critic, and reward models called "kind" and "brief".

own: each is a model of its own, on the host after launch. by actor: so are all but Reference and Critic, which the Actor computes.
"""


@beginning
def scripted_launch(
    *,
    engine: bool = True,
    keeps: Literal["device", "host"] | None = "device",
    device_bytes: int = 1 << 20,
    probe_every: int = 1,
    seed: int = 0,
    world: World | None = None,
    deadline_s: float = 60.0,
    beside: Company | None = None,
) -> Generator[RuntimeState[Asleep, Stale, OnDevice, NoOld]]:
    """Like `launch`, in no time: scripted devices of `device_bytes` each, and one rank without process groups unless given a `world`."""
    faults, world = Faults(), world or alone()
    runtime = Runtime(
        spec=LaunchSpec(model="scripted", engine=None, seed=seed, device_bytes=device_bytes, probe_every=probe_every, **_asked_for(beside)),
        model=ModelFolder(Path("scripted"), None, Numbers()),
        world=world,
        trainer=ScriptedTrainer(faults),
        engine=ScriptedEngine(faults, keeps=keeps) if engine else None,
        lockstep=Lockstep(world, deadline_s),
        beside=Beside() if beside is None else _beside(faults, beside),
    )
    yield first_state(runtime, roles(runtime))


def scripted_devices(state: RuntimeState[Any, Any, Any, Any]) -> ScriptedDevices:
    """The scripted devices behind a state of `scripted_launch`."""
    runtime = runtime_of(state)
    trainer, engine = runtime.trainer, runtime.engine if runtime.has_engine else None
    assert isinstance(trainer, ScriptedTrainer)
    assert engine is None or isinstance(engine, ScriptedEngine)
    return ScriptedDevices(engine, trainer, trainer.faults, runtime.beside)


def scripted_snapshot(state: RuntimeState[Any, Any, Any, Any]) -> object:
    """Everything on the scripted devices, by value: two that are equal say that nothing was touched in between."""
    devices = scripted_devices(state)
    engine, trainer = devices.engine, devices.trainer
    held = None if engine is None else (engine.awake, engine.mapped, _values(engine.weights or {}), dict(engine.prefixes))
    return held, _values(trainer.weights), trainer.moments.tolist(), dict(trainer.on_device), scripted_roles(state), _learnt(devices.beside)


def scripted_roles(state: RuntimeState[Any, Any, Any, Any]) -> dict[Role, bool]:
    """Whether each role is really on the scripted device, those apart that have no memory of their own."""
    devices = scripted_devices(state)
    beside, found = devices.beside, {ACTOR_OPTIMIZER: devices.trainer.on_device["optimizer"]}
    for role, model in [*beside.frozen.items(), *beside.judges.items()]:
        assert isinstance(model, ScriptedRole)
        found |= {role: model.on_device} if model.bytes else {}
    if beside.critic is not None:
        parts = _critic(beside).parts
        found |= {CRITIC: parts["model"].on_device, CRITIC_OPTIMIZER: parts["optimizer"].on_device}
    return found


def scripted_average(state: RuntimeState[Any, Any, Any, Any]) -> ScriptedFrozen:
    """The moving average behind a state of `scripted_launch`."""
    average = scripted_devices(state).beside.frozen[EMA]
    assert isinstance(average, ScriptedFrozen)
    return average


def scripted_prompts(count: int = 2, *, epoch: int = 0) -> Prompts:
    """`count` prompts of growing length."""
    width = count + 1
    lengths = torch.arange(2, width + 1)
    mask = torch.arange(width)[None, :] < lengths[:, None]
    tokens = torch.where(mask, torch.arange(1, width + 1)[None, :] % VOCABULARY, 0)
    names = tuple(f"question {i}" for i in range(count))
    return Prompts(tokens=tokens, mask=mask, ids=torch.arange(count), epoch=epoch, texts=names, answers=names)


def scripted_minibatch(rollouts: Rollouts) -> Minibatch:
    """All rows of `rollouts`, with a reward and an advantage of 1 each."""
    ones = torch.ones(len(rollouts))
    return take(experience(rollouts, ones, torch.ones(rollouts.tokens.shape) * rollouts.sampled), torch.arange(len(rollouts)))


def _asked_for(company: Company | None) -> dict[str, Any]:
    """What a launch would have been told of them."""
    if company is None:
        return {}
    judges = {"kind": RewardModel(model="kind"), "brief": RewardModel(model="brief")}
    critic = Critic() if company == "own" else SharedCritic()
    return {"reference": Reference(), "ema": MovingAverage(decay=0.25), "critic": critic, "reward_models": judges}


def _beside(faults: Faults, company: Company) -> Beside:
    own = company == "own"
    made = Beside(
        frozen={REFERENCE: ScriptedFrozen(faults, 64 * own), EMA: ScriptedFrozen(faults)},
        judges={reward_model("kind"): ScriptedJudge(faults), reward_model("brief"): ScriptedJudge(faults)},
        critic=ScriptedCritic(faults),
        by_actor=frozenset() if own else frozenset({REFERENCE, CRITIC}),
    )
    for role, model in [*made.frozen.items(), *made.judges.items()]:
        if role not in made.by_actor:
            model.offload()
    if own:
        made.own_critic.offload("model")
        made.own_critic.offload("optimizer")
    return made


def _critic(beside: Beside) -> ScriptedCritic:
    assert isinstance(beside.critic, ScriptedCritic)
    return beside.critic


def _learnt(beside: Beside) -> object:
    average = beside.frozen.get(EMA)
    weights = _values(average.weights) if isinstance(average, ScriptedFrozen) else None
    return weights, None if beside.critic is None else _critic(beside).steps.item()


def _values(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def alone() -> World:
    """One rank without process groups."""
    cpu = torch.device("cpu")
    return World(rank=0, size=1, tp_rank=0, tp_size=1, dp_rank=0, dp_size=1, device=cpu, host=None, tp=None, dp=None)


class Numbers:
    """Tokens are numbers; a text is the numbers of its characters."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % VOCABULARY for c in text]}

    all_special_ids = ()

    def __len__(self) -> int:
        return VOCABULARY

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, tokens))

    def batch_decode(self, rows: Sequence[Sequence[int]], **_: Any) -> list[str]:
        return [self.decode(row) for row in rows]
