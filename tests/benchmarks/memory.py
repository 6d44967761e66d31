"""A memory plan beside what a run really takes, phase by phase.

    torchrun --nproc-per-node 1 -m tests.benchmarks.memory MODEL-FOLDER-TO-MAKE SIZE NAME [vllm|sglang|transformers] [LENGTH]

NAME is one of SETTINGS below; prompts and responses have LENGTH tokens each. Two batches go through every phase; each phase's planned peak
stands beside the measured one, and a line is appended to results/memory.jsonl.
"""

import dataclasses as dc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

import rft
from rft.effects import budget
from rft.memory import Schedule, Setting, plan
from rft.memory.table import rendered
from rft.telemetry.memory import Peak, compared
from tests.benchmarks.qwen import Size, random_model
from tests.benchmarks.record import append

MIB, GIB = 1 << 20, 1 << 30
CUDA = torch.cuda.is_available()
LENGTH, PROMPTS, SAMPLES = (256, 16, 8) if CUDA else (32, 2, 2)
THRIFTY: dict[str, Any] = {"keep_gathered": False, "gradient_checkpointing": True}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], Schedule]] = {
    "plain": ({}, {}, Schedule()),
    "reference": ({"reference": rft.Reference()}, {}, Schedule()),
    "thrifty": ({}, THRIFTY, Schedule()),
    "thrifty, reference": ({"reference": rft.Reference()}, THRIFTY, Schedule()),
    "thrifty, reference, offloaded": ({"reference": rft.Reference()}, THRIFTY, Schedule(offload_optimizer=True)),
}
"""What is launched beside, how it is trained, and what the loop moves."""
SEEN: list[dict[str, Any]] = []


def main(folder: str, size: str, name: str, engine: str = "vllm", length: str = str(LENGTH)) -> None:
    """Plans, runs, and compares."""
    model = str(random_model(Path(folder), cast(Size, size)))
    setting = setting_of(model, name, engine, int(length))
    began = time.perf_counter()
    planned = plan(setting)
    print(f"planned in {time.perf_counter() - began:.1f} s\n{rendered(planned)}", flush=True)
    look("before anything")
    spans = run(setting)
    print(json.dumps(SEEN), flush=True)
    rows = [
        {
            "phase": each.phase,
            "planned_gib": gib(each.planned and each.planned.used),
            "planned_with_kept_gib": gib(each.planned and each.planned.kept),
            "planned_rows_gib": {row: gib(b) for phase in planned.phases if phase.name == each.phase for row, b in phase.rows.items()},
            "measured_gib": gib(each.measured and each.measured.used),
            "with_kept_gib": gib(each.measured and each.measured.kept),
        }
        for each in compared({phase: Peak(*peak) for phase, peak in planned.peaks().items()}, spans)
    ]
    for row in rows:
        print(row, flush=True)
    append("memory", {"model": size, "setting": name, "engine": engine, "length": int(length), "phases": rows, "seen": SEEN})


def setting_of(model: str, name: str, engine: str, length: int) -> Setting:
    """One of SETTINGS, with an engine."""
    beside, trained, schedule = SETTINGS[name]
    cache = 4 * GIB if CUDA else 64 * MIB
    engines = {
        "vllm": WatchedVLLM(max_model_len=2 * length, cache_bytes=cache),
        "sglang": WatchedSGLang(max_model_len=2 * length, cache_bytes=cache, attention=os.environ.get("RFT_BENCHMARK_ATTENTION")),
        "transformers": rft.TransformersEngine(max_model_len=2 * length),
    }
    trainer = WatchedTrainer(lr=0.0, micro_batch_tokens=16384 if CUDA else 64, **trained)
    spec = rft.LaunchSpec(model=model, engine=engines[engine], trainer=trainer, deadline_s=300, **beside)
    lengths = {"prompts": PROMPTS, "samples": SAMPLES, "longest_prompt": length, "longest_response": length}
    return Setting(launch=spec, device_gib=139.8, schedule=schedule, **lengths)


def run(setting: Setting) -> list[tuple[str, Peak]]:
    """Two batches; (step, peak) of every step."""
    sampling = rft.Sampling(samples=SAMPLES, max_new_tokens=setting.longest_response)
    with rft.launch(setting.launch) as state:
        look("launched")
        spans = list[tuple[str, Peak]]()
        for batch in range(2):
            state = one_batch(state, prompts(batch, setting.longest_prompt), sampling, setting)
            spans += [(span.name, span.peak) for span in rft.health(state).spans if span.peak is not None]
            look(f"after batch {batch}")
    return spans


def one_batch(state: Any, prompts: rft.Prompts, sampling: rft.Sampling, setting: Setting) -> Any:
    """Every phase once, in order."""
    if setting.schedule.offload_optimizer:
        state = rft.offload(state, rft.ACTOR_OPTIMIZER)
    state = rft.refresh(state)
    look("awake")
    rollouts = rft.generate(state, prompts, sampling)
    look("generated")
    state = rft.sleep(state)
    look("asleep")
    guard("old log-probs", state, lambda: budget.needed_to_score(state, rollouts.mask))
    state = rft.compute_old_logprobs(state, rollouts)
    reference = None
    if setting.launch.reference is not None:
        state, reference = rft.use(state, rft.REFERENCE, lambda state: rft.reference_logprobs(state, rollouts))
    if setting.schedule.offload_optimizer:
        state = rft.reload(state, rft.ACTOR_OPTIMIZER)
    look("before the step")
    ones = torch.ones(rollouts.tokens.shape) * rollouts.sampled
    batch = rft.experience(rollouts, torch.ones(len(rollouts)), ones, reference=reference)
    guard("train", state, lambda: budget.needed_to_train(state, rollouts.mask))
    state, _ = rft.train_step(state, rft.take(batch, torch.arange(len(batch))), rft.grpo())
    look("stepped")
    return rft.finish_batch(state)


def prompts(batch: int, length: int) -> rft.Prompts:
    """Random ones, as long as can be."""
    tokens = torch.randint(0, 256, (PROMPTS, length), generator=torch.Generator().manual_seed(batch))
    names = tuple(f"question {i}" for i in range(PROMPTS))
    ids = torch.arange(PROMPTS) + PROMPTS * batch
    return rft.Prompts(tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool), ids=ids, epoch=0, texts=names, answers=names)


def guard(call: str, state: Any, needed: Callable[[], Mapping[str, int]]) -> None:
    """What the guard at run time says, and how long it takes to say so."""
    began = time.perf_counter()
    adding = needed()
    budget.require_room(call, state, adding)
    took = time.perf_counter() - began
    SEEN.append({"at": f"guard, {call}", "seconds": round(took, 4), **{name: round(size / MIB) for name, size in adding.items()}})


def look(at: str) -> None:
    """Notes what driver and allocator say, in MiB."""
    if CUDA:
        free, total = torch.cuda.mem_get_info()
        numbers = {"used": total - free, "allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        SEEN.append({"at": at, **{name: round(value / MIB) for name, value in numbers.items()}})


def gib(size: int | None) -> float | None:
    """Rounded to a hundredth."""
    return None if size is None else round(size / GIB, 2)


@dc.dataclass(frozen=True, kw_only=True)
class WatchedVLLM(rft.VLLMEngine):
    """vLLM, looked at once it is built."""

    def build(self, model: Any, world: Any) -> Any:
        """See `VLLMEngine`."""
        built = super().build(model, world)
        look("engine built")
        return built


@dc.dataclass(frozen=True, kw_only=True)
class WatchedSGLang(rft.SGLangEngine):
    """SGLang, looked at once it is built."""

    def build(self, model: Any, world: Any) -> Any:
        """See `SGLangEngine`."""
        built = super().build(model, world)
        look("engine built")
        return built


@dc.dataclass(frozen=True, kw_only=True)
class WatchedTrainer(rft.FSDP2Trainer):
    """FSDP2, looked at before it is built, while the engine sleeps alone, and after."""

    def build(self, model: Any, world: Any) -> Any:
        """See `FSDP2Trainer`."""
        look("engine asleep")
        built = super().build(model, world)
        look("trainer built")
        return built


if __name__ == "__main__":
    main(*sys.argv[1:])
