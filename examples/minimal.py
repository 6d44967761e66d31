"""A job with nothing around it: questions of one's own, a reward of one's own, and the loop.

`torchrun --nproc-per-node 2 examples/minimal.py MODEL`, with a folder or a hub id of a language model that fits
"""

import sys

import torch
import torch.distributed as dist

import rft
from rft.data.prompts import Cursor, Share, next_prompts, tokenise
from rft.data.questions import Question
from rft.models import find_model
from rft.ops import advantages

QUESTIONS = [Question(id=i, text=f"What is {i} + {i + 7}?", answer=str(2 * i + 7)) for i in range(64)]


def ends_with_the_answer(sample: rft.Sample) -> float:
    """1 for a response whose last word is the answer, else 0."""
    words = sample.response.rstrip(". \n").split()
    return float(bool(words) and words[-1] == sample.answer)


def main(model: str, steps: int = 10) -> list[float]:
    """GRPO; gives the mean reward of each step."""
    spec = rft.LaunchSpec(model=model, engine=rft.TransformersEngine(), trainer=rft.FSDP2Trainer(lr=1e-6))
    sampling, objective = rft.Sampling(samples=4, max_new_tokens=32), rft.grpo()
    data, cursor, seen = tokenise(QUESTIONS, find_model(model).tokenizer, max_tokens=128), Cursor(), list[float]()
    with rft.launch(spec) as state:
        share = Share(index=dist.get_rank(), count=dist.get_world_size())
        for _ in range(steps):
            prompts, cursor = next_prompts(data, cursor, 4, share)  # of each rank its own
            state = rft.refresh(state)
            rollouts = rft.generate(state, prompts, sampling)
            rewards = rft.rewards(state, rollouts, ends_with_the_answer)
            state = rft.sleep(state)
            better = advantages.grpo(rewards.values, rollouts.groups, rewards.valid)
            experience = rft.experience(rollouts, rewards.values, advantages.per_token(better, rollouts.sampled))
            state = rft.adopt_logprobs(state, rollouts, source="first_step")
            state, _ = rft.train_step(state, rft.take(experience, torch.arange(len(experience))), objective)
            state = rft.finish_batch(state)
            seen.append(rft.average(state, {"reward": rewards.values[rewards.valid].tolist()})["reward"])
    return seen


if __name__ == "__main__":
    print(main(sys.argv[1]))
