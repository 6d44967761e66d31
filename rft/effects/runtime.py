"""What really changes, behind the opaque handle of a state. Effects take it out of the state; nobody else does."""

import contextlib
import secrets
from collections.abc import Generator
from typing import Any

from rft.effects.watch import Watch
from rft.engines.protocol import Engine
from rft.ledger import Ledger
from rft.models import ModelFolder
from rft.parallel.lockstep import Lockstep
from rft.parallel.world import World
from rft.spec import LaunchSpec
from rft.state import Devices, RuntimeState
from rft.telemetry.trace import Trace
from rft.trainers.protocol import Trainer


class Runtime(Devices):
    """The devices of one launch: this rank's trainer, its engine, and its connections to the other ranks."""

    def __init__(
        self, *, spec: LaunchSpec, model: ModelFolder, world: World, trainer: Trainer, engine: Engine | None, lockstep: Lockstep
    ) -> None:
        self.ledger = Ledger()
        self.cannot = _cannot(engine)
        self.spec, self.model, self.world, self.trainer, self.lockstep = spec, model, world, trainer, lockstep
        self._engine = engine
        self.trace = Trace()
        self.watch = Watch(spec.probe_every, model)
        self.name, self.generated = secrets.token_hex(3), 0

    @property
    def engine(self) -> Engine:
        """The rollout engine; steps that need one are refused before they get here, where there is none."""
        assert self._engine is not None
        return self._engine

    @property
    def has_engine(self) -> bool:
        """Whether this launch has a rollout engine."""
        return self._engine is not None

    def enter(self, step: str, generation: int) -> None:
        self.trace.begin(step)
        try:
            self.lockstep.meet(step, generation)
        except BaseException:
            self.trace.end(step)
            raise

    def leave(self, step: str) -> None:
        self.trace.end(step)

    @contextlib.contextmanager
    def engine_effect(self) -> Generator[None]:
        """Marks the irreversible part of an engine's effect; at its end all ranks agree whether it went well on each of them."""
        with self.ledger.irreversible("engine"), self.lockstep.agreement():
            yield


def runtime_of(state: RuntimeState[Any, Any, Any, Any]) -> Runtime:
    """The devices behind a state."""
    assert isinstance(state.devices, Runtime)
    return state.devices


def _cannot(engine: Engine | None) -> dict[str, str]:
    if engine is None:
        return dict.fromkeys(
            ("broadcast", "wake", "sleep", "sleep_keeping", "recover", "generate", "generate_stale"),
            "this launch has no rollout engine; give LaunchSpec an engine, or train with supervised_step",
        )
    if engine.keeps is None:
        return {"sleep_keeping": f"the engine {engine.name} cannot keep its weights while its cache is unmapped; use sleep"}
    return {}
