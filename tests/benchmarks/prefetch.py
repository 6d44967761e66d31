"""Whether a training step waits for its experience: a trace of one step, micro-batches coming one ahead and each when it is used.

    python -m tests.benchmarks.prefetch MODEL-FOLDER-TO-MAKE [SIZE] [ROWS]

From a profile of one step: how long copies from host to device run, how long of that no kernel runs beside them, and how
long the device is idle in all. Lines are appended to results/prefetch.jsonl. One CUDA device.
"""

import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

import rft
from rft import tree
from rft.models import find_model
from rft.parallel.world import open_world
from rft.trainers.passes import Passes
from tests.benchmarks.packing import random_batch
from tests.benchmarks.qwen import Size, random_model
from tests.benchmarks.record import append

BUDGET = 16384
Spans = list[tuple[float, float]]
T = TypeVar("T")


def main(folder: str, size: str = "0.5B", rows: str = "128") -> None:
    """Both ways, in one process, on the same trainer."""
    model, world = find_model(str(random_model(Path(folder), cast(Size, size)))), open_world(1, timeout_s=600)
    batch = random_batch(int(rows), model.config.vocab_size)
    trainer = rft.FSDP2Trainer(lr=0.0, micro_batch_tokens=BUDGET).build(model, world)
    old = trainer.logprobs(batch.tokens, batch.mask, batch.sampled, 1.0)
    for way, ahead in (("one ahead", Passes.ahead), ("when used", when_used)):
        with mock.patch.object(Passes, "ahead", ahead):
            _ = trainer.step(batch, old, rft.grpo())
            began = time.perf_counter()
            _ = trainer.step(batch, old, rft.grpo())
            seconds = time.perf_counter() - began
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                _ = trainer.step(batch, old, rft.grpo())
        row = {"size": size, "tokens": int(batch.mask.sum()), "way": way, "step_s": round(seconds, 4), **figures(seen.events())}
        append("prefetch", row)
        print(row, flush=True)
    torch.distributed.destroy_process_group()


def when_used(passes: Passes, parts: Iterable[T]) -> Iterator[T]:
    """Each part when it is asked for, from ordinary memory."""
    for part in parts:
        yield tree.tree_map(lambda tensor: tensor.to(passes.world.device), part)


def figures(events: Any) -> dict[str, float]:
    """Milliseconds of copies to the device, of those with no kernel beside them, and of an idle device between first and last kernel."""
    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(e.time_range.start, e.time_range.end) for e in on_device]
    copies = [span for span, e in zip(spans, on_device, strict=True) if "HtoD" in e.name]
    kernels = merged([span for span, e in zip(spans, on_device, strict=True) if "Memcpy" not in e.name and "Memset" not in e.name])
    idle = [(end, start) for (_, end), (start, _) in itertools.pairwise(kernels)]
    return {
        "copies": len(copies),
        "copies_ms": round(length(copies) / 1e3, 3),
        "copies_alone_ms": round((length(copies) - common(copies, kernels)) / 1e3, 3),
        "waiting_for_copies_ms": round(common(copies, idle) / 1e3, 3),
        "idle_ms": round(length(idle) / 1e3, 3),
        "busy_ms": round(length(kernels) / 1e3, 3),
    }


def merged(spans: Sequence[tuple[float, float]]) -> Spans:
    """Their union, in order."""
    result: Spans = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def length(spans: Iterable[tuple[float, float]]) -> float:
    """Microseconds in all."""
    return sum(end - start for start, end in spans)


def common(spans: Spans, others: Spans) -> float:
    """Microseconds that lie in both; `others` do not overlap."""
    return sum(max(0.0, min(end, e) - max(start, s)) for start, end in spans for s, e in others)


if __name__ == "__main__":
    main(*sys.argv[1:])
