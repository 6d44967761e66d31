"""What a broadcast over several ranks is held against: all-gathers of the same bytes, the engine's own loading, one parameter at a time."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rft
from rft.effects.runtime import runtime_of
from rft.ops import transfer
from rft.trainers import gathering
from rft.trainers.protocol import TensorSpec

REPEATS, MIB = 5, 2**20
BUCKETS = (256, 512, 1024)
"""MiB that travel together."""
REFUSALS = (RuntimeError, AttributeError, TypeError, KeyError, ValueError, AssertionError)
"""What an engine's own loading raises where it cannot be called again."""


def all_gathers(manifest: Sequence[TensorSpec], ranks: int, device: torch.device) -> dict[str, float]:
    """Milliseconds to all-gather what a manifest lists: tensor by tensor, in groups of tensors, and in pieces of each size."""
    parts = [torch.zeros(-(-spec.shape[0] // ranks), *spec.shape[1:], dtype=spec.dtype, device=device) for spec in manifest]
    whole = sum(part.nbytes for part in parts) * ranks
    found = {"tensors": median_ms(lambda: [_gathered(part, ranks) for part in parts])}
    if device.type == "cuda":  # gloo has no groups
        found["grouped_256_mib"] = median_ms(lambda: [_grouped(group, ranks) for group in _groups(parts, 256 * MIB // ranks)])
    parts.clear()
    return found | {f"pieces_{size}_mib": median_ms(_pieces(whole, size * MIB, ranks, device)) for size in BUCKETS}


def _gathered(part: Tensor, ranks: int) -> None:
    """Into memory that is let go again."""
    gathering.all_gather(part.new_empty(len(part) * ranks, *part.shape[1:]), part)


def _groups(parts: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    group, held = list[Tensor](), 0
    for part in parts:
        group, held = [*group, part], held + part.nbytes
        if held >= size:
            yield group
            group, held = [], 0
    if group:
        yield group


def _grouped(parts: Sequence[Tensor], ranks: int) -> None:
    """Nothing is packed: many all-gathers in one launch, each straight to where its tensor is to be."""
    manager: Any = getattr(dist.distributed_c10d, "_coalescing_manager")  # noqa: B009
    wholes = [part.new_empty(len(part) * ranks, *part.shape[1:]) for part in parts]
    with manager(device=parts[0].device, async_ops=True) as waiting:
        for whole, part in zip(wholes, parts, strict=True):
            dist.all_gather_into_tensor(whole, part)
    waiting.wait()


def _pieces(whole: int, size: int, ranks: int, device: torch.device) -> Callable[[], object]:
    """The same bytes as so many all-gathers in a row, into the same memory."""
    size = min(size, whole) // ranks * ranks
    into = torch.zeros(size, dtype=torch.uint8, device=device)
    own = torch.zeros(size // ranks, dtype=torch.uint8, device=device)
    return lambda: [gathering.all_gather(into, own) for _ in range(-(-whole // size))]


def by_bucket(state: Any) -> tuple[Any, dict[str, Any]]:
    """Broadcasts with buckets of each size, the stream alone and its loading, in ms; and what a broadcast takes of the device, measured
    and planned."""
    row: dict[str, Any] = {}
    usual, runtime = (gathering.BUCKET, transfer.BATCH), runtime_of(state)
    trainer, engine = runtime.trainer, runtime.engine

    def stream() -> Iterator[tuple[str, Tensor]]:
        return trainer.stream_weights(engine.casts_to, runtime.narrows)

    for size in BUCKETS:
        gathering.BUCKET, transfer.BATCH = size * MIB, 2 * size * MIB
        took, state = broadcasts(state)
        row[f"broadcast_{size}_mib_ms"] = round(statistics.median(took[1:]) * 1e3, 2)
        row[f"stream_{size}_mib_ms"] = median_ms(lambda: drain(stream()))
        row[f"load_{size}_mib_ms"] = median_ms(lambda: engine.load(stream()))
        state, row[f"peak_{size}_mib"] = _peak(state)
    gathering.BUCKET, transfer.BATCH = usual
    return state, row


def broadcasts(state: Any) -> tuple[list[float], Any]:
    """Seconds of each, the first one included."""
    took = list[float]()
    for _ in range(REPEATS + 1):
        began = synchronised()
        state = rft.broadcast(state)
        took.append(synchronised() - began)
    return took, state


def _peak(state: Any) -> tuple[Any, dict[str, float] | None]:
    from rft.effects.budget import sync_bucket

    if not torch.cuda.is_available():
        return state, None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    state = rft.broadcast(state)
    measured = torch.cuda.max_memory_allocated() - before
    return state, {"measured": round(measured / MIB), "planned": round(sync_bucket(runtime_of(state)) / MIB)}


def other_ways(runtime: Any) -> dict[str, float | str]:
    """Milliseconds of the engine's own loading, from our stream in one call, and of a parameter at a time: gathered, loaded, the next."""
    worker = runtime.engine._llm.collective_rpc(_itself)[0]
    model, trainer = worker.get_model(), runtime.trainer
    ways: dict[str, Callable[[], object]] = {
        "engine_loading_one_call_ms": lambda: model.load_weights(trainer.stream_weights(runtime.engine.casts_to)),
        "per_parameter_ms": lambda: [model.load_weights([item]) for item in one_by_one(trainer)],
    }
    found: dict[str, float | str] = {}
    for name, way in ways.items():
        try:
            with torch.inference_mode():
                found[name] = median_ms(way)
        except REFUSALS as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
            drain(one_by_one(trainer))  # whoever came further waits for as many collectives
    return found


def one_by_one(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    """As the common loop gathers: every parameter by itself, in the dtype that it is held in."""
    named = trainer._backend.root.named().items()
    if trainer.name == "fsdp2":
        with torch.inference_mode(False), torch.no_grad():
            yield from ((name, tensor.detach().full_tensor()) for name, tensor in named)
        return
    import deepspeed

    for name, tensor in named:
        with deepspeed.zero.GatheredParameters([tensor]):
            yield name, tensor.data


def drain(stream: Iterator[object]) -> None:
    """Reads it to its end."""
    for _ in stream:
        pass


def median_ms(way: Callable[[], object]) -> float:
    """Median wall-clock milliseconds of a call that all ranks begin together, devices included, after one that warms up."""
    seconds = list[float]()
    for _ in range(REPEATS + 1):
        dist.barrier()
        began = synchronised()
        _ = way()
        seconds.append(synchronised() - began)
    return round(statistics.median(seconds[1:]) * 1e3, 2)


def synchronised() -> float:
    """The time, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _itself(worker: Any) -> Any:
    return worker
