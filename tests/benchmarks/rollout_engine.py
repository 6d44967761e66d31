"""One rollout engine by itself: new weights, both kinds of sleep, tokens per second, memory. Random weights, one device or a CPU.

    python -m tests.benchmarks.rollout_engine FOLDER-TO-MAKE [SIZE] [ENGINE] [PROMPTS] [TOKENS] [ATTENTION]

The trainer's side is a set of fp32 masters on the device. The ceiling of a sync is one cast-copy over the same bytes, from fp32 to the
engine's dtype. PROMPTS prompts of TOKENS tokens get TOKENS more each, with log-probs, at temperature 1. Medians of REPEATS after WARM_UPS.
Appends to results/rollout_engine.jsonl.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch

import rft
from rft.engines.delivery import shapes_of
from rft.engines.protocol import Engine, Request
from rft.models import find_model
from rft.parallel.world import open_world
from rft.testing.models import tiny_tokenizer
from tests.benchmarks.qwen import Size, config_of
from tests.benchmarks.record import append

WARM_UPS, REPEATS, MIB = 2, 7, 2**20
Masters = dict[str, torch.Tensor]


def main(folder: str, size: str = "0.5B", engine: str = "sglang", prompts: str = "256", tokens: str = "256", attention: str = "") -> None:
    """All rows, for one size."""
    config_of(cast(Size, size)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    world = open_world(1, timeout_s=600)
    cache = (8 << 30) if torch.cuda.is_available() else 1 << 28
    common: dict[str, Any] = {"max_model_len": 2 * int(tokens), "max_rows": int(prompts), "cache_bytes": cache}
    specs: dict[str, rft.EngineSpec] = {
        "sglang": rft.SGLangEngine(attention=attention or None, **common),
        "vllm": rft.VLLMEngine(**common),
    }
    row: dict[str, Any] = {"model": size, "engine": engine}
    began = time.perf_counter()
    built = specs[engine].build(find_model(folder), world)
    row["start_s"] = round(time.perf_counter() - began, 1)
    shapes = shapes_of(config_of(cast(Size, size)))
    masters = {names[0]: torch.randn(shape, device=world.device) * 0.02 for names, shape in shapes.items()}
    row |= synced(built, masters) | slept(built, masters) | sampled(built, int(prompts), int(tokens))
    for name, value in row.items():
        print(f"{name:34} {value}", flush=True)
    append("rollout_engine", row)
    built.close()


def synced(engine: Engine, masters: Masters) -> dict[str, Any]:
    """Milliseconds of new weights, with and without the checksums of what lies there, beside one cast-copy."""
    copies = [torch.empty_like(tensor, dtype=engine.dtype) for tensor in masters.values()]
    copy = median_ms(lambda: torch._foreach_copy_(copies, list(masters.values())))
    copies.clear()
    load = median_ms(lambda: engine.load(iter(masters.items())))
    verified = median_ms(lambda: load_and_verify(engine, masters))
    path = getattr(engine, "sync_path", None)
    return {
        "sync_path": path,
        "cast_copy_ms": copy,
        "load_ms": load,
        "load_and_verify_ms": verified,
        "over_copy": round(verified / copy, 2),
    }


def load_and_verify(engine: Engine, masters: Masters) -> None:
    """A broadcast's own part."""
    with torch.inference_mode():
        assert engine.load(iter(masters.items())) == engine.checksums()


def slept(engine: Engine, masters: Masters) -> dict[str, Any]:
    """Seconds and device memory of both kinds of sleep and of waking."""
    row = dict[str, Any]()
    for kind in ("release", "keep"):
        for _ in range(3):
            awake = device_mib()
            parts = {"sleep": seconds(lambda kind=kind: engine.sleep(kind))}
            asleep = device_mib()
            parts["wake_weights"] = seconds(engine.wake_weights)
            if kind == "release":
                load_and_verify(engine, masters)
            parts["wake_cache"] = seconds(engine.wake_cache)
        row[f"{kind}_s"], row[f"{kind}_mib"] = parts, {"awake": awake, "asleep": asleep}
    return row


def sampled(engine: Engine, prompts: int, tokens: int) -> dict[str, Any]:
    """Tokens per second; the first time is not counted."""
    engine.flush()
    asked = [Request(tokens=tuple((i * 7 + t) % 250 for t in range(tokens)), seed=i) for i in range(prompts)]
    rates = list[float]()
    for _ in range(4):
        began = time.perf_counter()
        count = sum(len(c.tokens) for c in engine.generate(asked, rft.Sampling(max_new_tokens=tokens)))
        rates.append(count / (time.perf_counter() - began))
        engine.flush()
    return {"tokens_per_s": round(statistics.median(rates[1:]), 1)}


def median_ms(way: Callable[[], object]) -> float:
    """Median wall-clock milliseconds, device included."""
    for _ in range(WARM_UPS):
        _ = way()
    return round(statistics.median(seconds(way) for _ in range(REPEATS)) * 1e3, 3)


def seconds(way: Callable[[], object]) -> float:
    """Wall-clock seconds of one call, device included."""
    _settle()
    began = time.perf_counter()
    _ = way()
    _settle()
    return round(time.perf_counter() - began, 6)


def device_mib() -> float | None:
    """Device memory in use, by anybody, in MiB; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    _settle()
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / MIB)


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
