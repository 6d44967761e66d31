"""Both training backends on the same batch: what they learn, how fast, in how much memory, and how fast their weights stream.

    torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.backends FOLDER-TO-MAKE [SIZE] [BACKEND;BACKEND;…] [DTYPE;DTYPE]

Each backend, in fp32 and in bfloat16, takes STEPS supervised steps on one batch of random tokens, goes to the host and back (the same
bits must come back), and gives its weights away. The ceiling of a stream is one all-gather, or on one rank and where nothing is sharded
one copy on the device, of the same bytes. Losses are compared with FSDP2's. One line each in results/backends.jsonl, by rank 0.
"""

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from rft.experience import Experience, Minibatch, take
from rft.models import ModelFolder, find_model
from rft.objectives import supervised
from rft.ops.checksum import checksum
from rft.parallel.world import World, open_world
from rft.spec import DeepSpeedTrainer, FSDP2Trainer, TrainerSpec
from rft.state import BatchId
from rft.trainers import gathering
from tests.benchmarks.qwen import Size, random_model
from tests.benchmarks.record import append

STEPS, REPEATS, ROWS, LENGTH, MIB = 10, 5, 8, 512, 2**20
NAMES = ("fsdp2", "zero 1", "zero 2", "zero 3", "zero 2, offloaded", "zero 3, offloaded")
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative, of a loss after up to STEPS steps, between backends."""


def main(folder: str, size: str = "0.5B", names: str = ";".join(NAMES), dtypes: str = "float32;bfloat16") -> None:
    """All rows of one model; backends and dtypes are parted by semicolons."""
    world = open_world(1, timeout_s=1200)
    torch.manual_seed(0)
    if world.rank == 0:
        _ = random_model(Path(folder), cast(Size, size))
    _ = dist.barrier(group=world.host)
    model = find_model(folder)
    rows: list[dict[str, Any]] = []
    for dtype in dtypes.split(";"):
        for name in names.split(";"):
            row = {"model": size, "backend": name, "dtype": dtype, "ranks": world.size, **measured(name, dtype, model, world)}
            rows.append(row | compared(row, rows))
            if world.rank == 0:
                print(rows[-1], flush=True)
                append("backends", rows[-1])
    dist.destroy_process_group()
    apart = [f"{row['backend']} in {row['dtype']}" for row in rows if not row["same_losses"]]
    assert not apart, f"losses differ from FSDP2's: {', '.join(apart)}"


def specification(name: str, dtype: Any) -> TrainerSpec:
    """That of a backend by name."""
    options: dict[str, Any] = {"dtype": dtype, "lr": 1e-5, "micro_batch_tokens": 2 * LENGTH}
    if name == "fsdp2":
        return FSDP2Trainer(**options)
    stage: Any = int(name.split()[1].strip(","))
    return DeepSpeedTrainer(stage=stage, offload_optimizer="offloaded" in name, **options)


def measured(name: str, dtype: str, model: ModelFolder, world: World) -> dict[str, Any]:
    """Everything about one backend."""
    forget_peak()
    began = time.perf_counter()
    trainer: Any = specification(name, dtype).build(model, world)
    row: dict[str, Any] = {"build_s": round(time.perf_counter() - began, 2), "build_peak_mib": peak_mib()}
    row |= {"model_mib": trainer.bytes("model") // MIB, "optimizer_mib": trainer.bytes("optimizer") // MIB}
    forget_peak()
    row |= learned(trainer, random_batch(world))
    row["peak_mib"] = peak_mib()
    row |= moved(trainer) | streamed(trainer, world, sharded=name == "fsdp2" or "3" in name)
    trainer.close()
    del trainer
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def learned(trainer: Any, batch: Minibatch) -> dict[str, Any]:
    """Losses, and the median seconds of a step; the first two warm up."""
    losses, took = list[float](), list[float]()
    for _ in range(STEPS):
        took.append(seconds(lambda: losses.append(trainer.step(batch, None, supervised())["loss"])))
    return {"losses": [round(loss, 6) for loss in losses], "step_s": round(statistics.median(took[2:]), 4)}


def moved(trainer: Any) -> dict[str, Any]:
    """To the host and back, twice; what streams from the host, and after, must be what was there before."""
    before = checksums(trainer)
    row: dict[str, Any] = {}
    for turn in ("first", "later"):
        parts = ("optimizer", "model")
        row[f"offload_{turn}_s"] = {part: seconds(lambda part=part: trainer.offload(part)) for part in parts}
        row[f"away_mib_{turn}"] = allocated_mib()
        assert checksums(trainer) == before, "what is read from the host differs"
        row[f"reload_{turn}_s"] = {part: seconds(lambda part=part: trainer.reload(part)) for part in reversed(parts)}
        assert checksums(trainer) == before, "what came back differs"
    return row


def streamed(trainer: Any, world: World, *, sharded: bool) -> dict[str, Any]:
    """Milliseconds to exhaust the stream, beside one collective or copy of the same bytes."""
    size = sum(tensor.nbytes for _, tensor in trainer.stream_weights())
    stream = median_ms(lambda: drain(trainer))
    ceiling = median_ms(all_gather(size, world) if sharded and world.size > 1 else copy(size, world))
    return {"stream_bytes": size, "stream_ms": stream, "ceiling_ms": ceiling, "stream_over_ceiling": round(stream / ceiling, 3)}


def all_gather(size: int, world: World) -> Callable[[], object]:
    """One all-gather that makes `size` bytes on every rank."""
    own = torch.zeros(-(-size // world.size), dtype=torch.uint8, device=world.device)
    whole = own.new_empty(len(own) * world.size)
    return lambda: gathering.all_gather(whole, own)


def copy(size: int, world: World) -> Callable[[], object]:
    """One copy of `size` bytes on the device."""
    source = torch.zeros(size, dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def compared(row: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """How far the losses are from FSDP2's in the same dtype, relative, at most."""
    like = [other for other in others if (other["backend"], other["dtype"]) == ("fsdp2", row["dtype"])]
    if not like:
        return {"loss_distance": None, "same_losses": True}
    far = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], like[0]["losses"], strict=True))
    return {"loss_distance": float(f"{far:.2e}"), "same_losses": math.isfinite(far) and far < TOLERANCE[row["dtype"]]}


def random_batch(world: World) -> Minibatch:
    """This rank's ROWS rows of LENGTH tokens, the second half sampled: the same for every backend."""
    draw = torch.Generator().manual_seed(world.rank)
    tokens = torch.randint(0, 250, (ROWS, LENGTH), generator=draw)
    sampled = (torch.arange(LENGTH) >= LENGTH // 2).expand(ROWS, LENGTH)
    nothing = torch.zeros(ROWS, LENGTH)
    source = Experience(
        batches=(BatchId("benchmark"),),
        origin=torch.zeros(ROWS, dtype=torch.int64),
        rows=torch.arange(ROWS) + world.rank * ROWS,
        tokens=tokens,
        mask=torch.ones_like(sampled),
        sampled=sampled,
        logprobs=nothing,
        groups=torch.arange(ROWS),
        rewards=torch.zeros(ROWS),
        advantages=nothing,
        temperature=torch.ones(ROWS),
        demonstrated=torch.zeros(ROWS, dtype=torch.bool),
    )
    return take(source, torch.arange(ROWS))


def checksums(trainer: Any) -> list[int]:
    """Of every tensor of the stream."""
    return [int(checksum(tensor)) for _, tensor in trainer.stream_weights()]


def drain(trainer: Any) -> None:
    """Reads the stream to its end."""
    for _ in trainer.stream_weights():
        pass


def median_ms(way: Callable[[], object]) -> float:
    """Median milliseconds of a call after one that warms up."""
    _ = way()
    return round(statistics.median(seconds(way) for _ in range(REPEATS)) * 1e3, 3)


def seconds(way: Callable[[], object]) -> float:
    """Wall-clock seconds of one call that all ranks begin together, the device's work included."""
    _settle()
    _ = dist.barrier()
    began = time.perf_counter()
    _ = way()
    _settle()
    return round(time.perf_counter() - began, 6)


def peak_mib() -> float | None:
    """The most that tensors took on the device since `forget_peak`; None on a CPU."""
    return round(torch.cuda.max_memory_allocated() / MIB) if torch.cuda.is_available() else None


def allocated_mib() -> float | None:
    """What tensors take on the device now; None on a CPU."""
    return round(torch.cuda.memory_allocated() / MIB) if torch.cuda.is_available() else None


def forget_peak() -> None:
    """Begins to look for a peak anew."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
