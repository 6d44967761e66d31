"""What is recorded of a run: numbers, phases and samples, as lines of JSON that stay readable wherever a run is cut off."""

import dataclasses as dc
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rft.errors import BadInput

RUN, PLAN, REPORT = "run.json", "plan.json", "report.html"
METRICS, PHASES, SAMPLES = "metrics.jsonl", "phases.jsonl", "samples.jsonl"
"""The files of a run folder, beside `tensorboard/`."""


@dc.dataclass(frozen=True, kw_only=True)
class Phase:
    """One stretch of a step, in seconds since the run began; bytes of the writing rank's device at its fullest, where measured."""

    name: str
    start_s: float
    end_s: float
    step: int
    used_bytes: int | None = None
    """In use."""
    kept_bytes: int | None = None
    """With what PyTorch's allocator kept beside."""


@dc.dataclass(frozen=True, kw_only=True)
class ShownSample:
    """One response as the report shows it. `reward` is None where the reward function failed; `note` says how then."""

    question: str
    response: str
    answer: str
    reward: float | None
    note: str = ""


class Lines:
    """A file of JSON lines. Each line is written whole and flushed, so that the file is readable after any end."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends one line. Numbers that JSON does not know (NaN, infinity) become null."""
        _ = self._file.write(json.dumps({key: _plain(value) for key, value in line.items()}, allow_nan=False, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a file of JSON lines; a last one that was cut off is left out. A file that is not there has none."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def cut_lines(path: Path, step: int) -> None:
    """Leaves of a file of JSON lines those of the steps before `step`; a last line that was cut off goes too."""
    kept = [line for line in read_lines(path) if line["step"] < step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))


def write_whole(path: Path, text: str) -> None:
    """Writes a file aside and renames it: what lay there stays until all of the new one is written. Raises `OSError`."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        _ = aside.write_text(text, encoding="utf-8")
        _ = aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def read_run(folder: Path) -> dict[str, Any]:
    """What `run.json` says. Raises `BadInput` where `folder` is no run folder."""
    path = folder / RUN
    if not path.is_file():
        raise BadInput(f"{folder} is no run folder: it has no {RUN}")
    return json.loads(path.read_text(encoding="utf-8"))


def read_plan(folder: Path) -> dict[str, tuple[int, int]]:
    """The planned peak of each phase, in bytes: in use, and with what the allocator keeps; none where the run has none."""
    path = folder / PLAN
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {phase: (used, kept) for phase, (used, kept) in found.items()}


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """The fields of a dataclass (or mapping) under dotted names: `trainer.lr`; a nested one is named by its type as well."""
    fields = {f.name: getattr(config, f.name) for f in dc.fields(config)} if dc.is_dataclass(config) else dict(config)
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if dc.is_dataclass(value) or isinstance(value, Mapping):
            found |= {prefix + name: type(value).__name__} | flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value if isinstance(value, int | float | bool | None) else str(value)
    return found


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
