"""A job of five optimizer steps, started under torchrun by the tests: job.py MODEL OUT ENGINE LOOP.

ENGINE is transformers or vllm; LOOP is sleeping, or never-sleeping. Each rank leaves what it sampled and saw in OUT/rank<r>.pt.
"""

import sys
from pathlib import Path
from typing import Any

import torch

import rft
from rft.data.prompts import Cursor, Share, next_prompts, tokenise
from rft.data.questions import Question
from rft.models import find_model
from rft.ops import advantages

STEPS, PROMPTS, LR = 5, 2, 3e-3
EPS = 1e-4
"""Of AdamW: with the usual one, a gradient near 0 that differs in its last bit moves its weight by a whole step."""
SAMPLING = rft.Sampling(samples=3, max_new_tokens=7, temperature=0.8)
QUESTIONS = tuple(Question(id=i, text=f"{i}?", answer=str(i)) for i in range(8))


def length_reward(sample: rft.Sample) -> float:
    """Something that differs between samples: how often the response has an even byte."""
    return sum(byte % 2 == 0 for byte in sample.response.encode()) / 10


def spec_of(model: str, engine: str, *, tensor_parallel: int = 1) -> rft.LaunchSpec:
    """fp32 on both sides, so that every difference is a mistake."""
    engines: dict[str, rft.EngineSpec] = {
        "transformers": rft.TransformersEngine(dtype="float32", max_model_len=96),
        "vllm": rft.VLLMEngine(dtype="float32", max_model_len=96, max_rows=16, cache_bytes=1 << 26),
    }
    trainer = rft.FSDP2Trainer(dtype="float32", lr=LR, eps=EPS, micro_batch_tokens=96)
    return rft.LaunchSpec(model=model, engine=engines[engine], trainer=trainer, tensor_parallel=tensor_parallel, deadline_s=60)


def learn(state: Any, rollouts: rft.Rollouts, seen: list[dict[str, Any]]) -> Any:
    """Old log-probs, one step, and a note of all that went into it."""
    rewards = rft.rewards(state, rollouts, length_reward)
    better = advantages.per_token(advantages.grpo(rewards.values, rollouts.groups), rollouts.sampled)
    experience = rft.experience(rollouts, rewards.values, better)
    state = rft.compute_old_logprobs(state, rollouts)
    old = state.old.batches[0].values
    state, metrics = rft.train_step(state, rft.take(experience, torch.arange(len(experience))), rft.grpo())
    seen.append(
        {
            "tokens": rollouts.tokens,
            "sampled": rollouts.sampled,
            "engine": rollouts.logprobs,
            "old": old,
            "advantages": better,
            "metrics": metrics,
        }
    )
    return rft.finish_batch(state)


def main(model: str, out: str, engine: str, loop: str) -> None:
    """The five steps."""
    seen = list[dict[str, Any]]()
    data = tokenise(QUESTIONS, find_model(model).tokenizer, max_tokens=64)
    with rft.launch(spec_of(model, engine)) as state:
        world: Any = state.devices
        rank, cursor = world.world.rank, Cursor()
        share = Share(index=rank, count=world.world.size)
        if loop == "never-sleeping":
            state = rft.refresh(state)
        for _ in range(STEPS):
            state = rft.broadcast(state) if loop == "never-sleeping" else rft.refresh(state)
            prompts, cursor = next_prompts(data, cursor, PROMPTS, share)
            rollouts = rft.generate(state, prompts, SAMPLING)
            state = state if loop == "never-sleeping" else rft.sleep(state)
            state = learn(state, rollouts, seen)
        state = rft.broadcast(state)
        health = rft.health(state)
        torch.save({"seen": seen, "gaps": [gap.largest for gap in health.gaps]}, Path(out) / f"rank{rank}.pt")
        _ = rft.export(state, Path(out) / "model")


if __name__ == "__main__":
    main(*sys.argv[1:])
