"""What the ranks do for `contract.py`, which compares what they saved here with a plain single-process loop.

    torchrun ranks.py MODELS RESULTS BACKEND[;SCENE...]...

Every scene returns what it saw on this rank; the results of rank r with a backend are in RESULTS/BACKEND/r.pt. All scenes, or those named.
"""

import dataclasses as dc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from rft.errors import BadInput, NonFiniteGradient, RftError, RuntimePoisoned
from rft.experience import Experience, Minibatch
from rft.models import find_model
from rft.narrow import Narrows
from rft.objectives import LossTerms, MicroBatch, Objective, TokenScores, Totals, grpo, supervised
from rft.ops.metrics import maximum
from rft.parallel.world import World, open_world
from rft.spec import FSDP2Trainer
from tests.trainers import backends, parcels
from tests.trainers.batches import random_experience, rows_of, some_old

MODELS, RESULTS, BACKENDS = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
backend = BACKENDS[0]
PLAIN: dict[str, Any] = {"dtype": "float32", "lr": 1e-3, "max_grad_norm": float("inf")}
SOURCE = random_experience()
MIXED = random_experience(temperature=None)
OLD = some_old(SOURCE, torch.where(SOURCE.sampled, -6.0, 0.0))
ALL = (0, 1, 2, 3, 4, 5, 6, 7)
SHARES = {1: [ALL], 2: [(0, 1, 2, 3, 4), (5, 6, 7)], 3: [(0, 1, 2), (3,), (4, 5, 6, 7)], 4: [(0, 1), (2,), (3, 4), (5, 6, 7)]}
IDLE = {1: [ALL], 2: [ALL, ()], 3: [ALL, (), ()], 4: [ALL, (), (), ()]}
FIVE_STEPS: dict[str, Any] = {
    **PLAIN, "eps": 1e-7, "max_grad_norm": 1.0, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 1, "total_steps": 9
}  # fmt: skip


def build(world: World, model: str = "qwen2", **options: Any) -> Any:
    return backends.specification(backend, {**PLAIN, **options}).build(find_model(str(MODELS / model)), world)


def share(world: World, shares: dict[int, list[tuple[int, ...]]] = SHARES, source: Experience = SOURCE) -> tuple[Minibatch, Tensor]:
    rows = shares[world.size][world.rank]
    return rows_of(source, *rows), OLD[list(rows)]


def later(mask: Tensor) -> Tensor:
    """All tokens that something predicts."""
    return mask & (torch.arange(mask.shape[1]) > 0)


def weights(trainer: Any, dtype: torch.dtype | None = None, narrows: Sequence[Narrows] = ()) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in trainer.stream_weights(dtype, narrows)}


def gradient(
    world: World,
    model: str = "qwen2",
    shares: Any = SHARES,
    old: bool = True,
    objective: Objective | None = None,
    source: Experience = SOURCE,
    **options: Any,
) -> Any:
    """One step's gradient and metrics."""
    trainer = build(world, model, **options)
    batch, before = share(world, shares, source)
    metrics = trainer.step(batch, before if old else None, objective or grpo())
    seen = backends.gradient(trainer)
    trainer.close()
    return {"gradient": seen, "metrics": metrics}


def constant_loss(world: World) -> Any:
    """An objective that gives a number where it finds nothing sampled; the rank without rows meets it."""

    def careful(new: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
        terms = grpo()(new, micro, totals)
        return terms if micro.rows.sampled.any() else dc.replace(terms, loss=torch.tensor(0.0))

    return gradient(world, shares=IDLE, objective=careful)


def gradients(world: World) -> Any:
    seen = {
        "whole": gradient(world),
        "row by row": gradient(world, micro_batch_tokens=1),
        "a few rows": gradient(world, micro_batch_tokens=30),
        "checkpointed": gradient(world, micro_batch_tokens=30, gradient_checkpointing=True),
        "an idle rank": gradient(world, shares=IDLE, micro_batch_tokens=30),
        "first step": gradient(world, old=False, micro_batch_tokens=30),
        "uneven shards": gradient(world, model="uneven", micro_batch_tokens=30),
        "a constant loss": constant_loss(world),
        "mixed temperatures": gradient(world, source=MIXED, micro_batch_tokens=30),
        "padded": gradient(world, model="windowed", micro_batch_tokens=40),
        "padded, checkpointed": gradient(world, model="windowed", gradient_checkpointing=True),
        "bfloat16": gradient(world, old=False, dtype="bfloat16"),
    }
    if backend.startswith("fsdp2"):
        seen["resharded"] = gradient(world, micro_batch_tokens=30, keep_gathered=False)
        seen["checkpointed, resharded"] = gradient(world, micro_batch_tokens=30, gradient_checkpointing=True, keep_gathered=False)
    return seen


def many_equal_micro_batches(world: World) -> Any:
    """32 times the same row in bf16, together and alone: what adds up must not be rounded to bf16 on the way."""
    results = []
    for count in (32, 1):
        trainer = build(world, dtype="bfloat16", micro_batch_tokens=1)
        trainer.step(rows_of(SOURCE, *[0] * count), None, grpo())
        results.append(backends.gradient(trainer))
    return results


def compute_dtype(world: World) -> Any:
    trainer = build(world, dtype="bfloat16")
    stored = {n.removeprefix("model."): t for n, t in whole(trainer.saved()).items() if n.startswith("model.")}
    seen: list[torch.dtype] = []
    layer = trainer._backend.root.model.model.layers[1].mlp.up_proj
    layer.register_forward_pre_hook(lambda module, args: seen.extend([module.weight.dtype, args[0].dtype]))
    trainer.step(*share(world), grpo())
    return {"dtypes": seen, "masters": backends.masters(trainer), "stored": stored}


def five_steps(world: World) -> Any:
    """Log-probs before each step, its metrics, and the last weights."""
    trainer = build(world, micro_batch_tokens=40, **FIVE_STEPS)
    batch, old = share(world)
    seen = []
    for _ in range(5):
        logprobs = trainer.logprobs(batch.tokens, batch.mask, later(batch.mask), 1.0)
        seen.append({"logprobs": logprobs, **trainer.step(batch, old, grpo())})
    return {"steps": seen, "weights": weights(trainer)}


def first_steps(world: World) -> Any:
    """Log-probs, then a step on the same micro-batches, in both dtypes."""
    seen = []
    for dtype in ("float32", "bfloat16"):
        trainer = build(world, dtype=dtype, micro_batch_tokens=30)
        batch, _ = share(world)
        seen.append(trainer.step(batch, trainer.logprobs(batch.tokens, batch.mask, batch.sampled, 1.0), grpo()))
    return seen


def supervised_steps(world: World) -> Any:
    trainer = build(world)
    return [trainer.step(share(world)[0], None, supervised()) for _ in range(3)]


def logprobs(world: World) -> Any:
    """On ranks with different rows, then with none on one rank, then on none at all."""
    trainer = build(world, micro_batch_tokens=30)
    some, idle = share(world)[0], share(world, IDLE)[0]
    return [
        trainer.logprobs(some.tokens, some.mask, later(some.mask), 0.7),
        trainer.logprobs(idle.tokens, idle.mask, idle.sampled, 0.0),
        trainer.logprobs(some.tokens[:0], some.mask[:0], some.mask[:0], 1.0),
    ]


def streams(world: World) -> Any:
    """Manifest and stream, of models with tied and untied heads and rows that do not divide; with buckets of any size too."""
    from rft.trainers import gathering

    result: dict[str, Any] = {}
    for model in ("qwen2", "uneven"):
        trainer = build(world, model)
        result[model] = {"manifest": trainer.manifest(), "weights": weights(trainer)}
        result[model] |= {"cast": weights(trainer, torch.bfloat16), "cast manifest": trainer.manifest(torch.bfloat16)}
        gathering.BUCKET, bucket = 5000, gathering.BUCKET
        result[model] |= {"small buckets": weights(trainer), "cast, small buckets": weights(trainer, torch.bfloat16)}
        gathering.BUCKET = bucket
        shapes = {spec.name: spec.shape for spec in trainer.manifest()}
        result[model]["cut"] = weights(trainer, torch.bfloat16, [parcels.slices(shapes, rank) for rank in range(world.size)])
        away(trainer)
        result[model]["cast, from host"] = weights(trainer, torch.bfloat16)
    return result


def placement(world: World) -> Any:
    """A trainer that goes to the host and back between steps, beside one that never does."""
    moved, still = build(world, "uneven"), build(world, "uneven")
    batch, old = share(world)
    sizes = [moved.bytes("model"), moved.bytes("optimizer")]
    streams = []
    for _ in range(2):
        moved.offload("optimizer")
        refused = refusal(lambda: moved.step(batch, old, grpo()))
        moved.offload("model")
        refused += refusal(lambda: moved.logprobs(batch.tokens, batch.mask, batch.sampled, 1.0))
        held = backends.held(moved)
        streams.append((weights(moved), weights(still)))
        moved.reload("model")
        moved.reload("optimizer")
        metrics = [trainer.step(batch, old, grpo()) for trainer in (moved, still)]
    after = [moved.bytes("model"), moved.bytes("optimizer")]
    return {"refused": refused, "held": held, "sizes": sizes, "after": after, "metrics": metrics, "streams": streams,
            "weights": (weights(moved), weights(still))}  # fmt: skip


def checkpoints(world: World) -> Any:
    """What is saved after two steps goes to another trainer, and both step on; while the parts of one, then of the other, are away."""
    seen: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        one, other = (build(world, "uneven", micro_batch_tokens=40, **{**FIVE_STEPS, "dtype": dtype}) for _ in range(2))
        batch, old = share(world)
        for _ in range(2):
            _ = one.step(batch, old, grpo())
        kept = one.saved()
        away(one)
        from_host = one.saved()
        back(one)
        away(other)
        other.install(from_host)
        back(other)
        same = {"from host": equal(whole(kept), whole(from_host)), "installed": equal(weights(one), weights(other))}
        same["metrics"] = one.step(batch, old, grpo()) == other.step(batch, old, grpo())
        same |= {"after": equal(whole(one.saved()), whole(other.saved())), "weights": equal(weights(one), weights(other))}
        seen[dtype] = {"kept": whole(kept), "same": same}
    return seen


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def from_elsewhere(world: World) -> Any:
    """What a plain loop has after two steps, installed; and one more step."""
    trainer = build(world, "uneven", micro_batch_tokens=40, **FIVE_STEPS)
    like, plain = trainer.saved(), torch.load(MODELS / "plain.pt")
    trainer.install({name: cut(tensor, plain[name]) for name, tensor in like.items()})
    installed = whole(trainer.saved())
    metrics = trainer.step(*share(world), grpo())
    return {"installed": installed, "metrics": metrics, "after": whole(trainer.saved())}


def away(trainer: Any) -> None:
    trainer.offload("optimizer")
    trainer.offload("model")


def back(trainer: Any) -> None:
    trainer.reload("model")
    trainer.reload("optimizer")


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """What is saved, in full."""
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def cut(like: Any, full: Tensor) -> Tensor:
    """A whole tensor, cut as another one is."""
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None) if isinstance(like, DTensor) else full


def one_rank_copies_nothing(world: World) -> Any:
    if not backend.startswith("fsdp2"):
        return [world.size == 1]
    trainer = build(world)
    own = {p.detach().to_local().data_ptr() for p in trainer._backend.parameters}
    return [tensor.data_ptr() in own for _, tensor in trainer.stream_weights()]


def export(world: World) -> Any:
    """After a step, twice over the same folder."""
    result = {}
    for model in ("qwen2", "uneven", "half"):
        trainer = build(world, model)
        trainer.export(RESULTS / backend / "exported" / model)
        trainer.step(*share(world), grpo())
        trainer.export(RESULTS / backend / "exported" / model)
        result[model] = weights(trainer)
        trainer.close()
        trainer.close()
    return result


def not_finite(world: World) -> Any:
    """A gradient of NaN on the last rank only; then a good step, beside a trainer that never saw it."""
    hurt, well = build(world), build(world)
    batch, old = share(world)

    def broken(new: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
        terms = grpo()(new, micro, totals)
        return dc.replace(terms, loss=terms.loss * float("nan")) if world.rank == world.size - 1 else terms

    before = weights(hurt)
    refused = refusal(lambda: hurt.step(batch, old, broken), NonFiniteGradient)
    untouched = (before, weights(hurt))
    metrics = [trainer.step(batch, old, grpo()) for trainer in (hurt, well)]
    return {"refused": refused, "untouched": untouched, "metrics": metrics, "weights": (weights(hurt), weights(well))}


def bad_batches(world: World) -> Any:
    """Each is wrong on the last rank alone (but the first, which is nobody's fault), and refused on all."""
    trainer = build(world)
    batch, last = share(world)[0], world.rank == world.size - 1
    hole, early, short = batch.mask.clone(), batch.sampled.clone(), batch.mask.clone()
    hole[0, 1], early[0, 0], short[0, 5:] = False, True, False
    nothing = dc.replace(batch, sampled=torch.zeros_like(batch.sampled))
    return [
        refusal(lambda: trainer.step(nothing, None, grpo()), BadInput),
        refusal(lambda: trainer.step(dc.replace(batch, mask=hole) if last else batch, None, grpo()), BadInput),
        refusal(lambda: trainer.step(dc.replace(batch, sampled=early) if last else batch, None, grpo()), BadInput),
        refusal(lambda: trainer.logprobs(batch.tokens, hole if last else batch.mask, batch.sampled, 1.0), BadInput),
        refusal(lambda: trainer.step(batch, None, two_kinds(world)), BadInput) if world.size > 1 else [],
        refusal(lambda: trainer.step(dc.replace(batch, mask=short) if last else batch, None, grpo()), BadInput),
        trainer.step(batch, None, grpo()),
    ]


def totals_of_the_batch(world: World) -> Any:
    """What an objective is told of the global batch, of which row 4 is demonstrated."""
    told: list[Totals] = []

    def objective(new: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
        told.append(totals)
        return grpo()(new, micro, totals)

    shown = dc.replace(SOURCE, demonstrated=torch.arange(8) == 4)
    gradient(world, objective=objective, source=shown, micro_batch_tokens=30)
    return told


def two_kinds(world: World) -> Objective:
    """One name for different kinds of metrics on different ranks."""

    def objective(new: TokenScores, micro: MicroBatch, _: Totals) -> LossTerms:
        most = maximum(new.logprobs, micro.rows.sampled)
        return LossTerms(loss=new.logprobs.sum(), metrics={"most": most if world.rank else most.largest})

    return objective


def metrics(world: World) -> Any:
    """What is summed, what merges, and what only some micro-batches tell of."""

    def objective(new: TokenScores, micro: MicroBatch, _: Totals) -> LossTerms:
        marked = micro.rows.sampled
        told = {"most": maximum(new.entropy, marked), "tokens": marked.sum(), "sum": new.entropy.sum()}
        if (micro.rows.rows == 4).any():
            told["row 4"] = micro.rows.sampled[micro.rows.rows == 4].sum()
        return LossTerms(loss=new.logprobs.sum(), metrics=told)

    return [gradient(world, objective=objective, micro_batch_tokens=budget)["metrics"] for budget in (1, 30, 1000)]


def failing_objective(world: World) -> Any:
    """One that fails at once, on the last rank alone; a good step after it, beside a trainer that never saw it; one that fails later."""
    batch, old = share(world)
    hurt, well = build(world, micro_batch_tokens=1), build(world, micro_batch_tokens=1)  # several micro-batches, on four ranks too
    calls: list[int] = []

    def at_once(new: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
        wide = int(world.rank == world.size - 1)
        return grpo()(TokenScores(logprobs=new.logprobs[:, wide:], entropy=new.entropy[:, wide:]), micro, totals)

    def later(new: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
        calls.append(1)
        terms = grpo()(new, micro, totals)
        return terms if len(calls) == 1 else dc.replace(terms, loss=new.logprobs)

    refused = refusal(lambda: hurt.step(batch, old, at_once), BadInput)
    metrics = [trainer.step(batch, old, grpo()) for trainer in (hurt, well)]
    poisoned = refusal(lambda: hurt.step(batch, old, later), RuntimePoisoned)
    return {"refused": refused, "metrics": metrics, "poisoned": poisoned, "weights": (weights(hurt), weights(well))}


def refused_at_launch(world: World) -> Any:
    """What a backend or a version cannot do; and a model that only rank 0 finds without weights."""
    from rft.trainers import hugging_face

    def fails(*_: Any, **__: Any) -> None:
        raise BadInput(f"rank {world.rank} finds no weights")

    seen: list[str] = []
    load, hugging_face.load = hugging_face.load, fails
    seen += refusal(lambda: build(world))
    hugging_face.load = load
    if backend.startswith("fsdp2"):
        return seen + refusal(lambda: FSDP2Trainer(shards=world.size + 1).build(find_model(str(MODELS / "qwen2")), world))
    import deepspeed

    version, deepspeed.__version__ = deepspeed.__version__, "0.19.7+abc"
    seen += refusal(lambda: build(world))
    deepspeed.__version__ = version
    elsewhere = dc.replace(world, device=torch.device("cuda:0"))
    return seen + refusal(lambda: build(elsewhere))


def refusal(call: Callable[[], Any], kind: type[RftError] = RftError) -> list[str]:
    try:
        call()
    except kind as error:
        return [f"{type(error).__name__}: {error}"]
    return ["nothing was raised"]


SCENES = (
    gradients, many_equal_micro_batches, compute_dtype, first_steps, five_steps, supervised_steps, logprobs, streams, placement,
    checkpoints, from_elsewhere, one_rank_copies_nothing, export, not_finite, bad_batches, failing_objective, metrics,
    totals_of_the_batch, refused_at_launch, parcels.gathers,
)  # fmt: skip


def main() -> None:
    global backend
    torch.set_num_threads(1)
    world = open_world(1, timeout_s=60)
    for what in BACKENDS:
        backend, *some = what.split(";")
        (RESULTS / backend).mkdir(exist_ok=True)
        seen = {scene.__name__: scene(world) for scene in SCENES if not some or scene.__name__ in some}
        torch.save(seen, RESULTS / backend / f"{world.rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
