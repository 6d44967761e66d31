"""A step and a scoring pass of the FSDP2 trainer with packed rows, and with the same rows padded, in one process.

    python -m tests.benchmarks.packing MODEL-FOLDER-TO-MAKE [SIZE] [ROWS]

Lengths are as uneven as responses are: most are short, a few as long as can be. Lines are appended to results/packing.jsonl.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch

import rft
from rft.models import find_model
from rft.parallel.world import World, open_world
from rft.trainers import packed
from tests.benchmarks.qwen import Size, random_model
from tests.benchmarks.record import append

LONGEST, BUDGET, REPEATS = 2048, 16384, 5


def main(folder: str, size: str = "0.5B", rows: str = "128") -> None:
    """Both layouts."""
    model, world = find_model(str(random_model(Path(folder), cast(Size, size)))), open_world(1, timeout_s=600)
    batch = random_batch(int(rows), model.config.vocab_size)
    seen = {"packed": measured(model, world, batch)}
    with refusing_to_pack():
        seen["padded"] = measured(model, world, batch)
    for layout, figures in seen.items():
        row = {"size": size, "rows": len(batch), "tokens": int(batch.mask.sum()), "cells": batch.mask.numel(), "layout": layout, **figures}
        append("packing", row)
        print(row, flush=True)
    torch.distributed.destroy_process_group()


def measured(model: Any, world: World, batch: rft.Minibatch) -> dict[str, float]:
    """Seconds (median of a few) and peak memory in GiB of a scoring pass and of a step at learning rate 0."""
    trainer = rft.FSDP2Trainer(lr=0.0, micro_batch_tokens=BUDGET).build(model, world)
    old = trainer.logprobs(batch.tokens, batch.mask, batch.sampled, 1.0)
    score = timed(lambda: trainer.logprobs(batch.tokens, batch.mask, batch.sampled, 1.0))
    step = timed(lambda: trainer.step(batch, old, rft.grpo()))
    trainer.close()
    return {**{f"score_{name}": value for name, value in score.items()}, **{f"step_{name}": value for name, value in step.items()}}


def timed(call: Callable[[], object]) -> dict[str, float]:
    """One call to warm up, then the median of some, and the most memory that was in use."""
    call()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = list[float]()
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()  # what it returns lies on the host, so it has ended
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")
    return {"s": statistics.median(seconds), "peak_gib": peak}


def random_batch(rows: int, vocab: int) -> rft.Minibatch:
    """A short prompt and a response of uneven length in each row."""
    draw = torch.Generator().manual_seed(0)
    lengths = (LONGEST * torch.rand(rows, generator=draw) ** 2).long().clamp(min=80)
    columns = torch.arange(int(lengths.max()))
    mask = columns < lengths[:, None]
    sampled = mask & (columns >= 64)
    tokens = torch.randint(0, vocab, mask.shape, generator=draw)
    return rft.take(
        rft.Experience(
            batches=(rft.BatchId("random"),),
            origin=torch.zeros(rows, dtype=torch.int64),
            rows=torch.arange(rows),
            tokens=tokens,
            mask=mask,
            sampled=sampled,
            logprobs=torch.where(sampled, -11.9, 0.0),
            groups=torch.arange(rows) // 8,
            rewards=torch.zeros(rows),
            advantages=torch.randn(rows, 1, generator=draw) * sampled,
            temperature=torch.ones(rows),
            demonstrated=torch.zeros(rows, dtype=torch.bool),
        ),
        torch.arange(rows),
    )


@contextlib.contextmanager
def refusing_to_pack() -> Generator[None]:
    """Within it, trainers are built as for a model whose rows cannot be packed."""

    def refuse(_: Any) -> None:
        raise packed.CannotPack("this is to be measured")

    with mock.patch.object(packed, "prepare", refuse):
        yield


if __name__ == "__main__":
    main(*sys.argv[1:])
