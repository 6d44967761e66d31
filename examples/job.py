"""A whole training job around the loop of `grpo.py`: launch, measure, train, measure again, keep the model."""

import dataclasses as dc
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
import transformers
import tyro
from grpo import Recipe, Rest, train

import rft
from rft.data.prompts import Cursor, Dataset, Share, all_prompts, next_prompts, tokenise
from rft.data.questions import Question
from rft.memory import Plan, Setting, plan
from rft.models import find_model
from rft.parallel.world import quick_dtype
from rft.recording import record
from rft.telemetry.logging import set_up_logging
from rft.telemetry.records import RUN, read_run
from rft.telemetry.run_folder import Telemetry, next_folder

log = logging.getLogger("rft")
CHECKPOINTS = "checkpoints"
"""Their place in the run folder."""
INTERRUPTED = 130
"""The exit status of a program that Ctrl-C has ended, as shells know it."""


@dc.dataclass(frozen=True, kw_only=True)
class Job:
    """What is common to the jobs here; every field is an option of the command line."""

    model: str
    """A Hugging Face model folder, or a hub id. It needs a chat template."""
    engine: Literal["transformers", "vllm", "sglang"] = "transformers"
    """Samples the responses: transformers is built in, vllm and sglang are to be installed."""
    dtype: Literal["bfloat16", "float32"] = dc.field(default_factory=quick_dtype)
    """Of the computation, in training and sampling: by default what the device is quick in. The trained weights themselves are float32."""
    tensor_parallel: int = 1
    """Ranks that share one engine; vllm and sglang only."""
    folder: Path | None = None
    """The run folder; by default the next free number below runs/. A run that has checkpoints there goes on from the newest."""
    save_every: int = 0
    """Steps from one checkpoint to the next, in the run folder; 0: none. The same command and --folder go on from the newest."""
    keep: int = 2
    """Checkpoints that are kept."""
    seed: int = 0
    """Decides the order of the questions and every sampled token."""
    steps: int
    """Optimizer steps; each takes one batch of fresh responses."""
    prompts: int
    """Questions in a batch, on each rank."""
    samples: int = 8
    """Responses to each question: the group that advantages are relative to."""
    temperature: float = 1.0
    """Of sampling in training. Measuring is greedy."""
    max_prompt_tokens: int
    """Longest prompt, in tokens; a longer question is refused before anything runs."""
    max_new_tokens: int
    """Longest response, in tokens."""
    lr: float
    """AdamW's learning rate."""
    max_grad_norm: float = 1.0
    """The gradient's norm is clipped to this."""
    micro_batch_tokens: int = 4096
    """Padded tokens of one forward pass; less takes less memory."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("prompts", 1), ("max_prompt_tokens", 1), ("save_every", 0), ("keep", 1)):
            if getattr(self, name) < least:
                raise rft.BadInput(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")

    def launch_spec(self) -> rft.LaunchSpec:
        """The runtime of this job."""
        length = self.max_prompt_tokens + self.max_new_tokens
        engines = {"transformers": rft.TransformersEngine, "vllm": rft.VLLMEngine, "sglang": rft.SGLangEngine}
        return rft.LaunchSpec(
            model=self.model,
            engine=engines[self.engine](dtype=self.dtype, max_model_len=length),
            trainer=rft.FSDP2Trainer(
                dtype=self.dtype, lr=self.lr, max_grad_norm=self.max_grad_norm, micro_batch_tokens=self.micro_batch_tokens
            ),
            tensor_parallel=self.tensor_parallel,
            seed=self.seed,
            probe_every=10,  # each probe gathers the whole Actor once more, which is a second on two CPU cores
        )

    def planned(self, ranks: int, device_bytes: int) -> Plan:
        """What each of `ranks` devices has to hold, phase by phase, if all prompts and responses are as long as they may be."""
        return plan(
            Setting(
                launch=self.launch_spec(),
                world_size=ranks,
                device_gib=device_bytes / (1 << 30),
                prompts=self.prompts,
                samples=self.samples,
                minibatches=self.minibatches(),
                longest_prompt=self.max_prompt_tokens,
                longest_response=self.max_new_tokens,
            )
        )

    def minibatches(self) -> int:
        """Optimizer steps that a batch is cut into."""
        return 1

    def sampling(self) -> rft.Sampling:
        """How responses are drawn in training."""
        return rft.Sampling(samples=self.samples, max_new_tokens=self.max_new_tokens, temperature=self.temperature)


@dc.dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be learnt: questions to train on, others to measure with, and what is right."""

    name: str
    training: Sequence[Question]
    held_out: Sequence[Question]
    reward: rft.RewardFunction


@dc.dataclass(frozen=True, kw_only=True)
class Progress:
    """What the job itself goes on from, beside models and random states."""

    step: int = 0
    """Steps that are done."""
    cursor: Cursor
    """Where the next prompts come from."""
    before: float = 0.0
    """The accuracy before the first step."""


JobT = TypeVar("JobT", bound=Job)


def main(kind: type[JobT], task: Callable[[JobT], Task], perform: Callable[[JobT, Task], None]) -> None:
    """Reads the job from the command line and performs it; what cannot work ends the process with the reason alone."""
    set_up_logging()
    transformers.logging.disable_progress_bar()
    try:
        job = tyro.cli(kind, description=kind.__doc__)
        perform(job, task(job))
    except (rft.BadInput, rft.CheckpointFailed, rft.DoesNotFit, rft.PeerFailed) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        log.warning("interrupted; what there is of the run is in its folder")
        os._exit(INTERRUPTED)  # everything has been given back; Python's own clean-up of all that torch imported takes seconds more


RecipeT = TypeVar("RecipeT", bound=Recipe)
Loop = Callable[[Rest, Iterable[rft.Prompts], RecipeT, Telemetry, int], Rest]
"""Takes a step for each batch of prompts; the number is that of the steps done before."""


def perform(job: Job, task: Task) -> None:
    """GRPO; see `carry_out`."""
    carry_out(job, task, "GRPO", Recipe(sampling=job.sampling(), reward=task.reward, objective=rft.grpo()), train)


def carry_out(job: Job, task: Task, name: str, recipe: RecipeT, learn: Loop[RecipeT]) -> None:
    """Trains by a loop, and tells the accuracy on the held-out questions before and after."""
    model, limit = find_model(job.model), job.max_prompt_tokens
    data, measured = (tokenise(q, model.tokenizer, max_tokens=limit, images=model.images) for q in (task.training, task.held_out))
    folder = job.folder or next_folder(Path("runs"), task.name)
    title = f"{name} on {task.name}: {Path(job.model).name}"
    with rft.launch(job.launch_spec()) as state:
        share = Share(index=dist.get_rank(), count=dist.get_world_size())
        progress, begun = Progress(cursor=Cursor(seed=job.seed)), begun_with_checkpoints(folder)
        goes_on = rft.newest_checkpoint(folder / CHECKPOINTS) is not None
        if goes_on:
            state, progress = rft.restore(state, folder / CHECKPOINTS, progress)
        if progress.step > job.steps:
            raise rft.BadInput(f"--steps {job.steps}: {folder} has gone {progress.step} steps already; ask for as many, or for more")
        with record(state, folder, title=title, config=job, steps=job.steps, done=progress.step if goes_on or begun else None) as run:
            if not goes_on:
                state, before = measure(state, measured, share, recipe)
                progress = dc.replace(progress, before=before)
                keep(state, folder, progress, job)
            if torch.cuda.is_available() and model.images is None:
                run.plan(job.planned(share.count, torch.cuda.get_device_properties(0).total_memory).peaks())
            if progress.step == 0:
                run.note(0, {"accuracy": progress.before})
            while progress.step < job.steps:
                count = min(job.save_every or job.steps, job.steps - progress.step)
                prompts = Upcoming(data, progress.cursor, share, job.prompts, count)
                state = learn(state, prompts, recipe, run, progress.step)
                progress = dc.replace(progress, step=progress.step + count, cursor=prompts.cursor)
                keep(state, folder, progress, job)
            state, after = measure(state, measured, share, recipe)
            run.note(job.steps, {"accuracy": after})
            _ = rft.export(state, folder / "model")
    if share.index == 0:
        log.info("accuracy on %d held-out questions: %.1f%% before, %.1f%% after", len(measured), 100 * progress.before, 100 * after)
        log.info("run folder: %s (report.html, metrics.jsonl, tensorboard/, model/)", folder)


def begun_with_checkpoints(folder: Path) -> bool:
    """Whether a run was begun here that would have had checkpoints: one that ended before its first begins anew."""
    return (folder / RUN).is_file() and bool(read_run(folder)["config"].get("save_every"))


def keep(state: Rest, folder: Path, progress: Progress, job: Job) -> None:
    """A checkpoint, where the job is to have some."""
    if job.save_every:
        _ = rft.save(state, folder / CHECKPOINTS, progress, keep=job.keep)


class Upcoming:
    """This rank's prompts for `count` steps, each made when it is asked for; `cursor` is where the next ones come from."""

    def __init__(self, data: Dataset, cursor: Cursor, share: Share, size: int, count: int) -> None:
        self._data, self.cursor, self._share, self._size, self._count = data, cursor, share, size, count

    def __iter__(self) -> Iterator[rft.Prompts]:
        for _ in range(self._count):
            prompts, self.cursor = next_prompts(self._data, self.cursor, self._size, self._share)
            yield prompts


def measure(start: Rest, data: Dataset, share: Share, recipe: Recipe) -> tuple[Rest, float]:
    """Mean reward of greedy responses, over all ranks."""
    state = rft.refresh(start)
    greedy = dc.replace(recipe.sampling, samples=1, temperature=0.0)
    evaluation = rft.evaluate(state, all_prompts(data, share), greedy, recipe.reward)
    return rft.sleep(state), evaluation.reward
