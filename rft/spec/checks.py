"""Checks that the specifications share."""

from rft.errors import BadInput


def at_least_one(spec: object, *names: str) -> None:
    """Raises `BadInput` for a field of `spec` that is below 1."""
    for name in names:
        if getattr(spec, name) < 1:
            raise BadInput(f"{type(spec).__name__}.{name} must be at least 1, got {getattr(spec, name)}")
