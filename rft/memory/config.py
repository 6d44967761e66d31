"""A plan's configuration, from a TOML file: the fields of `Setting` and of the specifications in it, by their own names.

Where a field may be one of several specifications, its table says which by `kind`. What a file has and nothing knows is refused by name,
and so is what is missing.
"""

import dataclasses as dc
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import BeforeValidator, ConfigDict, Discriminator, Tag, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from rft.errors import BadInput
from rft.memory.setting import Schedule, Setting
from rft.spec import (
    Critic,
    DeepSpeedTrainer,
    FSDP2Trainer,
    LaunchSpec,
    LoRA,
    MovingAverage,
    Reference,
    RewardModel,
    SGLangEngine,
    SharedCritic,
    TransformersEngine,
    VLLMEngine,
)

T = TypeVar("T")
KINDS: dict[str, dict[str, type | None]] = {
    "engine": {"vllm": VLLMEngine, "sglang": SGLangEngine, "transformers": TransformersEngine, "none": None},
    "trainer": {"fsdp2": FSDP2Trainer, "deepspeed": DeepSpeedTrainer},
    "critic": {"own": Critic, "shared": SharedCritic},
}
"""What `kind` may be in which table."""
TABLES = {
    "launch": LaunchSpec,
    "lora": LoRA,
    "schedule": Schedule,
    "reference": Reference,
    "ema": MovingAverage,
    "reward_models": RewardModel,
}
"""Tables that are of one kind only."""


def read_setting(path: Path) -> Setting:
    """The setting that a TOML file describes. Raises `BadInput` with everything that is wrong with it."""
    if not path.is_file():
        raise BadInput(f"there is no file {path}; write one like examples/plan.toml")
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{path} cannot be read as TOML: {error}") from error
    try:
        return TypeAdapter(_Setting).validate_python(given)
    except ValidationError as error:
        raise BadInput(f"{path}:\n" + "\n".join(f"  {_problem(each)}" for each in error.errors())) from error


# ---- the specifications as pydantic reads them: protocols become the kinds that there are ----


def _kind(given: Any) -> Any:
    return cast(dict[str, Any], given).get("kind") if isinstance(given, dict) else None


def _rest(given: Any) -> Any:
    return {name: value for name, value in given.items() if name != "kind"}


def _nothing(given: Any) -> None:
    """No specification has no keys."""
    if others := _rest(given):
        raise PydanticCustomError("other_keys", "{said}", {"said": f"kind 'none' goes with no other key; leave out {', '.join(others)}"})


def _read_as(name: str) -> Callable[[type[T]], type[T]]:
    """Calls what pydantic reads as what it stands for: errors say the name."""

    def named(twin: type[T]) -> type[T]:
        twin.__name__ = twin.__qualname__ = name
        return twin

    return named


Trainer = Annotated[
    Annotated[FSDP2Trainer, BeforeValidator(_rest), Tag("fsdp2")]
    | Annotated[DeepSpeedTrainer, BeforeValidator(_rest), Tag("deepspeed")],
    Discriminator(_kind),
]  # fmt: skip
Engine = Annotated[
    Annotated[VLLMEngine, BeforeValidator(_rest), Tag("vllm")]
    | Annotated[SGLangEngine, BeforeValidator(_rest), Tag("sglang")]
    | Annotated[TransformersEngine, BeforeValidator(_rest), Tag("transformers")]
    | Annotated[None, BeforeValidator(_nothing), Tag("none")],
    Discriminator(_kind),
]


@_read_as("Critic")
@dc.dataclass(frozen=True, kw_only=True)
class _Critic(Critic):
    trainer: Trainer = dc.field(default_factory=FSDP2Trainer)


AnyCritic = Annotated[
    Annotated[_Critic, BeforeValidator(_rest), Tag("own")] | Annotated[SharedCritic, BeforeValidator(_rest), Tag("shared")],
    Discriminator(_kind),
]


@_read_as("LaunchSpec")
@dc.dataclass(frozen=True, kw_only=True)
class _Launch(LaunchSpec):
    engine: Engine = dc.field(default_factory=TransformersEngine)
    trainer: Trainer = dc.field(default_factory=FSDP2Trainer)
    critic: AnyCritic | None = None


@_read_as("Setting")
@dc.dataclass(frozen=True, kw_only=True)
class _Setting(Setting):
    __pydantic_config__ = ConfigDict(extra="forbid")

    launch: _Launch


# ---- what is wrong ----


def _problem(error: Any) -> str:
    place: Sequence[str] = [str(part) for part in error["loc"]]
    where = ".".join(part for before, part in zip(["", *place], place, strict=False) if part not in KINDS.get(before, {}))
    owner, what = _owner(place[:-1]), error["type"]
    if what == "unexpected_keyword_argument":
        there = sorted({field.name for field in dc.fields(owner)}) + (["kind"] if place[-2:-1] and place[-2] in _tags() else [])
        return f"{where}: there is no such key; there are {', '.join(there)}"
    if what == "missing":
        return f"{where}: missing ({owner.__name__} needs it)"
    if what == "dataclass_type":
        return f"{where}: it must be a table, got {error['input']!r}"
    if what in ("union_tag_invalid", "union_tag_not_found"):
        given = f"kind is {error['ctx']['tag']!r}" if "ctx" in error and "tag" in error["ctx"] else "kind is missing"
        return f"{where}: {given}; write one of {', '.join(map(repr, KINDS[place[-1]]))}"
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}"


def _owner(place: Sequence[str]) -> Any:
    """The specification that a table is of."""
    owner: Any = Setting
    for before, part in zip(["", *place], place, strict=False):
        owner = KINDS.get(before, {}).get(part) or TABLES.get(part, owner)
    return owner


def _tags() -> set[str]:
    return {tag for kinds in KINDS.values() for tag in kinds}
