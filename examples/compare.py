"""All algorithms of `objectives.py` on generated sums, from the same weights, one after the other, with one plot at the end.

`torchrun --nproc-per-node 2 examples/compare.py --model …`; the folder gets `compare.html` and `compare.json`.
"""

import dataclasses as dc
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import objectives
import plotly.graph_objects as go
import torch.distributed as dist
import tyro
from grpo import Rest
from grpo_arithmetic import GrpoArithmetic, task
from job import Task, Upcoming, main
from objectives import Algorithm

import rft
from rft.data.prompts import Cursor, Dataset, Share, tokenise
from rft.models import find_model
from rft.telemetry.run_folder import next_folder

log = logging.getLogger("rft")
TRIES = 4
"""Batches of prompts that dynamic sampling may take for one step."""


@dc.dataclass(frozen=True, kw_only=True)
class Compare(GrpoArithmetic):
    """Every algorithm on the same sums, from the same weights."""

    steps: int = 20
    """Batches of responses; each is trained on `updates` times."""
    updates: int = 2
    """Optimizer steps on each batch; from the second one on the ratio is not 1, and the losses differ."""
    only: tuple[str, ...] = ()
    """Names of algorithms; none: all of them."""
    save_every: tyro.conf.Suppress[int] = 0  # each of its runs is short, and begins anew: there is nothing to go on from
    keep: tyro.conf.Suppress[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.updates < 1:
            raise rft.BadInput(f"--updates must be at least 1, got {self.updates}")


def algorithms(job: Compare) -> dict[str, Algorithm]:
    """By name, in the order in which they run."""
    length = job.max_new_tokens
    every = {
        "grpo": objectives.grpo(),
        "dr_grpo": objectives.dr_grpo(length=length),
        "dapo": objectives.dapo(length=length, wanted=rft.Wanted(groups=job.prompts, bound=TRIES, at_bound="take")),
        "gspo": objectives.gspo(),
        "rloo": objectives.rloo(),
        "reinforce_plus_plus": objectives.reinforce_plus_plus(),
        "cispo": objectives.cispo(),
        "ppo": objectives.ppo(),
    }
    unknown = set(job.only) - set(every)
    if unknown:
        raise rft.BadInput(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    return {name: algorithm for name, algorithm in every.items() if name in (job.only or every)}


@dc.dataclass(frozen=True, kw_only=True)
class Curve:
    """What one algorithm did: the mean reward of all responses of each step, and the metrics of each update."""

    rewards: list[float]
    metrics: list[rft.Metrics]


def train(start: Rest, prompts: Iterator[rft.Prompts], job: Compare, algorithm: Algorithm, reward: rft.RewardFunction) -> Curve:
    """One algorithm's loop; several optimizer steps on each batch, so old log-probs are computed."""
    state, curve = start, Curve(rewards=[], metrics=[])
    for _ in range(job.steps):
        given = list[float]()  # to all responses, those that are not kept too
        state = rft.refresh(state)
        batch = algorithm.collect(state, prompts, job.sampling(), noting(reward, given))
        state = rft.sleep(state)
        means = rft.average(state, {"reward": given, "rows": [len(batch.rollouts)]})
        curve.rewards.append(means["reward"])
        if not means["rows"]:
            continue  # not one group in all the prompts that were tried taught anything
        experience = rft.experience(batch.rollouts, batch.rewards.values, algorithm.advantages(state, batch))
        scored = rft.compute_old_logprobs(state, batch.rollouts)
        state, metrics = rft.update(scored, experience, algorithm.objective, rft.Cut(epochs=job.updates))
        curve.metrics.extend(metrics)
    return curve


def noting(reward: rft.RewardFunction, given: list[float]) -> rft.RewardFunction:
    """The same reward; what it gives is put down in `given`."""

    def noted(sample: rft.Sample) -> float:
        given.append(reward(sample))
        return given[-1]

    return noted


def run(job: Compare, learning: Task, data: Dataset, algorithm: Algorithm) -> Curve:
    """One algorithm, from the model as it was."""
    with rft.launch(job.launch_spec()) as state:
        share = Share(index=dist.get_rank(), count=dist.get_world_size())
        prompts = Upcoming(data, Cursor(seed=job.seed), share, job.prompts, job.steps * TRIES)
        return train(state, iter(prompts), job, algorithm, learning.reward)


def plot(curves: dict[str, Curve], page: Path) -> None:
    """One line for each algorithm, smoothed over five steps, on a page that fetches nothing."""
    figure: Any = go.Figure()
    for name, curve in curves.items():
        windows = [curve.rewards[max(0, step - 4) : step + 1] for step in range(len(curve.rewards))]
        figure.add_scatter(y=[sum(window) / len(window) for window in windows], name=name, mode="lines")
    figure.update_layout(title="Reward on generated sums", xaxis_title="step", yaxis_title="reward, mean of five steps")
    figure.write_html(page, include_plotlyjs=True)


def perform(job: Compare, learning: Task) -> None:
    """Runs the algorithms in turn; rank 0 writes after each, so that what there is survives."""
    chosen, curves = algorithms(job), dict[str, Curve]()
    data = tokenise(learning.training, find_model(job.model).tokenizer, max_tokens=job.max_prompt_tokens)
    folder = job.folder or next_folder(Path("runs"), "compare")
    for name, algorithm in chosen.items():
        began = time.monotonic()
        curves[name] = curve = run(job, learning, data, algorithm)
        if int(os.environ.get("RANK", "0")) == 0:
            log.info("%s: reward %.3f at first, %.3f at last, %.0f s", name, curve.rewards[0], curve.rewards[-1], time.monotonic() - began)
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"job": dc.asdict(job), "curves": {n: dc.asdict(c) for n, c in curves.items()}}, default=str, indent=1)
            _ = (folder / "compare.json").write_text(text)
            plot(curves, folder / "compare.html")


if __name__ == "__main__":
    main(Compare, task, perform)
