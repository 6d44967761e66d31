"""New weights for vLLM, six ways in one run, and its sleep: time and memory of every level. One CUDA device, random weights.

    python -m tests.benchmarks.sync FOLDER-TO-MAKE [SIZE]

The trainer's side is a set of fp32 masters on the device, as FSDP2 holds them on one rank. The ceiling is one cast-copy over the same
bytes, from fp32 to the engine's bfloat16. Every figure is the median of REPEATS, after WARM_UPS. Appends to results/sync.jsonl.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch

import rft
from rft.engines.delivery import shapes_of
from rft.engines.vllm import VLLM
from rft.models import find_model
from rft.ops import transfer as transfer_module
from rft.ops.checksum import checksum
from rft.ops.transfer import standing, transfer
from rft.parallel.world import open_world
from rft.testing.models import tiny_tokenizer
from tests.benchmarks.qwen import Size, config_of
from tests.benchmarks.record import append
from tests.benchmarks.turns import my_turn

WARM_UPS, REPEATS, MIB = 2, 7, 2**20
BATCHES = (128, 256, 512, 1024, 4096)
"""MiB of sources that `transfer` waits for before it launches."""
Masters = dict[str, torch.Tensor]


def main(folder: str, size: str = "0.5B") -> None:
    """All rows, for one size."""
    config_of(cast(Size, size)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    world = open_world(1, timeout_s=600)
    spec = rft.VLLMEngine(max_model_len=1024, max_rows=64, cache_bytes=4 << 30, eager=size == "7B")
    engine: Any = spec.build(find_model(folder), world)
    assert isinstance(engine, VLLM)
    my_turn(world)
    check_kernel()
    masters: Masters = {
        names[0]: torch.randn(shape, device="cuda") * 0.02 for names, shape in shapes_of(config_of(cast(Size, size))).items()
    }
    row = {"model": size, "tensors": len(masters), "bytes_fp32": sum(t.nbytes for t in masters.values()), "sync_path": engine.sync_path}
    row |= {f"{name}_ms": took for name, took in broadcasts(engine, masters).items()}
    row |= forms(engine, masters)
    row |= sleeps(engine, masters)
    row["broadcast_over_copy"] = round(row["rft_load_and_verify_ms"] / row["cast_copy_ms"], 3)
    for name, value in row.items():
        print(f"{name:34} {value}")
    append("sync", row)
    engine.close()


def check_kernel() -> None:
    """The one-pass kernel gives the bits and the checksums of torch's own operators."""
    _many_at_once()
    for count in (1, 5, 4093 * 4, 1_000_000):
        for target in (torch.bfloat16, torch.float16, torch.float32):
            source, place = torch.randn(count, device="cuda"), torch.zeros(count, dtype=target, device="cuda")
            read = int(transfer([(place, source)]))
            assert torch.equal(place, source.to(target)), (count, target)
            assert read == int(checksum(place)) == int(standing([place])), (count, target)


def _many_at_once() -> None:
    """Tensors of all sizes in one launch, odd ones among them."""
    sources = [torch.randn(count, device="cuda") for count in (4, 3, 2**15, 2**15 + 4, 2**16, 2**16 + 4, 3_000_000, 7)]
    pairs = [(torch.zeros_like(source, dtype=torch.bfloat16), source) for source in sources]
    read = transfer(pairs).tolist()
    assert read == [int(checksum(source.bfloat16())) for source in sources]
    assert read == standing([target for target, _ in pairs]).tolist()


def broadcasts(engine: VLLM, masters: Masters) -> dict[str, float]:
    """Milliseconds of each way to the same weights."""
    worker: Any = engine._llm.collective_rpc(_itself)[0]
    model: Any = worker.get_model()
    plan: Any = getattr(engine._sync, "_plan", None)
    copies = [torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in masters.values()]
    ways: dict[str, Callable[[], object]] = {
        "cast_copy": lambda: torch._foreach_copy_(copies, list(masters.values())),
        "rft_load": lambda: engine.load(iter(masters.items())),
        "rft_load_and_verify": lambda: load_and_verify(engine, masters),
        "load_weights_one_call": lambda: model.load_weights(iter(masters.items())),
        "load_weights_per_parameter": lambda: [model.load_weights([item]) for item in masters.items()],
        "reload_weights": lambda: worker.reload_weights(weights_iterator=iter(masters.items())),
    }
    if plan is not None:
        ways["plan_without_checksums"] = lambda: replay(plan, masters)
    took = dict[str, float]()
    for name, way in ways.items():
        try:
            took[name] = round(median_ms(way), 3)
        except (RuntimeError, AttributeError, TypeError, KeyError, ValueError, AssertionError) as error:
            print(f"{name} could not be run: {type(error).__name__}: {error}")
        if name == "cast_copy":
            copies.clear()
    load_and_verify(engine, masters)
    return took


def load_and_verify(engine: VLLM, masters: Masters) -> None:
    """A broadcast's own part: install, and compare checksums with what lies in the engine."""
    with torch.inference_mode():
        assert engine.load(iter(masters.items())) == engine.checksums()


def forms(engine: VLLM, masters: Masters) -> dict[str, Any]:
    """Milliseconds of installing and of reading again by other forms of the kernel (`sync_kernels`), and with other batches."""
    plan: Any = getattr(engine._sync, "_plan", None)
    if plan is None:
        return {}
    from tests.benchmarks import sync_kernels

    row, usual = dict[str, Any](), transfer_module.BATCH
    for size in BATCHES:
        transfer_module.BATCH = size << 20
        row[f"rft_load_and_verify_{size}_mib_ms"] = round(median_ms(lambda: load_and_verify(engine, masters)), 3)
    transfer_module.BATCH = usual
    with torch.inference_mode():
        pairs = [(copy.target, copy.source(tensor)) for name, tensor in masters.items() for copy in plan._copies[plan._aliases[name]]]
        row["kernel_ms"] = {name: round(took, 3) for name, took in sync_kernels.forms(pairs, median_ms).items()}
    load_and_verify(engine, masters)
    return row


def replay(plan: Any, masters: Masters) -> None:
    """The plan's copies alone."""
    targets, sources = list[torch.Tensor](), list[torch.Tensor]()
    with torch.inference_mode():
        for name, tensor in masters.items():
            for copy in plan._copies[plan._aliases[name]]:
                targets.append(copy.target)
                sources.append(copy.source(tensor))
        torch._foreach_copy_(targets, sources)


def sleeps(engine: VLLM, masters: Masters) -> dict[str, Any]:
    """Seconds and device memory of both kinds of sleep and of waking, the first time and later; and a whole turn."""
    row = dict[str, Any]()
    for kind in ("release", "keep"):
        for turn in ("first", "later", "last"):
            before = device_mib()
            parts = {"sleep": seconds(lambda kind=kind: engine.sleep(kind))}
            asleep = device_mib()
            parts["wake_weights"] = seconds(engine.wake_weights)
            weights = device_mib()
            if kind == "release":
                parts["load_and_verify"] = seconds(lambda: load_and_verify(engine, masters))
            parts["wake_cache"] = seconds(engine.wake_cache)
            parts["all"] = round(sum(parts.values()), 4)
            row[f"{kind}_{turn}_s"] = parts
            row[f"{kind}_mib"] = {"awake": before, "asleep": asleep, "weights_awake": weights, "awake_again": device_mib()}
    return row


def median_ms(way: Callable[[], object]) -> float:
    """Median wall-clock milliseconds, device included."""
    for _ in range(WARM_UPS):
        _ = way()
    return statistics.median(seconds(way) for _ in range(REPEATS)) * 1e3


def seconds(way: Callable[[], object]) -> float:
    """Wall-clock seconds of one call, device included."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    _ = way()
    torch.cuda.synchronize()
    return round(time.perf_counter() - began, 6)


def device_mib() -> float:
    """Device memory in use, by anybody, in MiB."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def _itself(worker: Any) -> Any:
    return worker


if __name__ == "__main__":
    main(*sys.argv[1:])
