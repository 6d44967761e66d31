"""The runtime's situation as a value: four orthogonal axes, each witnessed by a field.

Everything about legality stands in three modules: the records and their invariants here, the living state and the decorators
in `ledger`, the steps in `steps`. Nothing else decides what may be called when.

    RuntimeState[EngineT, WeightsT, ActorT, OldT]

    engine   Awake | Asleep          can it generate at all (is its cache mapped)
    weights  Fresh | Stale           does the engine hold the Actor's current weights
    actor    OnDevice | Offloaded    can the training Actor compute now
    old      NoOld | OldLogProbs     the stored old log-probs of the batch in hand

A state is frozen, and affine: tensors on devices change in place, so an old state is no snapshot, and only the newest one may be
used. A transition consumes a state and returns the next; write `state = step(state)`.
"""

import dataclasses as dc
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, NewType, NoReturn

from jaxtyping import Float
from torch import Tensor
from typing_extensions import TypeIs, TypeVar

from rft import tree
from rft.errors import BrokenInvariant, ConsumedState, RoleError
from rft.shapes import require_hint

if TYPE_CHECKING:
    from rft.ledger import Ledger

PolicyVersion = NewType("PolicyVersion", int)
"""Counts the Actor's optimizer steps, from 0 at launch."""

BatchId = NewType("BatchId", str)
"""Names one call of `generate`: old log-probs and experiences are joined by it."""

Role = NewType("Role", str)
"""Names what can be moved beside the Actor. The Actor is an axis of the state, and no `Role`."""

ACTOR_OPTIMIZER = Role("actor_optimizer")
REFERENCE = Role("reference")
EMA = Role("ema")
CRITIC = Role("critic")
CRITIC_OPTIMIZER = Role("critic_optimizer")
_NAMED = (ACTOR_OPTIMIZER, REFERENCE, EMA, CRITIC, CRITIC_OPTIMIZER)
_REWARD_MODEL = "reward model "


def reward_model(name: str) -> Role:
    """The role of the local reward model that `LaunchSpec.reward_models` calls `name`. Raises `BadInput` for what is no name."""
    require_hint("reward_model(name): name", name, str)
    return Role(f"{_REWARD_MODEL}{name}")


def spelled(role: object) -> str:
    """As it is written in a program: `REFERENCE`, or `reward_model('kind')`; whatever is none of the library's roles, by its value."""
    if isinstance(role, str) and role.startswith(_REWARD_MODEL):
        return f"reward_model({role.removeprefix(_REWARD_MODEL)!r})"
    return role.upper() if isinstance(role, str) and role in _NAMED else repr(role)


# ---- the four axes ----


@dc.dataclass(frozen=True)
class Awake:
    """The engine's cache is mapped: it can generate."""


@dc.dataclass(frozen=True)
class Asleep:
    """The engine's cache is not mapped: it cannot generate."""


@dc.dataclass(frozen=True)
class Fresh:
    """The engine holds the Actor's weights of `version`, which is the state's own."""

    version: PolicyVersion


@dc.dataclass(frozen=True)
class Stale:
    """The engine holds the weights of an older `version`, or none at all (`None`)."""

    version: PolicyVersion | None


@dc.dataclass(frozen=True)
class OnDevice:
    """The Actor can compute. `managed`: its backend streams it to the device by itself."""

    managed: bool = False


@dc.dataclass(frozen=True)
class Offloaded:
    """The Actor lies on the host and cannot compute."""


@dc.dataclass(frozen=True)
class NoOld:
    """No batch is in hand."""


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class BatchLogProbs:
    """Old log-probs of one batch, on the host. `values` is None where `source` is `first_step`: they are the new ones, detached."""

    batch: BatchId
    values: Float[Tensor, "row seq"] | None


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class OldLogProbs:
    """The only copy of the old log-probs of the batch in hand.

    `version` is the Actor's at the time they were taken, `source` where they come from, `steps` counts the `train_step`s on them; `lag`
    is how many versions older than that the oldest weights are that sampled the batch.
    """

    version: PolicyVersion
    batches: tuple[BatchLogProbs, ...]
    source: Literal["actor", "engine", "first_step"]
    steps: int = 0
    lag: int = 0

    def __post_init__(self) -> None:
        if self.source == "first_step" and self.steps > 1:
            raise BrokenInvariant("old log-probs of the first step stand for exactly one step")
        if any((part.values is None) != (self.source == "first_step") for part in self.batches):
            raise BrokenInvariant(f"old log-probs of source {self.source!r}: exactly those of 'first_step' have no values")


# Covariant and with defaults, for the record itself; the invariant twins E, W, A, O are for functions generic in an axis.
EngineT = TypeVar("EngineT", bound=Awake | Asleep, covariant=True, default=Awake | Asleep)
WeightsT = TypeVar("WeightsT", bound=Fresh | Stale, covariant=True, default=Fresh | Stale)
ActorT = TypeVar("ActorT", bound=OnDevice | Offloaded, covariant=True, default=OnDevice | Offloaded)
OldT = TypeVar("OldT", bound=NoOld | OldLogProbs, covariant=True, default=NoOld | OldLogProbs)
E = TypeVar("E", bound=Awake | Asleep)
W = TypeVar("W", bound=Fresh | Stale)
A = TypeVar("A", bound=OnDevice | Offloaded)
O = TypeVar("O", bound=NoOld | OldLogProbs)

AXES: tuple[tuple[str, tuple[type, type]], ...] = (
    ("engine", (Awake, Asleep)),
    ("weights", (Fresh, Stale)),
    ("actor", (OnDevice, Offloaded)),
    ("old", (NoOld, OldLogProbs)),
)

# ---- what the axes do not say: the other roles, and the devices ----


@dc.dataclass(frozen=True)
class Placement:
    """Where a role lies, and how many bytes it takes on one rank."""

    role: Role
    where: Literal["device", "host"]
    bytes: int


@dc.dataclass(frozen=True)
class Roles:
    """Placement of everything beside the Actor's weights and the engine; checked at run time."""

    placements: tuple[Placement, ...] = ()

    def of(self, role: Role) -> Placement:
        """Where `role` lies. Raises `RoleError` if there is none of that name."""
        for placement in self.placements:
            if placement.role == role:
                return placement
        there = ", ".join(spelled(placement.role) for placement in self.placements) or "none"
        raise RoleError(f"there is no role {spelled(role)} in this runtime; it has {there}")

    def moved(self, role: Role, where: Literal["device", "host"]) -> "Roles":
        """The same roles with one of them elsewhere. Raises `RoleError` like `of`."""
        moved = dc.replace(self.of(role), where=where)
        return Roles(tuple(moved if placement.role == role else placement for placement in self.placements))


class Devices:
    """Opaque handle to what really changes. It copies as itself, and so never makes a second runtime; it refuses pickling.

    A runtime is a subclass; the two methods are called around every step by its decorator.
    """

    ledger: "Ledger"
    cannot: Mapping[str, str] = MappingProxyType({})
    """Steps that this runtime's backends cannot take, and why."""
    lacking: frozenset[str] = frozenset()
    """Steps of models that this runtime does not have; they say so themselves."""

    def enter(self, step: str, chosen: str, generation: int) -> None:
        """Called before a legal step takes effect: the place where ranks compare where they are, and what they chose (` of role EMA`)."""

    def leave(self, step: str) -> None:
        """Called after a step, whether it went well or not."""

    def __copy__(self) -> "Devices":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Devices":
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConsumedState("a RuntimeState cannot be pickled: its devices are of this process; save the run instead")


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class RuntimeState(Generic[EngineT, WeightsT, ActorT, OldT]):
    """Where the runtime stands. Only `launch` and the transitions make one that lives; see the module's head."""

    engine: EngineT
    weights: WeightsT
    actor: ActorT
    old: OldT
    roles: Roles
    version: PolicyVersion
    generation: int
    devices: Devices = dc.field(repr=False)

    def __post_init__(self) -> None:
        weights, old = self.weights, self.old
        if type(weights) is Fresh and weights.version != self.version:
            raise BrokenInvariant(f"Fresh({weights.version}) in a state of version {self.version}")
        if type(weights) is Stale and weights.version is not None and weights.version >= self.version:
            raise BrokenInvariant(f"Stale({weights.version}) in a state of version {self.version}, which is not newer")
        if type(self.engine) is Awake and weights.version is None:
            raise BrokenInvariant("an engine that is awake holds weights of some version")
        if type(old) is OldLogProbs and old.version > self.version:
            raise BrokenInvariant(f"old log-probs of version {old.version} in a state of version {self.version}")


def then(
    state: RuntimeState[Any, Any, Any, Any],
    engine: E,
    weights: W,
    actor: A,
    old: O,
    *,
    roles: Roles | None = None,
    version: PolicyVersion | None = None,
) -> RuntimeState[E, W, A, O]:
    """The state that follows `state`: all four axes are named, so that a step's last line reads like its row in the table."""
    return RuntimeState(
        engine=engine,
        weights=weights,
        actor=actor,
        old=old,
        roles=state.roles if roles is None else roles,
        version=state.version if version is None else version,
        generation=state.generation + 1,
        devices=state.devices,
    )


def first_state(devices: Devices, roles: Roles, *, managed: bool = False) -> RuntimeState[Asleep, Stale, OnDevice, NoOld]:
    """The state that a launch begins with."""
    return RuntimeState(
        engine=Asleep(),
        weights=Stale(None),
        actor=OnDevice(managed),
        old=NoOld(),
        roles=roles,
        version=PolicyVersion(0),
        generation=0,
        devices=devices,
    )


def restored_state(
    state: RuntimeState[Any, Any, Any, Any], actor: OnDevice, version: PolicyVersion, *, generation: int
) -> RuntimeState[Asleep, Stale, OnDevice, NoOld]:
    """The state of a run that goes on at `version`: newer than every state of these devices, and than `generation`, the saved one's.

    The other roles lie where `state` has them, whether it lives or not.
    """
    return RuntimeState(
        engine=Asleep(),
        weights=Stale(None),
        actor=actor,
        old=NoOld(),
        roles=state.roles,
        version=version,
        generation=max(state.devices.ledger.generation, generation) + 1,
        devices=state.devices,
    )


def after_step(old: OldLogProbs) -> OldLogProbs:
    """The same old log-probs, with one more `train_step` on them."""
    return dc.replace(old, steps=old.steps + 1)


def is_ready(state: RuntimeState[Any, Any, A, O]) -> TypeIs[RuntimeState[Awake, Fresh, A, O]]:
    """Narrows a state of unknown axes: True where `generate` may be called."""
    return type(state.engine) is Awake and type(state.weights) is Fresh


def is_at(
    state: RuntimeState[Any, Any, Any, Any], engine: type[E], weights: type[W], actor: type[A], old: type[O], /
) -> TypeIs[RuntimeState[E, W, A, O]]:
    """Narrows a state of unknown axes: `is_at(state, Asleep, Stale, OnDevice, NoOld)` is True where a loop may begin.

    Raises `BadInput` for what is no state.
    """
    require_hint("is_at(state, …): state", state, RuntimeState)
    return (type(state.engine), type(state.weights), type(state.actor), type(state.old)) == (engine, weights, actor, old)
