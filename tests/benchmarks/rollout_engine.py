"""One rollout engine by itself: new weights, both kinds of sleep, tokens per second, memory. Random weights, one device or a CPU.

    python -m tests.benchmarks.rollout_engine FOLDER-TO-MAKE [SIZE] [ENGINE] [PROMPTS] [TOKENS] [alone]

The trainer's side is a set of fp32 masters on the device. The ceiling of a sync is one cast-copy over the same bytes, from fp32 to the
engine's dtype. PROMPTS prompts of TOKENS tokens get TOKENS more each, with log-probs, at temperature 1. Medians of REPEATS after WARM_UPS.
With SGLang a second one stands beside it, without the library (`bare_sglang`), unless it is to be alone. RFT_BENCHMARK_ATTENTION is
SGLang's attention backend.
Appends to results/rollout_engine.jsonl.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch

import rft
from rft.engines.delivery import shapes_of
from rft.engines.protocol import Engine, Request
from rft.models import ModelFolder, find_model
from rft.parallel.world import World, open_world
from rft.testing.models import tiny_tokenizer
from tests.benchmarks.bare_sglang import Bare
from tests.benchmarks.qwen import Size, config_of
from tests.benchmarks.record import append
from tests.benchmarks.turns import my_turn

WARM_UPS, REPEATS, ROUNDS, MIB = 2, 7, 5, 2**20
Masters = dict[str, torch.Tensor]


def main(folder: str, size: str = "0.5B", engine: str = "sglang", prompts: str = "256", tokens: str = "256", beside: str = "bare") -> None:
    """All rows, for one size."""
    config_of(cast(Size, size)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    world = open_world(1, timeout_s=600)
    cache = (8 << 30) if torch.cuda.is_available() else 1 << 28
    common: dict[str, Any] = {"max_model_len": 2 * int(tokens), "max_rows": int(prompts), "cache_bytes": cache}
    specs: dict[str, rft.EngineSpec] = {
        "sglang": rft.SGLangEngine(attention=os.environ.get("RFT_BENCHMARK_ATTENTION"), **common),
        "vllm": rft.VLLMEngine(**common),
    }
    row: dict[str, Any] = {"model": size, "engine": engine, "prompts": int(prompts), "tokens": int(tokens)}
    model, began = find_model(folder), time.perf_counter()
    built = specs[engine].build(model, world)
    row["start_s"] = round(time.perf_counter() - began, 1)
    other = None if engine == "vllm" or beside == "alone" else Bare(*bare_options(specs[engine], model, world))
    my_turn(world)
    shapes = {names[0]: shape for names, shape in shapes_of(config_of(cast(Size, size))).items()}
    masters = {name: torch.randn(shape, device=world.device) * 0.02 for name, shape in shapes.items()}
    for found in (lambda: synced(built, masters), lambda: slept(built, masters), lambda: sampled(built, other, int(prompts), int(tokens))):
        row |= shown(found())
    masters.clear()
    built.close()
    row |= shown({"without_it_mib": device_mib()})
    if other is not None:
        row |= shown(other.ask(verb="load", shapes=shapes))
        row |= shown(other.ask(verb="sleep")) if world.device.type == "cuda" else {}
        other.close()
    append("rollout_engine", row)


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """The same; printed at once, so that it is there whatever comes after it."""
    for name, value in row.items():
        print(f"{name:34} {value}", flush=True)
    return row


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


def sampled(engine: Engine, other: Bare | None, prompts: int, tokens: int) -> dict[str, Any]:
    """Tokens per second of five calls, in turn with those of a bare engine with and without log-probs; the first ones are not counted."""
    asked = [Request(tokens=tuple((i * 7 + t) % 250 for t in range(tokens)), seed=i) for i in range(prompts)]
    rates: dict[str, list[float]] = {"tokens_per_s": []}
    for _ in range(ROUNDS + 1):
        engine.flush()
        began = time.perf_counter()
        count = sum(len(c.tokens) for c in engine.generate(asked, rft.Sampling(max_new_tokens=tokens)))
        rates["tokens_per_s"].append(count / (time.perf_counter() - began))
        for name, logprobs in (("bare_tokens_per_s", True), ("bare_without_logprobs_tokens_per_s", False)) if other else ():
            found = other.ask(
                verb="generate",
                prompts=[request.tokens for request in asked],
                parameters={"max_new_tokens": tokens, "ignore_eos": True},
                logprobs=logprobs,
            )
            rates.setdefault(name, []).append(found["tokens"] / found["seconds"])
    return {name: round(statistics.median(each[1:]), 1) for name, each in rates.items()}


def bare_options(spec: Any, model: ModelFolder, world: World) -> tuple[dict[str, Any], dict[str, str]]:
    """What `spec` starts SGLang with, less what is the library's own; and its environment."""
    from rft.engines import sglang_options, sglang_process

    given = sglang_options.settings(spec, model, world, [])
    options = {name: value for name, value in given["options"].items() if name not in ("custom_weight_loader", "sleep_on_idle")}
    port = sglang_process.free_port()
    return {**options, "port": port, "nccl_port": port}, given["environment"]


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
