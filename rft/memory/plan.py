"""What is on the device in each phase of a batch, from the configuration alone.

Every phase is planned at its fullest moment, with every row as long as it can be. The order is that of a batch: the engine is given
weights and generates; it sleeps, and one model after the other computes.
"""

import dataclasses as dc
from collections.abc import Mapping

from rft.memory import roles
from rft.memory.engines import EngineHolds
from rft.memory.outline import Blueprint, Outline, outline
from rft.memory.setting import Setting
from rft.memory.sharding import FP32, Held, itemsize
from rft.memory.steps import Rows, Work, scoring, streamed, training
from rft.spec import DeepSpeedTrainer, DType, SharedCritic
from rft.spec.training import Training
from rft.trainers.gathering import most

CONTEXT = 1400 << 20
"""What the driver, loaded kernels and the workspaces of libraries take of a card; measured on an H200, once all phases had run."""
GROUPS = 400 << 20
"""What NCCL's buffers take beside, where there are several ranks. Not measured."""
KEPT, KEPT_SHARE = 512 << 20, 0.15
"""What the allocator keeps beside what is in use: pieces that nothing fits, at rest, and a share of what comes and goes. As measured on
an H200 with room to spare; where there is none, the allocator gives back what it can."""
PROBE = 32
"""Tokens that the Actor scores as the engine wakes."""
PASSING = ("gathered weights", "gradients", "activations", "experience")
"""Rows that come and go within a phase."""


@dc.dataclass(frozen=True)
class Phase:
    """A phase at its fullest moment: bytes by row."""

    name: str
    rows: Rows

    @property
    def total(self) -> int:
        """All rows."""
        return sum(self.rows.values())

    @property
    def used(self) -> int:
        """All but what the allocator keeps beside."""
        return self.total - self.rows["kept by the allocator"]


@dc.dataclass(frozen=True, kw_only=True)
class Plan:
    """The phases of a job, and the bytes that may be filled."""

    phases: tuple[Phase, ...]
    device_bytes: int
    host: Rows
    """Pinned memory on the host, by role, of one rank."""
    ranks_per_host: int
    host_bytes: int | None

    @property
    def peak(self) -> Phase:
        """The fullest phase."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def pinned(self) -> int:
        """Pinned memory of all ranks of a host."""
        return sum(self.host.values()) * self.ranks_per_host

    @property
    def fits(self) -> bool:
        """Whether the fullest phase fits the device, and what is pinned the host."""
        return self.peak.total <= self.device_bytes and (self.host_bytes is None or self.pinned <= self.host_bytes)

    def peaks(self) -> dict[str, tuple[int, int]]:
        """Of each phase by its name, as a run's telemetry takes it: bytes in use, and with what the allocator keeps beside."""
        return {phase.name: (phase.used, phase.total) for phase in self.phases}


@dc.dataclass(frozen=True, kw_only=True)
class _Cast:
    """Everything that may be on the device."""

    setting: Setting
    actor: Blueprint
    held: Held
    engine: EngineHolds | None
    frozen: Mapping[str, roles.Model]
    """Reference, Critic, EMA, by the phase that is theirs."""
    rewards: Mapping[str, roles.Model]


def plan(setting: Setting) -> Plan:
    """The plan of a job. Reads the models' configurations, and nothing else. Raises `BadInput` for what cannot be planned."""
    actor = roles.actor_blueprint(setting.launch)
    found = {"reference": roles.reference(setting, actor), "critic": roles.critic(setting, actor), "ema": roles.ema(setting, actor)}
    cast = _Cast(
        setting=setting,
        actor=actor,
        held=roles.actor_holds(setting, actor),
        engine=roles.engine(setting, actor),
        frozen={name: model for name, model in found.items() if model is not None},
        rewards=roles.reward_models(setting),
    )
    return Plan(
        phases=tuple(Phase(name, _fullest(moments)) for name, moments in _phases(cast).items()),
        device_bytes=setting.device_bytes,
        host=_host(cast),
        ranks_per_host=setting.world_size if setting.ranks_per_host is None else setting.ranks_per_host,
        host_bytes=None if setting.host_gib is None else int(setting.host_gib * (1 << 30)),
    )


def sync_bucket(shape: Outline, trainer: Training, ranks: int, engine: DType | None = None) -> int:
    """What streaming the weights takes beside both copies: nothing where every rank has all of them.

    They go to an engine in its dtype, where that is the smaller one, but for those that an adapter is added to; or, as exact as they are,
    to an average, which lets go of each at once.
    """
    if ranks == 1 or (isinstance(trainer, DeepSpeedTrainer) and trainer.stage < 3):
        return 0
    held = itemsize(trainer.dtype) if isinstance(trainer, DeepSpeedTrainer) else FP32
    if engine is None:
        return most([held * each.numel() for each in shape.shapes])
    size = held if shape.adapter else min(held, itemsize(engine))
    return streamed([size * each.numel() for each in shape.shapes], ranks)


# ---- the phases, and who is there in each ----


def _phases(cast: _Cast) -> dict[str, list[Rows]]:
    setting, trainer = cast.setting, roles.trainer_of(cast.setting.launch)
    ranks = setting.world_size
    phases: dict[str, list[Rows]] = {}
    if cast.engine is not None:
        gathered = sync_bucket(outline(cast.actor), trainer, ranks, cast.engine.dtype)
        bucket = {"sync bucket": gathered + _merging(cast) + cast.engine.bucket}
        weights = {"engine weights": cast.engine.weights}
        awake = {**weights, "cache": cast.engine.cache}
        phases["broadcast"] = [{**_there(cast, "broadcast", mapped=cast.engine.mapped), **weights, **bucket}]
        there = {**_there(cast, "generate", mapped=cast.engine.mapped), **awake}
        phases["generate"] = [{**there, "activations": cast.engine.generating}, {**there, **_probe(cast)}]
    phases["old log-probs"] = [{**_there(cast, "old log-probs"), **scoring(cast.actor, trainer, setting.work(), ranks)}]
    for name in ("reference", "critic"):
        if name in cast.frozen:
            phases[name] = [{**_there(cast, name), **cast.frozen[name].holds, **used} for used in cast.frozen[name].used]
    if cast.rewards:
        phases["rewards"] = [{**_there(cast, "rewards"), **together, **used} for together, used in _judging(cast)]
    steps = training(cast.actor, trainer, setting.work(setting.minibatches), ranks)
    phases["train"] = [{**_there(cast, "train"), **step} for step in steps]
    if "ema" in cast.frozen:
        mixing = {**cast.frozen["ema"].holds, "sync bucket": sync_bucket(outline(cast.actor), trainer, ranks)}
        phases["ema"] = [{**_there(cast, "ema"), **mixing}]
    return phases


USES_ACTOR = ("broadcast", "old log-probs", "train", "ema")


def _merging(cast: _Cast) -> int:
    """W + B A of the largest adapted tensor and B A, in fp32, as they are added up for the engine."""
    shape = outline(cast.actor)
    return 2 * FP32 * shape.largest_tensor if shape.adapter else 0


def _probe(cast: _Cast) -> Rows:
    """What the Actor takes as it is compared with the engine that wakes: of a long one with `keep_gathered`, all of it in full."""
    setting, few = cast.setting, Work(tokens=PROBE, wanted=PROBE, longest=PROBE)
    if not setting.launch.probe_every or setting.schedule.offload_actor:
        return {}
    return scoring(cast.actor, roles.trainer_of(setting.launch), few, setting.world_size)


def _there(cast: _Cast, phase: str, *, mapped: int = 0) -> dict[str, int]:
    """What is on the device whatever the phase computes; `mapped` is what an engine's pages take beside what is in them."""
    schedule = cast.setting.schedule
    libraries = 0 if cast.engine is None else cast.engine.libraries
    there = {"context": CONTEXT + libraries + mapped + (GROUPS if cast.setting.world_size > 1 else 0)}
    shared = isinstance(cast.setting.launch.critic, SharedCritic)
    reads = (phase == "critic" and shared) or (phase == "reference" and cast.actor.lora is not None)
    if phase in USES_ACTOR or reads or not schedule.offload_actor:
        there["actor weights"] = cast.held.weights
    if phase == "train" or not schedule.offload_optimizer:
        there["optimizer"] = cast.held.optimizer
    if cast.engine is not None:
        there["CUDA graphs, buffers"] = cast.engine.graphs
        if schedule.keep_engine_weights and cast.engine.keeps == "device":
            there["engine weights"] = cast.engine.weights
    for model in (*cast.frozen.values(), *cast.rewards.values()):
        there |= model.holds if model.where == "device" else {}
    return there


def _judging(cast: _Cast) -> list[tuple[Rows, Rows]]:
    """For each reward model: those that are there with it, the largest ones first, and what its use adds."""
    count, largest = cast.setting.launch.reward_models_on_device, sorted(cast.rewards.values(), key=_size, reverse=True)
    moments = list[tuple[Rows, Rows]]()
    for model in largest:
        others = [other for other in largest if other is not model][: count - 1]
        moments += [({k: v for each in (model, *others) for k, v in each.holds.items()}, used) for used in model.used]
    return moments


def _size(model: roles.Model) -> int:
    return sum(model.holds.values())


def _fullest(moments: list[Rows]) -> Rows:
    """The fullest of them, with what the allocator keeps beside; rows of nothing are left out."""
    fullest = max(moments, key=lambda rows: sum(rows.values()))
    kept = KEPT + int(KEPT_SHARE * sum(fullest.get(name, 0) for name in PASSING))
    return {name: size for name, size in {**fullest, "kept by the allocator": kept}.items() if size}


def _host(cast: _Cast) -> Rows:
    """What was moved away once keeps its place there."""
    schedule = cast.setting.schedule
    pinned = {"actor (its backend)": cast.held.host}
    pinned["actor weights"] = cast.held.weights if schedule.offload_actor else 0
    pinned["optimizer"] = cast.held.optimizer if schedule.offload_optimizer else 0
    if cast.engine is not None and schedule.keep_engine_weights and cast.engine.keeps == "host":
        pinned["engine weights"] = cast.engine.weights
    pinned |= {name: model.host for name, model in (*cast.frozen.items(), *cast.rewards.items())}
    return {name: size for name, size in pinned.items() if size}
