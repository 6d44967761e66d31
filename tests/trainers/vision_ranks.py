"""What the ranks do for `seeing.py`: a model that takes images, on ranks of which some have none.

    torchrun vision_ranks.py MODELS RESULTS BACKEND...

Every scene returns what it saw on this rank; the results of rank r with a backend are in RESULTS/BACKEND/r.pt.
"""

import dataclasses as dc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rft.errors import BadInput
from rft.experience import Minibatch
from rft.models import find_model
from rft.objectives import grpo
from rft.parallel.world import World, open_world
from rft.spec import Reference
from rft.trainers import packed
from tests.trainers import backends
from tests.trainers.batches import rows_of, seeing_experience

MODELS, RESULTS, BACKENDS = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
backend = BACKENDS[0]
PLAIN: dict[str, Any] = {"dtype": "float32", "lr": 1e-3, "max_grad_norm": float("inf")}
SOURCE = seeing_experience()
MIXED, APART, IDLE = ((0, 1, 2), (3, 4, 5)), ((0, 1, 3, 4), (2, 5)), ((0, 1, 2, 3, 4, 5), ())
TEXT = ((2,), (5,))


def build(world: World, model: str = "seeing", **options: Any) -> Any:
    return backends.specification(backend, {**PLAIN, **options}).build(find_model(str(MODELS / model)), world)


def share(world: World, shares: tuple[tuple[int, ...], ...]) -> Minibatch:
    return rows_of(SOURCE, *(shares[world.rank] if world.size > 1 else sorted(sum(shares, ()))))


def gradient(world: World, shares: tuple[tuple[int, ...], ...], **options: Any) -> Any:
    trainer = build(world, **options)
    metrics = trainer.step(share(world, shares), None, grpo())
    seen = backends.gradient(trainer)
    trainer.close()
    return {"gradient": seen, "metrics": metrics}


def gradients(world: World) -> Any:
    seen = {
        "mixed": gradient(world, MIXED),
        "images on one rank": gradient(world, APART),
        "row by row": gradient(world, APART, micro_batch_tokens=1),
        "an idle rank": gradient(world, IDLE, micro_batch_tokens=30),
        "checkpointed": gradient(world, APART, micro_batch_tokens=30, gradient_checkpointing=True),
    }
    if backend.startswith("fsdp2"):
        seen["resharded"] = gradient(world, APART, micro_batch_tokens=30, keep_gathered=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "prepare", cannot)
        seen["padded"] = gradient(world, APART, micro_batch_tokens=60)
    return seen


def cannot(model: object) -> None:
    del model
    raise packed.CannotPack("this is a test")


def steps(world: World) -> Any:
    """With images, without any, and with some again; and the weights after them."""
    trainer = build(world, eps=1e-7, micro_batch_tokens=40)
    metrics = [trainer.step(share(world, shares), None, grpo()) for shares in (APART, TEXT, MIXED)]
    weights = {name: tensor.cpu().clone() for name, tensor in trainer.stream_weights()}
    trainer.close()
    return {"metrics": metrics, "weights": weights}


def logprobs(world: World) -> Any:
    """By the Actor and by a Reference, on ranks that are mixed and on ranks that are not."""
    actor = build(world, micro_batch_tokens=40)
    reference = Reference(dtype="float32").build(find_model(str(MODELS / "seeing")), world)
    seen = []
    for model in (actor, reference):
        for shares in (MIXED, APART, IDLE):
            batch = share(world, shares)
            seen.append(model.logprobs(batch.tokens, batch.mask, batch.sampled, 1.0, batch.images))
    return seen


def names(world: World) -> Any:
    """What is streamed, and what is exported."""
    trainer = build(world)
    trainer.export(RESULTS / backend / "exported")
    return {name: tensor.cpu().clone() for name, tensor in trainer.stream_weights()}


def refusals(world: World) -> Any:
    """Of images for a model of text; of images that are not those of the placeholders, on the last rank; and then all is well."""
    batch = share(world, MIXED)
    seen = [refusal(build(world, "text"), batch)]
    trainer = build(world)
    assert batch.images is not None
    other = dc.replace(batch, images=batch.images[1:] + batch.images[:1]) if world.rank == world.size - 1 else batch
    return [*seen, refusal(trainer, other), trainer.step(batch, None, grpo())["loss"]]


def refusal(trainer: Any, batch: Minibatch) -> str:
    with pytest.raises(BadInput) as error:
        trainer.step(batch, None, grpo())
    return str(error.value)


SCENES = (gradients, steps, logprobs, names, refusals)

if __name__ == "__main__":
    world = open_world(1, timeout_s=60)
    for backend in BACKENDS:
        (RESULTS / backend).mkdir(parents=True, exist_ok=True)
        torch.save({scene.__name__: scene(world) for scene in SCENES}, RESULTS / backend / f"{world.rank}.pt")
    torch.distributed.destroy_process_group()
