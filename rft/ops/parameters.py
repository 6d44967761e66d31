"""Refusals of parameters that cannot work, in one wording."""

import difflib
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from rft.errors import BadInput
from rft.shapes import require_hint

P = ParamSpec("P")
R = TypeVar("R")


def known_parameters(factory: Callable[P, R]) -> Callable[P, R]:
    """Makes `BadInput` of what `factory` cannot take: a keyword that it does not know, with the nearest one that it does, a parameter
    that is missing, and a value that is not what is annotated (functions apart, see `require_function`)."""
    signature = inspect.signature(factory)
    known, hints = list(signature.parameters), _plain_hints(factory)

    @functools.wraps(factory)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                near = "".join(f"; did you mean {each!r}?" for each in difflib.get_close_matches(name, known, n=1)) or "."
                raise BadInput(f"{factory.__name__} takes no {name!r}{near} It takes {', '.join(known)}")
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise BadInput(f"{factory.__name__}: {error}; it takes {', '.join(known)}") from None
        for name in given.keys() & hints.keys():
            require_hint(f"{factory.__name__}: {name}", given[name], hints[name])
        return factory(*args, **kwargs)

    return run


def require_function(where: str, name: str, value: object, takes: tuple[str, ...]) -> None:
    """Raises `BadInput` for what is no function of so many positional arguments, such as one whose parameters are not bound."""
    wanted = f"{where}: {name} must be a function of ({', '.join(takes)})"
    if not callable(value):
        raise BadInput(f"{wanted}, such as those of rft.ops with their parameters bound; got {value!r:.80}")
    try:
        _ = inspect.signature(value).bind(*takes)
    except TypeError as error:
        called = getattr(value, "__name__", type(value).__name__)
        ways = f"bind its parameters, functools.partial({called}, …), or call it where it is what makes such a function, {called}(…)"
        raise BadInput(f"{wanted}, and {called} is none: {error}; {ways}") from None
    except ValueError:
        return  # written in C, and silent about what it takes


def require_positive(where: str, /, **values: float) -> None:
    """Raises `BadInput` unless each of the named values is above 0 (NaN is not)."""
    wrong = {name: value for name, value in values.items() if not value > 0}
    if wrong:
        raise BadInput(f"{where}: {_listed(wrong)}, but must be above 0")


def require_within(where: str, low: float, high: float, /, **values: float) -> None:
    """Raises `BadInput` unless each of the named values lies in [low, high]."""
    wrong = {name: value for name, value in values.items() if not low <= value <= high}
    if wrong:
        raise BadInput(f"{where}: {_listed(wrong)}, but must be between {low:g} and {high:g}")


def require_finite(where: str, values: Tensor) -> None:
    """Raises `BadInput` unless all values are finite: one that is not would make nothing of a whole batch."""
    if not bool(values.isfinite().all()):
        raise BadInput(f"{where}: {int((~values.isfinite()).sum())} of {values.numel()} values are NaN or infinite; mark them as not valid")


def _plain_hints(factory: Callable[..., object]) -> dict[str, Any]:
    """Annotations of the parameters that are no functions."""
    hints = typing.get_type_hints(factory)
    return {name: hint for name, hint in hints.items() if name != "return" and "Callable" not in str(hint)}


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} is {value:g}" for name, value in values.items())
