"""What the ranks do for `test_lora.py`, which compares what they saved here with peft's own loop in a single process.

    torchrun lora_ranks.py MODELS RESULTS BACKEND...

MODELS has models, and for each of them a peft folder MODEL-adapter of rank 4 and alpha 8 with random A and B. Every scene returns what
it saw on this rank; the results of rank r with a backend are in RESULTS/BACKEND/r.pt.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.errors import BadInput
from rft.models import find_model
from rft.objectives import grpo
from rft.parallel.world import World, open_world
from rft.spec import LoRA
from rft.trainers import adapter
from tests.trainers import backends
from tests.trainers.batches import random_experience, rows_of, some_old

MODELS, RESULTS, BACKENDS = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
backend = BACKENDS[0]
PLAIN: dict[str, Any] = {"dtype": "float32", "lr": 1e-3, "max_grad_norm": float("inf")}
SOURCE = random_experience()
OLD = some_old(SOURCE, torch.where(SOURCE.sampled, -6.0, 0.0))
SHARES = {1: [(0, 1, 2, 3, 4, 5, 6, 7)], 2: [(0, 1, 2, 3, 4), (5, 6, 7)]}
SOME = ("q_proj", "mlp.down_proj")


def build(world: World, model: str = "qwen2", lora: dict[str, Any] | None = None, **options: Any) -> Any:
    given = LoRA(rank=4, alpha=8, **({"adapter": str(MODELS / f"{model}-adapter")} if lora is None else lora))
    spec = backends.specification(backend, {**PLAIN, **options, "lora": given})
    return spec.build(find_model(str(MODELS / model)), world)


def share(world: World) -> tuple[Any, Tensor]:
    rows = SHARES[world.size][world.rank]
    return rows_of(SOURCE, *rows), OLD[list(rows)]


def later(mask: Tensor) -> Tensor:
    return mask & (torch.arange(mask.shape[1]) > 0)


def whole(stream: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in stream}


def sent(sending: Any) -> dict[str, Tensor]:
    """The tensors of a sending, which are those that it promised."""
    tensors = whole(sending.tensors)
    promised = [(spec.name, spec.shape, spec.dtype) for spec in sending.manifest]
    assert promised == [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    return tensors


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except BadInput as error:
        return str(error)
    return "nothing was raised"


def gradient(world: World, model: str = "qwen2", **options: Any) -> Any:
    trainer = build(world, model, **options)
    metrics = trainer.step(*share(world), grpo())
    seen = {adapter.plain(name): tensor for name, tensor in backends.gradient(trainer).items()}
    trainer.close()
    return {"gradient": seen, "metrics": metrics}


def gradients(world: World) -> Any:
    return {
        "row by row": gradient(world, micro_batch_tokens=1),
        "checkpointed": gradient(world, micro_batch_tokens=30, gradient_checkpointing=True),
        "uneven shards": gradient(world, "uneven", micro_batch_tokens=30),
        "padded": gradient(world, "windowed", micro_batch_tokens=40),
        "some layers": gradient(world, "some", lora={"adapter": str(MODELS / "some-adapter"), "targets": SOME}),
        "bfloat16": gradient(world, dtype="bfloat16"),
    } | ({"resharded": gradient(world, micro_batch_tokens=30, keep_gathered=False)} if backend == "fsdp2" else {})


def five_steps(world: World) -> Any:
    """Log-probs with the adapter and without before each step, and what is sent in the end."""
    options: dict[str, Any] = {"eps": 1e-7, "max_grad_norm": 0.5, "weight_decay": 0.1}
    trainer = build(world, micro_batch_tokens=40, **options)
    batch, old = share(world)
    seen = []
    for _ in range(5):
        base = trainer.base_logprobs(batch.tokens, batch.mask, later(batch.mask), 0.7)
        with_adapter = trainer.logprobs(batch.tokens, batch.mask, later(batch.mask), 1.0)
        seen.append({"base": base, "logprobs": with_adapter, **trainer.step(batch, old, grpo())})
    trainer.export_adapter(RESULTS / backend / "adapter")
    trainer.export(RESULTS / backend / "merged")
    return {
        "steps": seen,
        "adapter": sent(trainer.adapter()),
        "base": sent(trainer.base()),
        "merged": whole(trainer.stream_weights()),
        "again": whole(trainer.stream_weights()),
        "manifest": [(spec.name, spec.shape, spec.dtype) for spec in trainer.manifest()],
    }


def beginning(world: World) -> Any:
    """An adapter of zeros changes nothing, in fp32 and in bf16; the base is held in the dtype of computing."""
    seen = {}
    for dtype in ("float32", "bfloat16"):
        trainer = build(world, lora={"seed": 3}, dtype=dtype)
        batch, _ = share(world)
        scores = [ask(batch.tokens, batch.mask, batch.sampled, 1.0) for ask in (trainer.base_logprobs, trainer.logprobs)]
        base = {spec.dtype for spec in trainer.base().manifest}
        seen[dtype] = {"merged": whole(trainer.stream_weights()), "scores": scores, "base": base, "adapter": sent(trainer.adapter())}
        seen[dtype]["masters"] = backends.masters(trainer)
        trainer.close()
    return seen


def placement(world: World) -> Any:
    """An Actor that goes to the host between steps, beside one that never does."""
    moved, still = build(world, "uneven"), build(world, "uneven")
    batch, old = share(world)
    sizes = [moved.bytes("model"), moved.bytes("optimizer")]
    for part in ("optimizer", "model"):
        moved.offload(part)
    streams = (whole(moved.stream_weights()), whole(still.stream_weights()))
    adapters = (sent(moved.adapter()), sent(still.adapter()))
    for part in ("model", "optimizer"):
        moved.reload(part)
    metrics = [trainer.step(batch, old, grpo()) for trainer in (moved, still)]
    after = (whole(moved.stream_weights()), whole(still.stream_weights()))
    return {"sizes": sizes, "streams": streams, "adapters": adapters, "metrics": metrics, "after": after}


def checkpoints(world: World) -> Any:
    """Two steps, and what was saved after the first of them installed in a new Actor that makes the second; and in one of another base."""
    first, other, stranger = build(world), build(world, lora={}), build(world, "stranger", lora={})
    batch, old = share(world)
    first.step(batch, old, grpo())
    saved = first.saved()
    again = first.step(batch, old, grpo())
    other.install(saved)
    refused = refusal(lambda: stranger.install(saved))
    return {
        "names": sorted(saved),
        "refused": refused,
        "metrics": [again, other.step(batch, old, grpo())],
        "weights": (whole(first.stream_weights()), whole(other.stream_weights())),
    }


def refusals(world: World) -> Any:
    """Layers that are not there; and a folder that is no adapter, on rank 0 alone."""
    own = MODELS / "qwen2-adapter"
    cases = {"no module": {"targets": ("q_proj", "qqq")}, "on one rank": {"adapter": str(own if world.rank else MODELS)}}
    return {name: refusal(lambda lora=lora: build(world, lora=lora)) for name, lora in cases.items()}


SCENES = (gradients, five_steps, beginning, placement, checkpoints, refusals)


def main() -> None:
    global backend
    torch.set_num_threads(1)
    world = open_world(1, timeout_s=60)
    for backend in BACKENDS:
        (RESULTS / backend).mkdir(exist_ok=True)
        torch.save({scene.__name__: scene(world) for scene in SCENES}, RESULTS / backend / f"{world.rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
