"""LoRA with vLLM: broadcasts of the adapter alone beside merged weights, and what vLLM and the Actor compute with each version.

    torchrun --nproc-per-node 1 -m tests.benchmarks.lora FOLDER-TO-MAKE merged|adapter [SIZE [RANK [STEPS]]]

A process for each way to sync, over the same random weights, prompts and seeds: sample, train, broadcast, sample the same prompts
again. Old and new log-probs of the same tokens are compared with the Actor's (whatever was kept of an older adapter would show as a
gap), and with those of the other way, where that ran before. Appends to results/lora.jsonl.
"""

import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch

import rft
from rft.data.prompts import Cursor, Share, next_prompts, tokenise
from rft.data.questions import Question
from rft.effects.runtime import runtime_of
from rft.models import find_model
from rft.spec import LoRA
from tests.benchmarks.qwen import Size, random_model
from tests.benchmarks.record import append

SAMPLING = rft.Sampling(samples=4, max_new_tokens=32)
QUESTIONS = tuple(Question(id=i, text=f"How much is {i} plus {i}, and why? " * 6, answer=str(2 * i)) for i in range(8))
LR = 2e-3
"""Large: each version is to differ from the one before by more than bf16 rounds away."""


def main(folder: str, sync: str, size: str = "0.5B", rank: str = "16", steps: str = "4") -> None:
    """One way, and a row of what it took and saw."""
    path = random_model(Path(folder), cast(Size, size))
    seen = job(path, LoRA(rank=int(rank), alpha=2.0 * int(rank), sync=cast(Any, sync)), int(steps))
    probe: list[torch.Tensor] = seen.pop("probe")
    row: dict[str, Any] = {"model": size, "rank": int(rank), "steps": int(steps), "sync": sync, **seen}
    row["base_change_mean"] = round(float((probe[-1] - probe[0]).abs().mean()), 5)
    torch.save(probe, path / f"probe-{sync}.pt")
    other = path / f"probe-{'merged' if sync == 'adapter' else 'adapter'}.pt"
    if other.is_file():
        row["first_mean_gap_to_the_other_way"] = round(float((probe[0] - torch.load(other)[0]).abs().mean()), 5)
    for name, value in row.items():
        print(f"{name:40} {value}")
    append("lora", row)


def job(folder: Path, lora: LoRA, steps: int) -> dict[str, Any]:
    """What one way took and saw. `probe` has the engine's log-probs of fixed sequences, by version."""
    engine = rft.VLLMEngine(max_model_len=1024, max_rows=64, cache_bytes=2 << 30 if torch.cuda.is_available() else 1 << 27)
    trainer = rft.FSDP2Trainer(lr=LR, lora=lora)
    data = tokenise(QUESTIONS, find_model(str(folder)).tokenizer, max_tokens=512)
    prompts, _ = next_prompts(data, Cursor(), len(QUESTIONS), Share())
    with rft.launch(rft.LaunchSpec(model=str(folder), engine=engine, trainer=trainer)) as state:
        runtime = runtime_of(state)
        fixed = [tuple(row[mask].tolist()) for row, mask in zip(prompts.tokens, prompts.mask, strict=True)]
        took, again, gaps, probe = dict[str, float](), list[float](), list[float](), list[torch.Tensor]()
        took["first_broadcast_s"], state = timed(rft.broadcast, state)
        state = rft.wake(state)
        for _ in range(steps):
            probe.append(torch.tensor([x for row in runtime.engine.score(fixed) for x in row]))
            rollouts = rft.generate(state, prompts, SAMPLING)
            state = rft.compute_old_logprobs(state, rollouts)
            old: Any = state.old.batches[0].values
            gaps.append(float((old - rollouts.logprobs)[rollouts.sampled].abs().mean()))
            state = learn(state, rollouts)
            seconds, state = timed(rft.broadcast, state)
            again.append(seconds)
        probe.append(torch.tensor([x for row in runtime.engine.score(fixed) for x in row]))
        state = rft.sleep(state)
        took["broadcast_after_release_s"], state = timed(rft.broadcast, state)
        memory = runtime.engine.memory()
        placed = {"optimizer_bytes": runtime.trainer.bytes("optimizer"), "model_bytes": runtime.trainer.bytes("model")}
        alarms = [gap.alarm for gap in rft.health(state).gaps if gap.alarm]
    moved = [float((late - early).abs().mean()) for early, late in itertools.pairwise(probe)]
    return {
        **took, **placed,
        "broadcast_median_s": statistics.median(again),
        "sync_path": cast(Any, runtime.engine).sync_path,
        "engine_weight_bytes": memory.weights,
        "gap_to_actor_mean": [round(gap, 5) for gap in gaps],
        "moved_by_step_mean": [round(change, 5) for change in moved],
        "alarms": alarms,
        "probe": probe,
    }  # fmt: skip


def learn(state: Any, rollouts: rft.Rollouts) -> Any:
    """One step towards even tokens."""
    better = torch.where(rollouts.tokens % 2 == 0, 1.0, -1.0) * rollouts.sampled
    experience = rft.experience(rollouts, torch.zeros(len(rollouts.tokens)), better)
    state, _ = rft.train_step(state, rft.take(experience, torch.arange(len(experience))), rft.grpo())
    return rft.finish_batch(state)


def timed(step: Any, state: Any) -> tuple[float, Any]:
    """Wall-clock seconds of a step, device included, and the state after it."""
    wait()
    began = time.perf_counter()
    state = step(state)
    wait()
    return round(time.perf_counter() - began, 5), state


def wait() -> None:
    """For the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
