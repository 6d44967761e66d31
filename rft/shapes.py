"""Shape checks: records check their own fields when they are made, functions through jaxtyping and beartype.

The fields of a specification are held to their annotations, too: a misspelt word of a `Literal` is none of them.

Axis names are bound over the whole record, so `Float[Tensor, "batch seq"]` in two fields means the same two sizes.
"""

import dataclasses as dc
import functools
import re
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from beartype import BeartypeConf, beartype
from beartype.door import is_bearable
from jaxtyping import AbstractArray, TypeCheckError, jaxtyped
from torch import Tensor

from rft.errors import BadInput, ShapeError

F = TypeVar("F", bound=Callable[..., Any])

_CONF = BeartypeConf(is_pep484_tower=True)
_TYPECHECKER = beartype(conf=_CONF)
"""An int is a float, as it is to pyright: `cap=2` must not pass there and fail at run time."""


def checked(function: F) -> F:
    """Checks the jaxtyping annotations of a public function at every call; a mismatch raises `ShapeError`."""
    inner = jaxtyped(typechecker=_TYPECHECKER)(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except TypeCheckError as error:
            raise ShapeError(f"{function.__qualname__}: {error}") from None

    return typing.cast(F, run)


@functools.cache
def _array_fields(cls: type) -> tuple[tuple[str, Any, bool], ...]:
    """(name, annotation of the array, whether it may be None) of every field that is an array."""
    hints = typing.get_type_hints(cls)
    either = [(f.name, typing.get_args(hints[f.name]) or (hints[f.name],)) for f in dc.fields(cls)]
    return tuple((name, arms[0], type(None) in arms) for name, arms in either if _is_array(arms[0]))


def _is_array(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def check_record(record: Any) -> None:
    """Checks every array field of a frozen dataclass against its annotation; call it first in `__post_init__`.

    Raises `ShapeError` that names the record, the field, and the axis or dtype that is wrong.
    """
    name, sizes = type(record).__name__, dict[str, tuple[int, str]]()
    for field, hint, optional in _array_fields(type(record)):
        value = getattr(record, field)
        if value is None and optional:
            continue
        if not isinstance(value, Tensor):
            raise ShapeError(f"{name}.{field} must be a tensor {_show(hint)}, but is a {type(value).__name__}")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in hint.dtypes:
            raise ShapeError(f"{name}.{field} has dtype {dtype}, but is declared {_show(hint)}: dtype one of {', '.join(hint.dtypes)}")
        axes = hint.dim_str.split()
        if value.dim() != len(axes):
            raise ShapeError(f"{name}.{field} has shape {tuple(value.shape)}, but is declared {_show(hint)}: axes {', '.join(axes)}")
        for axis, size in zip(axes, value.shape, strict=True):
            expected, where = sizes.setdefault(axis, (size, field))
            if size != expected:
                raise ShapeError(f"{name}.{field}: axis {axis!r} is {size}, but {expected} in {name}.{where}; declared {_show(hint)}")


class Made(Protocol):
    """A record that steps are given, and what makes one, in words."""

    made_by: ClassVar[str]


def require_kind(call: str, name: str, value: object, kind: type[Made]) -> None:
    """Raises `BadInput` for an argument of `call` that is no record of this kind; the message has what makes one."""
    if not isinstance(value, kind):
        raise BadInput(f"{call}: {name} must be {kind.__name__}, got {type(value).__name__}; {kind.made_by}")


def check_fields(spec: Any, *, but: tuple[str, ...] = ()) -> None:
    """Checks every field of a frozen dataclass, but for some, against its annotation.

    Raises `BadInput` that names the field, and says what it may be.
    """
    for field, hint in _hints(type(spec)).items():
        if field not in but:
            require_hint(f"{type(spec).__name__}.{field}", getattr(spec, field), hint)


def require_hint(name: str, value: object, hint: Any) -> None:
    """Raises `BadInput` for a value that is not what an annotation says."""
    if not _is(value, hint):
        told = " or ".join(map(repr, typing.get_args(hint))) if typing.get_origin(hint) is typing.Literal else _named(hint)
        raise BadInput(f"{name} must be {told}, got {value!r:.200}")


def require_path(name: str, value: object) -> Path:
    """The path that a value names. Raises `BadInput` for what names none."""
    require_hint(name, value, Path | str)
    if value == "":
        raise BadInput(f"{name} must not be empty; the current folder is '.'")
    return Path(typing.cast(Path | str, value))


def _is(value: object, hint: Any) -> bool:
    """As beartype says, and stricter: a bool is no number, and all items of a tuple are looked at, not one of them."""
    origin, arms = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, arm) for arm in arms)
    if hint in (int, float):
        return not isinstance(value, bool) and is_bearable(value, hint, conf=_CONF)
    if origin is tuple and arms[1:] == (...,):
        return isinstance(value, tuple) and all(_is(item, arms[0]) for item in typing.cast(tuple[object, ...], value))
    return is_bearable(value, hint, conf=_CONF)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dc.fields(cls)}


def _named(hint: Any) -> str:
    return hint.__name__ if type(hint) is type else re.sub(r"\b\w+\.", "", str(hint))


def _show(hint: Any) -> str:
    return hint.__name__
