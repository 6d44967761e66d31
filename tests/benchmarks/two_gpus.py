"""A trainer over two GPUs and an engine on the same two, as one TP group or as two of them: broadcasts, sampling, and the log-prob gap.

    torchrun --nproc-per-node 2 -m tests.benchmarks.two_gpus FOLDER-TO-MAKE SIZE TP [fsdp2 | "zero 3"] [vllm | sglang | transformers]

What a broadcast is held against is measured in the same run (`broadcast_ways`): the ceiling is the all-gather of the same bytes in pieces,
in the engine's dtype. Lines are appended to results/two_gpus.jsonl by rank 0. On a CPU it runs with the size `tiny`.
"""

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, cast

import rft
from rft.data.prompts import Cursor, Share, next_prompts, tokenise
from rft.data.questions import Question
from rft.effects.runtime import runtime_of
from rft.models import find_model
from tests.benchmarks.broadcast_ways import all_gathers, broadcasts, by_bucket, other_ways, synchronised
from tests.benchmarks.qwen import Size, random_model
from tests.benchmarks.record import append
from tests.benchmarks.turns import my_turn

RANK = int(os.environ.get("RANK", "0"))
SAMPLING = rft.Sampling(samples=8, max_new_tokens=128)


def main(folder: str, size: str, tensor_parallel: str, backend: str = "fsdp2", engine: str = "vllm") -> None:
    """One layout: on CUDA vLLM starts once in a process."""
    if RANK == 0:
        _ = random_model(Path(folder), cast(Size, size))
    while not (Path(folder) / "tokenizer_config.json").is_file():  # what is written last
        time.sleep(0.2)
    spec = specification(folder, size, int(tensor_parallel), backend, engine)
    row = {"model": size, "tensor_parallel": int(tensor_parallel), "backend": backend, "engine": engine, **measured(spec, size)}
    if RANK == 0:
        append("two_gpus", row)
        print(row, flush=True)


def specification(model: str, size: str, tp: int, backend: str, engine: str) -> rft.LaunchSpec:
    """What is launched. Of a 7B little is kept at a time."""
    large, cache = size == "7B", 1 << 26 if size == "tiny" else 4 << 30
    trainer: Any = rft.FSDP2Trainer(lr=0.0, keep_gathered=not large, gradient_checkpointing=large)
    if backend != "fsdp2":
        trainer = rft.DeepSpeedTrainer(stage=3, lr=0.0, gradient_checkpointing=large)
    engines: dict[str, rft.EngineSpec] = {
        "vllm": rft.VLLMEngine(max_model_len=256, cache_bytes=cache, eager=large),
        "sglang": rft.SGLangEngine(max_model_len=256, cache_bytes=cache, attention=os.environ.get("RFT_BENCHMARK_ATTENTION")),
        "transformers": rft.TransformersEngine(max_model_len=256),
    }
    return rft.LaunchSpec(model=model, engine=engines[engine], trainer=trainer, tensor_parallel=tp, deadline_s=900)


def measured(spec: rft.LaunchSpec, size: str) -> dict[str, Any]:
    """One layout: its broadcasts and what they are held against, its sampling, and how far engine and Actor are apart."""
    with rft.launch(spec) as state:
        runtime = runtime_of(state)
        if size == "7B":  # moments and a broadcast's buckets do not both fit beside the engine's start
            state = rft.offload(state, rft.ACTOR_OPTIMIZER)
        my_turn(runtime.world)
        took, state = broadcasts(state)
        row: dict[str, Any] = {"broadcast_ms": round(statistics.median(took[1:]) * 1e3, 2), "first_ms": round(took[0] * 1e3, 2)}
        for name, dtype in (("engine", runtime.engine.casts_to), ("trainer", None)):
            row[f"all_gather_{name}_ms"] = all_gathers(runtime.trainer.manifest(dtype), runtime.world.size, runtime.world.device)
        state, buckets = by_bucket(state)
        row |= buckets | (other_ways(runtime) if runtime.engine.name == "vllm" else {})
        return row | sampled(rft.wake(rft.broadcast(state)), spec.model)


def sampled(state: Any, model: str) -> dict[str, float]:
    """Tokens per second, and the gap of the sampled log-probs to the Actor's."""
    data = tokenise([Question(id=i, text=f"What is {i} + 7?", answer="0") for i in range(64)], find_model(model).tokenizer, max_tokens=128)
    world = runtime_of(state).world
    prompts, _ = next_prompts(data, Cursor(), 8, Share(index=world.rank, count=world.size))
    _ = rft.generate(state, prompts, SAMPLING)
    began = synchronised()
    rollouts = rft.generate(state, prompts, SAMPLING, draw=1)
    row = {"tokens_per_s": round(int(rollouts.sampled.sum()) * world.size / (synchronised() - began))}
    state = rft.compute_old_logprobs(rft.sleep(state), rollouts)
    old = state.old.batches[0].values
    gaps = (old - rollouts.logprobs)[rollouts.sampled].abs()
    return {**row, "gap_mean": float(gaps.mean()), "gap_max": float(gaps.max())}


if __name__ == "__main__":
    main(*sys.argv[1:])
