"""A job on the real trainer and engine in which one rank goes astray: diverging.py MODEL FOLDER SCENE RANK DEADLINE, under torchrun.

That rank writes the time at which it does so to FOLDER/astray.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import TCPStore

import rft
import rft.engines.transformers  # what is slow to import comes before the deadline counts
import rft.trainers.fsdp2
from rft.data.prompts import Cursor, Share, next_prompts, tokenise
from rft.data.questions import Question
from rft.models import find_model

SAMPLING = rft.Sampling(samples=2, max_new_tokens=6)
QUESTIONS = tuple(Question(id=i, text=f"{i}?", answer=str(i)) for i in range(16))


class Astray:
    """What this rank does at step 1, if it is the one."""

    def __init__(self, folder: Path, scene: str, mine: bool) -> None:
        self._folder, self._scene, self._mine, self.step = folder, scene, mine, 0
        self._micro_batches = 0

    def here(self, *scenes: str) -> bool:
        """Whether it happens here and now; it is noted when."""
        if not (self._mine and self.step == 1 and self._scene in scenes):
            return False
        (self._folder / "astray").write_text(str(time.time()))
        return True

    def objective(self, scores: Any, micro: Any, totals: Any) -> Any:
        """The policy loss, on whose second micro-batch something may happen."""
        self._micro_batches += 1
        if self._micro_batches % 2 == 0:
            act(self, "in a step")
        return LOSS(scores, micro, totals)


LOSS = rft.grpo()


def act(astray: Astray, where: str) -> None:
    """Sleeps for long, is killed, or raises."""
    if astray.here(f"sleeps {where}"):
        time.sleep(300)
    if astray.here(f"killed {where}"):
        os.kill(os.getpid(), signal.SIGKILL)
    if astray.here(f"raises {where}"):
        raise ValueError("this rank went astray")


def spec_of(model: str, deadline_s: float) -> rft.LaunchSpec:
    """Micro-batches so small that every step has several."""
    trainer = rft.FSDP2Trainer(dtype="float32", micro_batch_tokens=24)
    return rft.LaunchSpec(
        model=model, engine=rft.TransformersEngine(dtype="float32", max_model_len=64), trainer=trainer, deadline_s=deadline_s
    )


def train(state: Any, astray: Astray, rollouts: rft.Rollouts) -> Any:
    """One step, or two."""
    rewards = torch.arange(len(rollouts)) % 2.0
    better = (rewards[:, None] - 0.5) * rollouts.sampled
    minibatch = rft.take(rft.experience(rollouts, rewards, better), torch.arange(len(rollouts)))
    state = rft.compute_old_logprobs(state, rollouts)
    for _ in range(1 + astray.here("takes a step twice")):
        state, _ = rft.train_step(state, minibatch, astray.objective)
    return rft.finish_batch(state)


def main(model: str, folder: str, scene: str, who: str, deadline: str) -> None:
    """Four steps with an engine that never sleeps."""
    together()
    astray = Astray(Path(folder), scene, os.environ["RANK"] == who)
    data, cursor = tokenise(QUESTIONS, find_model(model).tokenizer, max_tokens=32), Cursor()
    share = Share(index=int(os.environ["RANK"]), count=int(os.environ["WORLD_SIZE"]))
    with rft.launch(spec_of(model, float(deadline))) as begun:
        state: Any = rft.refresh(begun)
        for astray.step in range(4):
            prompts, cursor = next_prompts(data, cursor, 2, share)
            rollouts = rft.generate_stale(state, prompts, SAMPLING, max_lag=9)
            act(astray, "between steps")
            state = train(state, astray, rollouts)
            if not astray.here("skips a broadcast"):
                state = rft.broadcast(state)


def stubborn(*arguments: str) -> NoReturn:
    """The same, in a loop that catches every error inside `launch` and tries the step again."""
    model, folder, scene, who, deadline = arguments
    together()
    astray = Astray(Path(folder), scene, os.environ["RANK"] == who)
    astray.step = 1
    data = tokenise(QUESTIONS, find_model(model).tokenizer, max_tokens=32)
    prompts, _ = next_prompts(data, Cursor(), 2, Share(index=int(os.environ["RANK"]), count=int(os.environ["WORLD_SIZE"])))
    with rft.launch(spec_of(model, float(deadline))) as begun:
        state: Any = rft.refresh(begun)
        rollouts = rft.generate(state, prompts, SAMPLING)
        while True:
            try:
                state = train(state, astray, rollouts)
            except Exception as error:  # noqa: BLE001 (that is the point)
                print("caught", type(error).__name__, flush=True)
                time.sleep(0.5)


def together() -> None:
    """Waits until every rank has imported what it needs."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"together/{os.environ['RANK']}", "")
    store.wait([f"together/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))])


if __name__ == "__main__":
    run: Callable[..., None] = stubborn if sys.argv[3].endswith("and catches") else main
    run(sys.argv[1], sys.argv[2], sys.argv[3].removesuffix(" and catches"), *sys.argv[4:])
