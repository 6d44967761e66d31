"""The whole runtime of one job."""

import dataclasses as dc
import math
from collections.abc import Mapping
from typing import ClassVar

from rft.errors import BadInput
from rft.shapes import check_fields
from rft.spec.checks import at_least_one
from rft.spec.engines import EngineSpec, SGLangEngine, TransformersEngine, VLLMEngine
from rft.spec.lora import LoRA
from rft.spec.roles import Critic, FrozenSpec, MovingAverage, Reference, RewardModel, SharedCritic
from rft.spec.training import FSDP2Trainer, TrainerSpec, Training

ENGINES = (TransformersEngine, VLLMEngine, SGLangEngine)
"""Ours; anything else that builds one is taken for an engine, too, unless it is another specification of ours. So with trainers."""
OURS = (*ENGINES, Training, FrozenSpec, Critic, SharedCritic)


@dc.dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """The whole runtime of one job."""

    made_by: ClassVar[str] = "write LaunchSpec(model=…)"

    model: str
    """A Hugging Face model folder, or a hub id."""
    engine: EngineSpec | None = dc.field(default_factory=TransformersEngine)
    """The rollout engine; None for training without one (the state stays [Asleep, Stale])."""
    trainer: TrainerSpec = dc.field(default_factory=FSDP2Trainer)
    """The training backend."""
    reference: Reference | None = None
    """The frozen Reference; None where no KL to it is asked for: none is made then."""
    critic: Critic | SharedCritic | None = None
    """The Critic, on a model of its own or on the Actor's hidden states."""
    reward_models: Mapping[str, RewardModel] = dc.field(default_factory=dict)
    """Local reward models by name; the role of each is `reward_model(name)`."""
    reward_models_on_device: int = 1
    """How many of them may be on the device at once."""
    ema: MovingAverage | None = None
    """A moving average of the Actor's weights."""
    tensor_parallel: int = 1
    """Ranks that share one engine."""
    seed: int = 0
    """Of the run: every sampled token's random number comes from it."""
    deadline_s: float = 600.0
    """How long a rank waits for the others at a step before the job ends with a table of who is where."""
    device_bytes: int | None = None
    """Memory of each device that this job may fill; None asks the driver."""
    probe_every: int = 1
    """Engine and Actor are compared on a short fixed probe after every so many broadcasts; 0: never."""

    def __post_init__(self) -> None:
        check_fields(self, but=("engine", "trainer"))
        at_least_one(self, "tensor_parallel", "reward_models_on_device")
        if isinstance(self.engine, TransformersEngine):
            self.engine.check_alone(self.tensor_parallel)
        if not (self.engine is None or _builds(self.engine, *ENGINES)):
            raise BadInput(f"LaunchSpec.engine must be a specification such as TransformersEngine(), or None, got {self.engine!r}")
        if not _builds(self.trainer, Training):
            raise BadInput(f"LaunchSpec.trainer must be a specification such as FSDP2Trainer(), got {self.trainer!r}")
        self._check_lora()
        self._check_turns()
        if not 0 < self.deadline_s < math.inf:
            raise BadInput(f"LaunchSpec.deadline_s must be above 0 and finite, got {self.deadline_s}")
        if self.probe_every < 0 or (self.device_bytes is not None and self.device_bytes < 1):
            raise BadInput("probe_every must be at least 0, device_bytes at least 1 or None")

    def _check_lora(self) -> None:
        """An adapter alone can only be sent to an engine that has a place for it, and holds all of it on one rank."""
        if self.adapter_alone is None or self.engine is None:
            return
        if not hasattr(self.engine, "build_adapted"):
            raise BadInput(f"{type(self.engine).__name__} cannot load an adapter alone; write LoRA(sync='merged')")
        if self.tensor_parallel > 1:
            raise BadInput(f"LoRA(sync='adapter') needs tensor_parallel=1, got {self.tensor_parallel}; write LoRA(sync='merged')")

    def _check_turns(self) -> None:
        """Only so many reward models lie on the device."""
        there, most = [name for name, wanted in self.reward_models.items() if wanted.where == "device"], self.reward_models_on_device
        if len(there) > most:
            raise BadInput(
                f"LaunchSpec.reward_models: {', '.join(there)} are to lie on the device, and only {most} may; leave some on the host, or "
                "raise LaunchSpec.reward_models_on_device"
            )

    def check_shards(self, ranks: int) -> None:
        """Raises `BadInput` where the shards of a model do not divide so many ranks."""
        parts: dict[str, object] = {"trainer": self.trainer, "reference": self.reference, "ema": self.ema}
        parts |= {"critic.trainer": getattr(self.critic, "trainer", None)}
        parts |= {f"reward_models[{name!r}]": spec for name, spec in self.reward_models.items()}
        for name, part in parts.items():
            count = getattr(part, "shards", None)
            if count is not None and ranks % count:
                raise BadInput(
                    f"LaunchSpec.{name}: shards={count} does not divide the world size {ranks}; start torchrun with a multiple of {count} "
                    "processes, or leave shards out for all ranks"
                )

    @property
    def adapter_alone(self) -> LoRA | None:
        """The trainer's LoRA, if its adapter is to be sent to the engine alone."""
        lora = getattr(self.trainer, "lora", None)
        return lora if lora is not None and lora.sync == "adapter" else None


def _builds(part: object, *kinds: type) -> bool:
    """Whether it is a specification of one of these kinds of ours, or one that is not ours at all."""
    return callable(getattr(part, "build", None)) and not isinstance(part, type) and (isinstance(part, kinds) or not isinstance(part, OURS))
