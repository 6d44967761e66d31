"""A runtime whose engine and trainer are scripted: real states and real steps over exact, instant devices."""

import dataclasses as dc
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from rft.effects.runtime import Runtime, runtime_of
from rft.engines.faults import Faults
from rft.engines.scripted import VOCABULARY, ScriptedEngine
from rft.experience import Minibatch, Prompts, Rollouts, experience, take
from rft.ledger import beginning
from rft.models import ModelFolder
from rft.parallel.lockstep import Lockstep
from rft.parallel.world import World
from rft.spec import LaunchSpec
from rft.state import ACTOR_OPTIMIZER, Asleep, NoOld, OnDevice, Placement, Roles, RuntimeState, Stale, first_state
from rft.trainers.scripted import ScriptedTrainer


@dc.dataclass(frozen=True)
class ScriptedDevices:
    """What lies behind a scripted state: look at it, and arm its faults."""

    engine: ScriptedEngine | None
    trainer: ScriptedTrainer
    faults: Faults


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
) -> Generator[RuntimeState[Asleep, Stale, OnDevice, NoOld]]:
    """Like `launch`, in no time: scripted devices of `device_bytes` each, and one rank without process groups unless given a `world`."""
    faults, world = Faults(), world or _alone()
    trainer = ScriptedTrainer(faults)
    runtime = Runtime(
        spec=LaunchSpec(model="scripted", engine=None, seed=seed, device_bytes=device_bytes, probe_every=probe_every),
        model=ModelFolder(Path("scripted"), None, _Tokenizer()),
        world=world,
        trainer=trainer,
        engine=ScriptedEngine(faults, keeps=keeps) if engine else None,
        lockstep=Lockstep(world, deadline_s),
    )
    yield first_state(runtime, Roles((Placement(ACTOR_OPTIMIZER, "device", trainer.bytes("optimizer")),)))


def scripted_devices(state: RuntimeState[Any, Any, Any, Any]) -> ScriptedDevices:
    """The scripted devices behind a state of `scripted_launch`."""
    runtime = runtime_of(state)
    trainer, engine = runtime.trainer, runtime.engine if runtime.has_engine else None
    assert isinstance(trainer, ScriptedTrainer)
    assert engine is None or isinstance(engine, ScriptedEngine)
    return ScriptedDevices(engine, trainer, trainer.faults)


def scripted_snapshot(state: RuntimeState[Any, Any, Any, Any]) -> object:
    """Everything on the scripted devices, by value: two that are equal say that nothing was touched in between."""
    devices = scripted_devices(state)
    engine, trainer = devices.engine, devices.trainer
    held = None if engine is None else (engine.awake, engine.mapped, _values(engine.weights or {}), dict(engine.prefixes))
    return held, _values(trainer.weights), trainer.moments.tolist(), dict(trainer.on_device)


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


def _values(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def _alone() -> World:
    cpu = torch.device("cpu")
    return World(rank=0, size=1, tp_rank=0, tp_size=1, dp_rank=0, dp_size=1, device=cpu, host=None, tp=None, dp=None)


class _Tokenizer:
    """Tokens are numbers; a text is the numbers of its characters."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % VOCABULARY for c in text]}

    def batch_decode(self, rows: Sequence[Sequence[int]], **_: Any) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]
