"""Where the time of a call goes: by function on the thread that makes it, and on the device."""

import cProfile
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.prefetch import length, merged

SHOWN = 12
"""Functions in a row of results: those that take most of the thread's time by themselves, and those with most below them."""


def on_the_host(call: Callable[[], object]) -> dict[str, Any]:
    """Seconds of each function, by itself and with what it calls. A profile makes small functions look dearer than they are."""
    profiler = cProfile.Profile()
    began = time.perf_counter()
    _ = profiler.runcall(call)
    took = time.perf_counter() - began
    found: Any = pstats.Stats(profiler)
    functions = {
        f"{_short(file)}:{line} {name}" if line else name: (calls, round(own, 3), round(below, 3))
        for (file, line, name), (_, calls, own, below, _) in found.stats.items()
    }
    by_own = sorted(functions.items(), key=lambda item: -item[1][1])[:SHOWN]
    by_all = sorted(functions.items(), key=lambda item: -item[1][2])[: 2 * SHOWN]
    return {"profiled_s": round(took, 3), "calls_own_and_all": dict(by_own), "calls_own_and_all_with_most_below": dict(by_all)}


def on_the_device(call: Callable[[], object]) -> dict[str, Any]:
    """Seconds of a call, and those in which the device computes or copies."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        began = time.perf_counter()
        _ = call()
        took = time.perf_counter() - began
    spans = [(e.time_range.start, e.time_range.end) for e in seen.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    return {"traced_s": round(took, 3), "device_busy_s": round(length(merged(spans)) / 1e6, 3)}


def _short(file: str) -> str:
    """The last three parts of a path."""
    return "/".join(Path(file).parts[-3:])
