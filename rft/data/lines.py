"""Files of JSON lines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rft.errors import BadInput


def json_lines(path: Path) -> Iterator[tuple[Any, str]]:
    """What each line that is not blank holds, and where that is. Raises `BadInput` that names the file, or the line in it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the questions in {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line), f"{path}, line {number}"
        except json.JSONDecodeError as error:
            raise BadInput(f"{path}, line {number} is not JSON: {error}") from error
