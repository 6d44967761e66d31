"""The example with figures, with a rule that a model without sense gets too, and then what a state gives of rows with images.

    geometry_ranks.py FOLDER ARGUMENTS

The run is FOLDER/run; what rank r saw afterwards is in FOLDER/r.pt.
"""

import dataclasses as dc
import os
import sys
from typing import Any

import grpo_geometry
import job
import torch
import torch.distributed as dist

import rft
from rft.data.prompts import Share, all_prompts, tokenise
from rft.models import find_model


def by_bytes(sample: rft.Sample) -> float:
    """Something that differs between responses."""
    return sum(sample.response.encode()) % 7 / 7


def by_the_state(given: Any) -> dict[str, Any]:
    """Log-probs of one batch by engine, Actor and Reference, and the gap of the probe; then a step on some of its rows."""
    spec, model = given.launch_spec(), find_model(given.model)
    data = tokenise(grpo_geometry.task(given).training, model.tokenizer, max_tokens=given.max_prompt_tokens, images=model.images)
    with rft.launch(dc.replace(spec, probe_every=1, reference=rft.Reference(dtype="float32"))) as state:
        share = Share(index=dist.get_rank(), count=dist.get_world_size())
        state = rft.refresh(state)
        rollouts = rft.generate(state, all_prompts(data, share), rft.Sampling(samples=2, max_new_tokens=8))
        state = rft.compute_old_logprobs(rft.sleep(state), rollouts)
        state, reference = rft.use(state, rft.REFERENCE, lambda there: rft.reference_logprobs(there, rollouts))
        assert isinstance(state.old, rft.OldLogProbs)
        actor, images = state.old.batches[0].values, rollouts.images
        seen = {"engine": rollouts.logprobs, "actor": actor, "reference": reference, "gap": rft.health(state).gaps[-1].mean}
        seen["images"] = [None if images is None or each is None else each.grids.tolist() for each in images or ()]
        seen["shared"] = images is not None and images[0] is images[1]
        experience = rft.experience(rollouts, torch.ones(len(rollouts)), rollouts.sampled.float())
        half = rft.take(experience, torch.arange(0, len(experience), 2))
        state, metrics = rft.train_step(state, half, rft.grpo())
        _ = rft.finish_batch(state)
    return {**seen, "grad_norm": metrics["grad_norm"]}


if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    jobs: list[Any] = []
    sys.argv[1:] = [*arguments, "--folder", f"{folder}/run"]

    def learn(given: Any, task: Any) -> None:
        jobs.append(given)
        grpo_geometry.perform(given, task)

    job.main(grpo_geometry.GrpoGeometry, lambda given: dc.replace(grpo_geometry.task(given), reward=by_bytes), learn)
    torch.save(by_the_state(jobs[0]), f"{folder}/{os.environ['RANK']}.pt")
