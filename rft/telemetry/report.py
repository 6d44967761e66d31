"""`report.html`: one self-contained page about a run, made from the files of its folder alone.

`python -m rft.telemetry.report FOLDER` makes it again, for a run that was killed before it could.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rft.errors import RftError
from rft.telemetry.figures import curve, timeline
from rft.telemetry.live import clock, label, number
from rft.telemetry.memory import Compared, Peak, compared
from rft.telemetry.records import METRICS, PHASES, REPORT, SAMPLES, Phase, read_lines, read_plan, read_run, write_whole

TIMELINE_STEPS = 100
"""So many of the last steps are in the timeline: more bars than this are a smear."""
SHOWN_SAMPLES = 400
CURVES = ("reward", "accuracy", "length", "entropy", "kl", "engine_kl", "loss", "grad_norm", "clip_fraction", "tokens_per_second")
"""Curves that stand first, in this order; every other number follows."""


def write_report(folder: Path) -> Path:
    """Writes `report.html` into a run folder, aside and renamed, and returns its path. Raises `BadInput` for another folder."""
    page = folder / REPORT
    write_whole(page, _page(folder))
    return page


def _page(folder: Path) -> str:
    import jinja2
    from plotly.offline import get_plotlyjs

    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined).from_string(
        files("rft.telemetry").joinpath("report.html").read_text(encoding="utf-8")
    )
    run, metrics = read_run(folder), read_lines(folder / METRICS)
    phases = [Phase(**line) for line in read_lines(folder / PHASES)]
    samples = read_lines(folder / SAMPLES)
    names = _names(metrics)
    first_step = max((p.step for p in phases), default=0) - TIMELINE_STEPS + 1
    return template.render(
        run=run,
        facts=_facts(run, metrics),
        main=[(label(name), curve(metrics, name)) for name in names if name in CURVES],
        others=[(label(name), curve(metrics, name)) for name in names if name not in CURVES],
        timeline=timeline([p for p in phases if p.step >= first_step]),
        shortened=first_step > 0,
        timeline_steps=TIMELINE_STEPS,
        totals=_totals(phases),
        memory=_memory(read_plan(folder), phases),
        samples=_by_step(samples[-SHOWN_SAMPLES:]),
        left_out=max(len(samples) - SHOWN_SAMPLES, 0),
        plotly=get_plotlyjs(),
        number=number,
        gib=_gib,
    )


def _names(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for line in metrics for name in line if name not in ("step", "time_s"))
    return [*(name for name in CURVES if name in names), *(name for name in names if name not in CURVES)]


def _facts(run: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The run in a few figures: how far it came, and what reward and accuracy did."""
    facts = [("steps", f"{sum('seconds' in line for line in metrics)} of {run['steps']}")]
    facts += [(label(name), change) for name in ("accuracy", "reward") if (change := _change(metrics, name))]
    tokens = [line["tokens"] for line in metrics if line.get("tokens") is not None]
    facts += [("sampled tokens", f"{sum(tokens) * run['ranks']:,.0f}")] if tokens else []
    return [*facts, ("ranks", str(run["ranks"])), ("time", clock(metrics[-1]["time_s"] if metrics else 0.0))]


def _change(metrics: Sequence[Mapping[str, Any]], name: str) -> str | None:
    values = [line[name] for line in metrics if line.get(name) is not None]
    as_written = ".0%" if name == "accuracy" else ".2f"
    ends = values if len(values) < 2 else (values[0], values[-1])
    return " → ".join(f"{value:{as_written}}" for value in ends) or None


def _totals(phases: Sequence[Phase]) -> list[tuple[str, float, float]]:
    """(phase, seconds, share of all phases), the longest first."""
    seconds: dict[str, float] = {}
    for phase in phases:
        seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.end_s - phase.start_s
    whole = sum(seconds.values()) or 1.0
    return sorted(((name, total, total / whole) for name, total in seconds.items()), key=lambda row: -row[1])


def _memory(planned: Mapping[str, tuple[int, int]], phases: Sequence[Phase]) -> list[Compared]:
    """Planned and measured peaks."""
    seen = [(p.name, Peak(p.used_bytes, p.kept_bytes)) for p in phases if p.used_bytes is not None and p.kept_bytes is not None]
    return compared({phase: Peak(*peak) for phase, peak in planned.items()}, seen)


def _gib(peak: Peak | None) -> tuple[str, str]:
    """In use, and with what was kept."""
    return ("–", "–") if peak is None else (f"{peak.used / 2**30:,.2f}", f"{peak.kept / 2**30:,.2f}")


def _by_step(samples: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[Mapping[str, Any]]]]:
    """Samples under their steps, the newest step first."""
    steps: dict[int, list[Mapping[str, Any]]] = {}
    for sample in samples:
        steps.setdefault(sample["step"], []).append(sample)
    return sorted(steps.items(), reverse=True)


if __name__ == "__main__":
    try:
        print(write_report(Path(sys.argv[1] if len(sys.argv) == 2 else ".")))
    except RftError as error:
        sys.exit(str(error))
