"""Refusals of parameters that cannot work, in one wording."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor

from rft.errors import BadInput

P = ParamSpec("P")
R = TypeVar("R")


def known_keywords(factory: Callable[P, R]) -> Callable[P, R]:
    """Makes a keyword that `factory` does not take a `BadInput`, which says the nearest one that it does."""
    known = list(inspect.signature(factory).parameters)

    @functools.wraps(factory)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise BadInput(f"{factory.__name__} takes no {name!r}; did you mean {near!r}? It takes {', '.join(known)}")
        return factory(*args, **kwargs)

    return run


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


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} is {value:g}" for name, value in values.items())
