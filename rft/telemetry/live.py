"""What a person at the screen sees of a run: a live view on a terminal, plain log lines elsewhere."""

import dataclasses as dc
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

log = logging.getLogger("rft")

FIRST = ("reward", "accuracy", "length", "kl", "engine_kl", "loss", "grad_norm", "tokens_per_second")
"""What is shown first, in this order, where a run logs it."""
LABELS = {"tokens_per_second": "tokens/s", "kl": "KL", "engine_kl": "KL to the engine", "grad_norm": "gradient norm"}
SPARKS = "▁▂▃▄▅▆▇█"
HISTORY = 32


@dc.dataclass(frozen=True, kw_only=True)
class Shown:
    """A step just closed, the `done`-th: its numbers, and the seconds of each phase."""

    done: int
    metrics: Mapping[str, float]
    phases: Mapping[str, float]


class Display(Protocol):
    """Something that shows a run while it goes on."""

    def enter(self, phase: str) -> None:
        """A phase begins."""
        ...

    def leave(self) -> None:
        """The phase is over."""
        ...

    def show(self, shown: Shown) -> None:
        """A step is closed."""
        ...

    def note(self, metrics: Mapping[str, float]) -> None:
        """Numbers beside the steps."""
        ...

    def close(self) -> None:
        """The run is over. Idempotent."""
        ...


def open_display(title: str, steps: int, done: int = 0) -> Display:
    """A live view where stderr is a terminal, else plain log lines. `done` of the steps were taken by an earlier run."""
    console = Console(stderr=True)
    return LiveView(title, steps, console, done) if console.is_terminal else PlainLines(steps, done)


class Eta:
    """How long the rest takes, if it goes on as it went since `before` steps were done."""

    def __init__(self, steps: int, before: int = 0) -> None:
        self._steps, self._before, self._began = steps, before, time.monotonic()

    def left_s(self, done: int) -> float:
        """Seconds for the steps that are left, after `done` of them; 0 when all are."""
        return (time.monotonic() - self._began) / max(done - self._before, 1) * max(self._steps - done, 0)


class PlainLines:
    """One log line per step."""

    def __init__(self, steps: int, done: int = 0) -> None:
        self._steps, self._eta = steps, Eta(steps, done)

    def enter(self, phase: str) -> None:
        """Nothing is shown before the step is closed."""

    def leave(self) -> None:
        """Nothing is shown before the step is closed."""

    def show(self, shown: Shown) -> None:
        """Logs the step's line."""
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in shown.phases.items())
        left = clock(self._eta.left_s(shown.done))
        log.info("step %d/%d  %s  (%s)  %s left", shown.done, self._steps, numbers(shown.metrics), phases, left)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Logs the numbers."""
        log.info("%s", numbers(metrics))

    def close(self) -> None:
        """Lines need no end."""


class LiveView:
    """A panel that follows the run."""

    def __init__(self, title: str, steps: int, console: Console, done: int = 0) -> None:
        self._title, self._steps, self._eta = title, steps, Eta(steps, done)
        self._began = time.monotonic()
        self._phase, self._phase_began = "starting", self._began
        # What is drawn is replaced, never changed: the panel is drawn by a thread of its own.
        self._shown, self._noted = Shown(done=done, metrics={}, phases={}), dict[str, float]()
        self._history: dict[str, tuple[float, ...]] = {}
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)
        self._live.start()

    def enter(self, phase: str) -> None:
        """Names the phase in the panel."""
        self._phase, self._phase_began = phase, time.monotonic()

    def leave(self) -> None:
        """Between two phases."""
        self._phase, self._phase_began = "between phases", time.monotonic()

    def show(self, shown: Shown) -> None:
        """Takes over the step's numbers."""
        self._remember(shown.metrics)
        self._shown = shown

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keeps the numbers on the screen."""
        self._remember(metrics)
        self._noted = {**self._noted, **metrics}

    def close(self) -> None:
        """Leaves the last panel on the screen."""
        self._phase = "done" if self._shown.done >= self._steps else "stopped"
        self._live.stop()

    def _remember(self, metrics: Mapping[str, float]) -> None:
        seen = {name: (*self._history.get(name, ()), value)[-HISTORY:] for name, value in headline(metrics).items()}
        self._history = {**self._history, **seen}

    def _render(self) -> RenderableType:
        body = Group(self._progress(), Text(), self._numbers(), Text(), self._times())
        return Panel(body, title=Text(self._title, style="bold"), border_style="cyan", padding=(1, 2), width=96)

    def _progress(self) -> RenderableType:
        now, done = time.monotonic(), self._shown.done
        row = Table.grid(padding=(0, 2), expand=True)
        left = clock(self._eta.left_s(done)) if self._shown.metrics else "–"
        row.add_row(
            Text(f"step {done}/{self._steps}", style="bold"),
            ProgressBar(total=max(self._steps, 1), completed=done, width=28),
            Text(f"{self._phase} {now - self._phase_began:.0f} s", style="yellow"),
            Text(f"{clock(now - self._began)} gone, {left} left", style="dim", justify="right"),
        )
        return row

    def _numbers(self) -> RenderableType:
        table = Table.grid(padding=(0, 3))
        for name, value in headline({**self._shown.metrics, **self._noted}).items():
            table.add_row(
                Text(label(name), style="dim"),
                Text(number(value), style="bold", justify="right"),
                Text(spark(self._history[name]), style="cyan"),
            )
        return table

    def _times(self) -> RenderableType:
        table, phases = Table.grid(padding=(0, 3)), self._shown.phases
        longest = max(phases.values(), default=0.0)
        for name, seconds in phases.items():
            share = Bar(size=max(longest, 1e-9), begin=0, end=seconds, width=32, color="magenta")
            table.add_row(Text(name, style="dim"), Text(f"{seconds:.2f} s", justify="right"), share)
        return table


# ---- how numbers are written ----


def numbers(metrics: Mapping[str, float]) -> str:
    """The headline of some metrics as one line."""
    return "  ".join(f"{label(name)} {number(value)}" for name, value in headline(metrics).items())


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """The numbers of `FIRST` that are there, in that order, and every accuracy."""
    first = {name: metrics[name] for name in FIRST if name in metrics}
    return first | {name: value for name, value in metrics.items() if name.endswith("accuracy") and name not in first}


def label(name: str) -> str:
    """`tokens_per_second` as a person reads it."""
    return LABELS.get(name, name.replace("_", " "))


def number(value: float) -> str:
    """Four significant digits at most, and no trailing zeros."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are some."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def spark(values: Sequence[float]) -> str:
    """The course of a number as small bars; equal values lie in the middle, and what is not finite is left out."""
    finite = [v for v in values if abs(v) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low
    return "".join(SPARKS[round((v - low) / span * 7) if span else 3] for v in finite)
