"""Sleep, broadcast, wake, generate, train at learning rate 0, over and over: memory and the log-prob gap must stay flat.

    torchrun --nproc-per-node 1 -m tests.benchmarks.cycles MODEL-FOLDER-TO-MAKE [SIZE] [CYCLES] [ENGINE]

Every cycle notes the device memory in use, this process's memory, the gap on the probe and on the sampled tokens, and the time of
each step. The first and the last fifth are compared at the end, and a line is appended to results/cycles.jsonl.
"""

import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import psutil
import torch

import rft
from rft.data.prompts import Cursor, Share, next_prompts, tokenise
from rft.data.questions import Question
from rft.effects.runtime import runtime_of
from rft.models import find_model
from tests.benchmarks.qwen import Size, random_model
from tests.benchmarks.record import append
from tests.benchmarks.turns import my_turn

MIB = 2**20
SAMPLING = rft.Sampling(samples=4, max_new_tokens=64)


def main(folder: str, size: str = "0.5B", cycles: str = "100", engine: str = "vllm") -> None:
    """The whole run."""
    model = str(random_model(Path(folder), cast(Size, size)))
    cache = 2 << 30 if torch.cuda.is_available() else 1 << 26
    engines: dict[str, rft.EngineSpec] = {"vllm": rft.VLLMEngine(max_model_len=256, cache_bytes=cache)}
    attention = os.environ.get("RFT_BENCHMARK_ATTENTION")  # SGLang's, where its own choice is not installed
    engines |= {"sglang": rft.SGLangEngine(max_model_len=256, cache_bytes=cache, attention=attention)}
    engines |= {"transformers": rft.TransformersEngine(max_model_len=256)}
    spec = rft.LaunchSpec(model=model, engine=engines[engine], trainer=rft.FSDP2Trainer(lr=0.0), deadline_s=600)
    questions = [Question(id=i, text=f"What is {i} + {i + 7}?", answer=str(2 * i + 7)) for i in range(64)]
    data, cursor = tokenise(questions, find_model(model).tokenizer, max_tokens=128), Cursor()
    seen: dict[str, list[float]] = defaultdict(list)
    with rft.launch(spec) as state:
        my_turn(runtime_of(state).world)
        for cycle in range(int(cycles)):
            prompts, cursor = next_prompts(data, cursor, 8, Share())
            state = one_cycle(state, prompts, seen)
            if cycle % 10 == 9:
                print(cycle + 1, {name: round(values[-1], 5) for name, values in seen.items()}, flush=True)
    report(size, engine, seen)


def one_cycle(state: Any, prompts: rft.Prompts, seen: dict[str, list[float]]) -> Any:
    """Broadcast, wake, generate, sleep, score, train; what is seen of it is appended to `seen`."""
    state = rft.refresh(state)
    rollouts = rft.generate(state, prompts, SAMPLING)
    seen["awake_device_mib"].append(_device_mib())
    state = rft.compute_old_logprobs(rft.sleep(state), rollouts)
    old, sampled = state.old.batches[0].values, rollouts.sampled
    gaps = (old - rollouts.logprobs)[sampled].abs()
    ones = torch.ones(rollouts.tokens.shape) * sampled
    batch = rft.take(rft.experience(rollouts, torch.ones(len(rollouts)), ones), torch.arange(len(rollouts)))
    state, _ = rft.train_step(state, batch, rft.grpo())
    state = rft.finish_batch(state)
    seen["asleep_device_mib"].append(_device_mib())
    seen["host_mib"].append(psutil.Process(os.getpid()).memory_info().rss / MIB)
    seen["gap_mean"].append(float(gaps.mean()))
    seen["gap_max"].append(float(gaps.max()))
    health = rft.health(state)
    seen["probe_gap"].append(next(gap.largest for gap in reversed(health.gaps) if gap.of == "probe"))
    for span in health.spans:
        seen[f"{span.name}_s"].append(span.end_s - span.start_s)
    return state


def report(size: str, engine: str, seen: dict[str, list[float]]) -> None:
    """First and last fifth of everything, beside each other."""
    fifth = max(len(seen["host_mib"]) // 5, 1)
    rows = {
        name: {"first": statistics.median(values[:fifth]), "last": statistics.median(values[-fifth:]), "max": max(values)}
        for name, values in seen.items()
    }
    for name, row in rows.items():
        print(f"{name:28}", {key: round(value, 5) for key, value in row.items()})
    append("cycles", {"model": size, "engine": engine, "cycles": len(seen["host_mib"]), **rows})


def _device_mib() -> float:
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


if __name__ == "__main__":
    main(*sys.argv[1:])
