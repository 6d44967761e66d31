"""The Actor as a folder that others load."""

from pathlib import Path
from typing import Any

from rft.effects.runtime import runtime_of
from rft.errors import BadInput
from rft.state import RuntimeState


def export(state: RuntimeState[Any, Any, Any, Any], path: Path) -> Path:
    """Writes an ordinary Hugging Face folder; rank 0 writes. Raises `BadInput` where something else lies there already."""
    if path.is_file():
        raise BadInput(f"export(state, {str(path)!r}): there is a file of that name; name a folder")
    runtime_of(state).trainer.export(path)
    return path
