"""Refusals of parameters that cannot work, in one wording."""

from torch import Tensor

from rft.errors import BadInput


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
