"""What really changes, behind the opaque handle of a state. Effects take it out of the state; nobody else does."""

import contextlib
import dataclasses as dc
import secrets
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rft.effects.lineage import Lineage
from rft.effects.watch import Watch
from rft.engines.protocol import Engine
from rft.ledger import Ledger
from rft.models import ModelFolder
from rft.narrow import Narrows
from rft.parallel.lockstep import Lockstep
from rft.parallel.world import World
from rft.spec import LaunchSpec
from rft.state import ACTOR_OPTIMIZER, CRITIC, CRITIC_OPTIMIZER, EMA, Devices, Role, RuntimeState
from rft.telemetry.trace import Trace
from rft.trainers.protocol import Adapted, Critic, Frozen, Judge, Movable, Part, Trainer


@dc.dataclass(frozen=True, kw_only=True)
class Beside:
    """The models beside the Actor, by role."""

    frozen: Mapping[Role, Frozen] = dc.field(default_factory=dict)
    """The Reference, and the moving average."""
    judges: Mapping[Role, Judge] = dc.field(default_factory=dict)
    """Local reward models."""
    critic: Critic | None = None
    by_actor: frozenset[Role] = frozenset()
    """Roles that the Actor computes with: they are of use only while it is on the device, and those of them that are all Actor take
    no memory of their own and are not moved."""

    @property
    def own_critic(self) -> Critic:
        """The Critic; whether there is one, the state's roles say."""
        assert self.critic is not None
        return self.critic


OF_ENGINE = ("broadcast", "wake", "sleep", "sleep_keeping", "recover")
"""Transitions of the engine."""


class Runtime(Devices):
    """The devices of one launch: this rank's models, its engine, and its connections to the other ranks."""

    def __init__(
        self,
        *,
        spec: LaunchSpec,
        model: ModelFolder,
        world: World,
        trainer: Trainer,
        engine: Engine | None,
        lockstep: Lockstep,
        beside: Beside = Beside(),
        narrows: Sequence[Narrows] = (),
    ) -> None:
        self.ledger = Ledger()
        self.cannot = _cannot(engine, trainer)
        self.spec, self.model, self.world, self.trainer, self.lockstep, self.beside = spec, model, world, trainer, lockstep, beside
        self.narrows = narrows
        """What the engine of every rank takes of the Actor's tensors."""
        self.lacking = _lacking(trainer, beside)
        self.movable = _movable(trainer, beside)
        self._engine = engine
        self.trace = Trace()
        self.watch = Watch(spec.probe_every, model)
        self.lineage = Lineage(world.rank, lockstep.gather(secrets.token_hex(4))[0])
        self.damaged = set[Path]()
        """Checkpoints whose content a restore found to be another than was written."""
        self.of_engine, self.sampled_after = "launch", "launch"
        """The engine's last transition, and its last one before the last rollouts."""

    @property
    def engine(self) -> Engine:
        """The rollout engine; steps that need one are refused before they get here, where there is none."""
        assert self._engine is not None
        return self._engine

    @property
    def has_engine(self) -> bool:
        """Whether this launch has a rollout engine."""
        return self._engine is not None

    def enter(self, step: str, chosen: str, generation: int) -> None:
        self.of_engine = step if step in OF_ENGINE else self.of_engine
        self.trace.begin(step)
        self._handled = sys.exception()
        try:
            self.lockstep.meet(step + chosen, generation)
        except BaseException:
            self.trace.end(step)
            raise

    def leave(self, step: str) -> None:
        self.trace.end(step)
        error = sys.exception()  # the step's own, or one that the caller handles by taking the step
        self.lockstep.leave(None if error is self._handled else error)

    @contextlib.contextmanager
    def engine_effect(self) -> Generator[None]:
        """Marks the irreversible part of an engine's effect; at its end all ranks agree whether it went well on each of them."""
        with self.ledger.irreversible("engine"), self.lockstep.agreement():
            yield


def runtime_of(state: RuntimeState[Any, Any, Any, Any]) -> Runtime:
    """The devices behind a state."""
    assert isinstance(state.devices, Runtime)
    return state.devices


@dc.dataclass(frozen=True)
class _Part:
    """One part of a trainer, as what is moved as a whole."""

    trainer: Trainer | Critic
    part: Part

    def offload(self) -> None:
        self.trainer.offload(self.part)

    def reload(self) -> None:
        self.trainer.reload(self.part)

    @property
    def bytes(self) -> int:
        return self.trainer.bytes(self.part)


def _movable(trainer: Trainer, beside: Beside) -> dict[Role, Movable]:
    """Every role, as what `offload` and `reload` move."""
    found: dict[Role, Movable] = {ACTOR_OPTIMIZER: _Part(trainer, "optimizer"), **beside.frozen, **beside.judges}
    if beside.critic is not None:
        found |= {CRITIC: _Part(beside.critic, "model"), CRITIC_OPTIMIZER: _Part(beside.critic, "optimizer")}
    return found


def _lacking(trainer: Trainer, beside: Beside) -> frozenset[str]:
    """Steps whose model was not asked for at launch."""
    there = {
        "reference_logprobs": bool(beside.frozen),
        "update_ema": EMA in beside.frozen,
        "values": beside.critic is not None,
        "train_critic": beside.critic is not None,
        "model_rewards": bool(beside.judges),
        "export_adapter": isinstance(trainer, Adapted),
    }
    return frozenset(step for step, has in there.items() if not has)


def _cannot(engine: Engine | None, trainer: Trainer) -> dict[str, str]:
    why: dict[str, str] = {}
    if engine is None:
        steps = (*OF_ENGINE, "generate", "generate_stale")
        why = dict.fromkeys(steps, "this launch has no rollout engine; give LaunchSpec an engine, or train with supervised_step")
    elif engine.keeps is None:
        why = {"sleep_keeping": f"the engine {engine.name} cannot keep its weights while its cache is unmapped; use sleep"}
    if trainer.managed and not trainer.bytes("model"):
        why["offload_actor"] = f"the backend {trainer.name} keeps the Actor on the host by itself, and streams it; leave it out"
    return why
