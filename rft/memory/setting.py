"""What a plan is made of: the runtime of a job, what its loop does with it, and the machine."""

import dataclasses as dc
import math

from rft.errors import BadInput
from rft.memory.steps import Work
from rft.spec import LaunchSpec
from rft.spec.checks import at_least_one


@dc.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Where a loop puts what it does not need, by `offload_actor`, `offload`, `sleep_keeping` and their opposites.

    Whatever it says, the engine sleeps while models compute, and roles are on the device in their own phase alone where their
    specification says `where='host'`.
    """

    offload_actor: bool = False
    """The Actor's weights are on the device in the phases that use them alone: broadcast, old log-probs, train (and ema)."""
    offload_optimizer: bool = False
    """The Actor's moments are on the device in the train phase alone."""
    keep_engine_weights: bool = False
    """The engine sleeps by `sleep_keeping`; otherwise it lets its weights go."""


@dc.dataclass(frozen=True, kw_only=True)
class Setting:
    """One job on one machine."""

    launch: LaunchSpec
    """As `launch` is given it."""
    world_size: int = 1
    """Ranks, each with a device of its own."""
    device_gib: float
    """Memory of each device."""
    host_gib: float | None = None
    """Memory of each host; None: not compared."""
    ranks_per_host: int | None = None
    """None: all ranks are on one host."""
    prompts: int
    """In a batch, on each rank."""
    samples: int = 1
    """Responses to each prompt."""
    minibatches: int = 1
    """Optimizer steps that a batch is cut into."""
    longest_prompt: int
    """In tokens."""
    longest_response: int
    """In tokens."""
    schedule: Schedule = dc.field(default_factory=Schedule)
    """What the loop moves."""

    def __post_init__(self) -> None:
        at_least_one(self, "world_size", "prompts", "samples", "minibatches", "longest_prompt", "longest_response")
        if not 0 < self.device_gib < math.inf or (self.host_gib is not None and not 0 < self.host_gib < math.inf):
            raise BadInput(f"device_gib and host_gib must be above 0 and finite, got {self.device_gib} and {self.host_gib}")
        if self.world_size % self.launch.tensor_parallel:
            raise BadInput(f"tensor_parallel={self.launch.tensor_parallel} does not divide world_size={self.world_size}")
        self.launch.check_shards(self.world_size)
        if self.schedule.offload_actor and getattr(self.launch.trainer, "offload", False):
            raise BadInput(
                "schedule.offload_actor and launch.trainer.offload: FSDP2Trainer(offload=True) keeps the Actor on the host by itself, and "
                "offload_actor(state) is refused with it; leave one of them out"
            )
        if self.ranks_per_host is not None and self.ranks_per_host < 1:
            raise BadInput(f"ranks_per_host must be at least 1, got {self.ranks_per_host}")
        if self.ranks_per_host is not None and self.ranks_per_host % self.launch.tensor_parallel:
            both = f"tensor_parallel={self.launch.tensor_parallel} does not divide ranks_per_host={self.ranks_per_host}"
            raise BadInput(f"{both}: a TP group lies on one host")
        if self.prompts * self.samples < self.minibatches:
            raise BadInput(f"{self.prompts} prompts of {self.samples} samples cannot be cut into {self.minibatches} minibatches")

    @property
    def longest(self) -> int:
        """The longest row."""
        return self.longest_prompt + self.longest_response

    @property
    def device_bytes(self) -> int:
        """What may be filled of each device."""
        card = int(self.device_gib * (1 << 30))
        return card if self.launch.device_bytes is None else min(card, self.launch.device_bytes)

    def work(self, parts: int = 1) -> Work:
        """One of `parts` of a batch, if every row is as long as can be."""
        rows = -(-self.prompts * self.samples // parts)
        return Work(tokens=rows * self.longest, wanted=rows * self.longest_response, longest=self.longest)
