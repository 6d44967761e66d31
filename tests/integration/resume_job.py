"""A job that can stop and go on, started under torchrun by the tests: resume_job.py SCENES MODEL OUT [FOLDER BACKEND].

    stops      an unbroken run in OUT/whole, then one from each of its checkpoints on; all must be alike
    killed     a run in OUT/killed that goes on by itself wherever it was, and kills a rank at each of its first KILLS starts
    roles      the same as `stops` for one stop, with a Critic and a moving average
    carried    goes on from FOLDER under BACKEND, and tells what it holds

Every rank leaves what it saw in OUT/<scene>-<rank>.json.
"""

import dataclasses as dc
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import rft
from rft.checkpoint.folder import checkpoints, newest_checkpoint
from rft.data.prompts import Cursor, Dataset, Share, next_prompts, tokenise
from rft.effects.runtime import Runtime
from rft.models import find_model
from rft.objectives import critic_loss
from rft.ops import controllers
from rft.ops.controllers import Coefficient
from rft.ops.normalisation import RunningMoments, merge, moments
from rft.steps import restore, save
from tests.integration.job import EPS, LR, QUESTIONS, SAMPLING, learn, length_reward, spec_of

STEPS, PROMPTS = 3, 4
"""An epoch has two batches of four prompts, over all ranks."""
KILLS = 3
BATCH = {False: (10, 10), True: (12, 2)}
"""About how many steps a batch takes, and how many times each rank waits for the disk, or renames or removes a folder, in a save."""
CONTROLLER = controllers.adaptive(0.1, target=0.5, horizon=20)
Seen = dict[str, Any]


@dc.dataclass(frozen=True)
class Progress:
    """What the loop itself goes on from."""

    step: int = 0
    cursor: Cursor = dc.field(default_factory=lambda: Cursor(seed=3))
    coefficient: Coefficient = dc.field(default_factory=CONTROLLER.init)
    seen: RunningMoments = dc.field(default_factory=RunningMoments)
    best: float | None = None


def one_batch(state: Any, progress: Progress, data: Dataset) -> tuple[Any, Progress, Seen]:
    """A batch as in `job.py`, with a note of everything that could differ in a run that went on."""
    share = Share(index=dist.get_rank(), count=dist.get_world_size())
    prompts, cursor = next_prompts(data, progress.cursor, PROMPTS // share.count, share)
    state = rft.refresh(state)
    rollouts = rft.generate(state, prompts, SAMPLING)
    rewards = rft.rewards(state, rollouts, length_reward)
    notes = list[dict[str, Any]]()
    state = learn(rft.sleep(state), rollouts, notes)
    (everywhere,) = rft.all_rows(state, rewards.values)
    after = Progress(
        step=progress.step + 1,
        cursor=cursor,
        coefficient=CONTROLLER.update(progress.coefficient, everywhere.abs().mean(), len(everywhere)),
        seen=merge(progress.seen, moments(everywhere)),
        best=max(float(everywhere.max()), progress.best or 0.0),
    )
    chance = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    seen: Seen = {"step": progress.step, "version": state.version, "epoch": prompts.epoch, "tokens": rollouts.tokens.tolist()}
    seen |= {"chance": chance, "metrics": notes[0]["metrics"], "run": repr(after)}
    return state, after, seen


def run(state: Any, folder: Path, data: Dataset, keep: int, say: Callable[[Seen], None]) -> str:
    """Goes on from wherever the folder is, to the end; returns a digest of everything trained."""
    progress = Progress()
    if newest_checkpoint(folder) is not None:
        state, progress = restore(state, folder, progress)
    while progress.step < STEPS:
        state, progress, seen = one_batch(state, progress, data)
        say(seen)
        _ = save(state, folder, progress, keep=keep)
    return digest(state)


def digest(state: Any) -> str:
    """Of weights, moments and steps of all that is trained, whole: the same at any number of ranks."""
    found, devices = hashlib.sha256(), state.devices
    for part in (devices.trainer, devices.beside.critic, devices.beside.frozen.get(rft.EMA)):
        for name, tensor in sorted(part.saved().items() if part is not None else ()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(name.encode() + whole.contiguous().numpy().tobytes())
    return found.hexdigest()


def stops(model: str, out: Path, *_: str) -> None:
    """After each batch a copy of the checkpoint is a run that was stopped there."""
    data = tokenise(QUESTIONS, find_model(model).tokenizer, max_tokens=64)
    told: dict[str, Any] = {}
    for start in range(STEPS):
        folder, seen = out / ("whole" if not start else f"from-{start}"), list[Seen]()
        if start and int(os.environ["RANK"]) == 0:
            folder.mkdir()
            stopped = next(c.path for c in checkpoints(out / "whole") if c.number == start)
            _ = shutil.copytree(stopped, folder / stopped.name)
        begin_randomly(start)
        with rft.launch(spec_of(model, "transformers")) as state:
            _ = rft.average(state, {})  # nobody looks into the folder before it is there
            told[str(start)] = {"digest": run(state, folder, data, STEPS, seen.append), "seen": seen}
    tell(out, "stops", told)


def begin_randomly(seed: int) -> None:
    """The random numbers of a run that starts anew; one that goes on is to have those of the run that was stopped."""
    for begin in (random.seed, np.random.seed, torch.manual_seed):
        _ = begin(seed)


def roles(model: str, out: Path, *_: str) -> None:
    """Two batches, and the second of them again from what was saved after the first; the average lies on the host in between."""
    data, told = tokenise(QUESTIONS, find_model(model).tokenizer, max_tokens=64), dict[str, Any]()
    spec = spec_of(model, "transformers")
    spec = dc.replace(spec, critic=rft.Critic(trainer=spec.trainer, where="device"), ema=rft.MovingAverage(decay=0.5))
    for run, batches in (("whole", 2), ("resumed", 1)):
        with rft.launch(spec) as state:
            progress = Progress()
            if run == "resumed":
                state, progress = restore(state, out / "roles", progress)
            for _ in range(batches):
                state, progress, seen = one_batch(state, progress, data)
                state, seen["critic"] = train_critic(state, data, progress)
                state = rft.offload(rft.update_ema(rft.reload(state, rft.EMA)), rft.EMA)
                if progress.step == 1:
                    _ = save(state, out / "roles", progress)
            told[run] = {"digest": digest(state), "seen": seen}
    tell(out, "roles", told)


def train_critic(state: Any, data: Dataset, progress: Progress) -> tuple[Any, dict[str, float]]:
    """One step of the Critic towards the rewards of what the next prompts get."""
    share = Share(index=dist.get_rank(), count=dist.get_world_size())
    prompts, _ = next_prompts(data, progress.cursor, PROMPTS // share.count, share)
    state = rft.refresh(state)
    rollouts = rft.generate(state, prompts, SAMPLING, draw=1)
    state = rft.sleep(state)
    rewards, values = rft.rewards(state, rollouts, length_reward), rft.values(state, rollouts)
    returns = torch.where(rollouts.sampled, rewards.values[:, None], 0.0)
    experience = rft.experience(rollouts, rewards.values, torch.zeros_like(returns), values=values, returns=returns)
    return rft.train_critic(state, rft.take(experience, torch.arange(len(experience))), critic_loss())


def killed(model: str, out: Path) -> None:
    """Each start of the job kills one of its ranks at some moment, but for those after the first KILLS."""
    start, kills = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ.get("KILLS", KILLS))
    data = tokenise(QUESTIONS, find_model(model).tokenizer, max_tokens=64)
    begin_randomly(0)
    log = (out / f"killed-{os.environ['RANK']}.jsonl").open("a")

    def say(seen: Seen) -> None:
        print(json.dumps(seen), file=log, flush=True)

    with rft.launch(spec_of(model, "transformers")) as state:
        if start < kills:
            be_killed(start)
        found = run(state, out / "killed", data, 2, say)
    tell(out, "killed", {"digest": found, "starts": start + 1, "left": sorted(path.name for path in (out / "killed").iterdir())})


def be_killed(start: int) -> None:
    """Ends this rank, if it is its turn, at a moment that is drawn: in a step of the loop, or while a checkpoint is written."""
    draw = random.Random(f"{os.environ.get('SEED', '0')}/{start}")
    rank, while_saving, delay = draw.randrange(2), draw.random() < 0.6, draw.uniform(0, 0.03)
    place = draw.randrange(2 * BATCH[while_saving][rank])
    passed = 0

    def passing(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed == place + 1:
                print(f"start {start}: rank {rank} is killed {1000 * delay:.0f} ms after {function.__name__}, at its {passed}.", flush=True)
                threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
                time.sleep(0.001)
            return function(*args, **kwargs)

        return wrapped

    if int(os.environ["RANK"]) != rank:
        return
    if while_saving:
        os.fsync, os.rename, os.rmdir = passing(os.fsync), passing(os.rename), passing(os.rmdir)
    else:
        Runtime.enter = passing(Runtime.enter)


def carried(model: str, out: Path, folder: str, backend: str = "fsdp2") -> None:
    """What another number of ranks, or another backend, has saved, as this one reads it, and after one more batch."""
    spec = spec_of(model, "transformers")
    if backend == "deepspeed":
        spec = dc.replace(spec, trainer=rft.DeepSpeedTrainer(dtype="float32", lr=LR, eps=EPS, micro_batch_tokens=96))
    data = tokenise(QUESTIONS, find_model(model).tokenizer, max_tokens=64)
    with rft.launch(spec) as state:
        state, progress = restore(state, Path(folder), Progress())
        before = digest(state)
        state, progress, seen = one_batch(state, progress, data)
        _ = save(state, out / "carried", progress)
        tell(out, "carried", {"before": before, "after": digest(state), "seen": seen})


def tell(out: Path, scene: str, told: object) -> None:
    _ = (out / f"{scene}-{os.environ['RANK']}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    for scene in sys.argv[1].split(","):
        {"stops": stops, "roles": roles, "killed": killed, "carried": carried}[scene](sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
