"""FSDP2 over two GPUs and vLLM on the same two, as one TP group and as two DP engines: broadcasts, sampling, and the log-prob gap.

    torchrun --nproc-per-node 2 -m tests.benchmarks.two_gpus FOLDER-TO-MAKE SIZE TP

The ceiling of a broadcast is measured in the same run: an all-gather of the same bytes, in the engine's dtype and in the trainer's.
Lines are appended to results/two_gpus.jsonl by rank 0.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

import rft
from rft.data.prompts import Cursor, Share, next_prompts, tokenise
from rft.data.questions import Question
from rft.effects.runtime import runtime_of
from rft.models import find_model
from tests.benchmarks.qwen import Size, random_model
from tests.benchmarks.record import append

RANK = int(os.environ.get("RANK", "0"))
REPEATS = 5
SAMPLING = rft.Sampling(samples=8, max_new_tokens=128)


def main(folder: str, size: str, tensor_parallel: str) -> None:
    """One layout: on CUDA vLLM starts once in a process."""
    if RANK == 0:
        _ = random_model(Path(folder), cast(Size, size))
    while not (Path(folder) / "tokenizer_config.json").is_file():  # what is written last
        time.sleep(0.2)
    row = measured(folder, size, int(tensor_parallel))
    if RANK == 0:
        append("two_gpus", {"model": size, "tensor_parallel": int(tensor_parallel), **row})
        print(row, flush=True)


def measured(model: str, size: str, tp: int) -> dict[str, Any]:
    """One layout: its broadcasts, its sampling, and how far engine and Actor are apart."""
    cuda = torch.cuda.is_available()
    engine = rft.VLLMEngine(max_model_len=256, cache_bytes=4 << 30 if cuda else 1 << 26, eager=size == "7B")
    trainer = rft.FSDP2Trainer(lr=0.0, keep_gathered=size != "7B", gradient_checkpointing=size == "7B")
    spec = rft.LaunchSpec(model=model, engine=engine, trainer=trainer, tensor_parallel=tp, deadline_s=300)
    data = tokenise([Question(id=i, text=f"What is {i} + 7?", answer="0") for i in range(64)], find_model(model).tokenizer, max_tokens=128)
    with rft.launch(spec) as state:
        world = runtime_of(state).world
        if size == "7B":  # moments and a broadcast's buckets do not both fit beside the engine's start
            state = rft.offload(state, rft.ACTOR_OPTIMIZER)
        broadcasts = list[float]()
        for _ in range(REPEATS + 1):
            began = synchronised()
            state = rft.broadcast(state)
            broadcasts.append(synchronised() - began)
        row: dict[str, Any] = {"broadcast_ms": round(statistics.median(broadcasts[1:]) * 1e3, 2), "first_ms": round(broadcasts[0] * 1e3, 2)}
        row |= ceilings(runtime_of(state).trainer.manifest(), world.size, world.device)
        state = rft.wake(state)
        prompts, _ = next_prompts(data, Cursor(), 8, Share(index=world.rank, count=world.size))
        _ = rft.generate(state, prompts, SAMPLING)
        began = synchronised()
        rollouts = rft.generate(state, prompts, SAMPLING, draw=1)
        took = synchronised() - began
        row["tokens_per_s"] = round(int(rollouts.sampled.sum()) * world.size / took)
        state = rft.compute_old_logprobs(rft.sleep(state), rollouts)
        old = state.old.batches[0].values
        assert old is not None
        gaps = (old - rollouts.logprobs)[rollouts.sampled].abs()
        row |= {"gap_mean": float(gaps.mean()), "gap_max": float(gaps.max())}
    return row


def ceilings(manifest: Any, ranks: int, device: torch.device) -> dict[str, float]:
    """Milliseconds to all-gather what is streamed, tensor by tensor, in bf16 and in the trainer's dtype."""
    found = dict[str, float]()
    for name, dtype in (("bf16", torch.bfloat16), ("trainer", None)):
        parts = [torch.empty(-(-spec.shape[0] // ranks), *spec.shape[1:], dtype=dtype or spec.dtype, device=device) for spec in manifest]
        found[f"all_gather_{name}_ms"] = round(median_ms(lambda parts=parts: [gather(part, ranks) for part in parts]), 2)
        del parts
    return found


def gather(part: torch.Tensor, ranks: int) -> None:
    """One all-gather into memory that is let go again."""
    whole = part.new_empty(len(part) * ranks, *part.shape[1:])
    all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
    all_gather(whole, part)


def median_ms(way: Callable[[], object]) -> float:
    """Median wall-clock milliseconds, devices included."""
    seconds = list[float]()
    for _ in range(REPEATS + 1):
        began = synchronised()
        _ = way()
        seconds.append(synchronised() - began)
    return statistics.median(seconds[1:]) * 1e3


def synchronised() -> float:
    """The time, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main(*sys.argv[1:])
