"""What the ranks do for `test_frozen.py`: frozen_ranks.py MODELS RESULTS. Rank r leaves what it saw in RESULTS/r.pt."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.errors import BadInput, RftError, RoleError
from rft.models import ModelFolder, find_model
from rft.parallel.world import World, open_world
from rft.spec import FSDP2Trainer, MovingAverage, Reference, RewardModel
from tests.trainers.batches import random_experience, rows_of
from tests.trainers.judges import ALL, IDLE, SHARES, given, random_rollouts

MODELS, RESULTS = Path(sys.argv[1]), Path(sys.argv[2])
SOURCE = random_experience()
EXACT: dict[str, Any] = {"dtype": "float32", "micro_batch_tokens": 30}


def sharings(world: World) -> list[int | None]:
    """Over all ranks, over none, and over half of them."""
    return [None, 1] if world.size < 4 else [None, 1, 2]


def actor() -> ModelFolder:
    return find_model(str(MODELS / "actor"))


def logprobs(model: Any, rows: tuple[int, ...], temperature: float = 0.7) -> Tensor:
    some = rows_of(SOURCE, *rows)
    return model.logprobs(some.tokens, some.mask, some.mask & (torch.arange(some.mask.shape[1]) > 0), temperature)


def weights(model: Any) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in model.held.whole()}


def on_device(*models: Any) -> int:
    """Bytes that the weights of some models take on the device now, by their storages."""
    return sum(p.to_local().untyped_storage().nbytes() for model in models for p in model.held.parameters)


def reference(world: World) -> Any:
    """Log-probs of a Reference with weights of its own, however it is sharded; and with no rows on all ranks but one."""
    seen: dict[str, Any] = {}
    for shards in sharings(world):
        model = Reference(model=str(MODELS / "other weights"), shards=shards, **EXACT).build(actor(), world)
        seen[str(shards)] = [logprobs(model, SHARES[world.size][world.rank]), logprobs(model, IDLE[world.size][world.rank], 0.0)]
        seen[f"bytes {shards}"] = model.bytes
        model.close()
    return seen


def beside_the_actor(world: World) -> Any:
    """The Reference and the Actor before training, in each dtype."""
    seen = []
    for dtype in ("float32", "bfloat16"):
        options: Any = {"dtype": dtype, "micro_batch_tokens": 30}
        reference, trainer = Reference(**options).build(actor(), world), FSDP2Trainer(**options).build(actor(), world)
        dtypes = {p.dtype for p in reference.held.parameters}
        seen.append((dtypes, [logprobs(model, SHARES[world.size][world.rank]) for model in (reference, trainer)]))
    return seen


def average(world: World) -> Any:
    """Five updates of averages in different dtypes and shardings, by given weights; and a copy of each, by what it saves."""
    seen: dict[str, Any] = {}
    cases: list[tuple[Any, int | None]] = [("float32", shards) for shards in sharings(world)] + [("bfloat16", None)]
    for dtype, shards in cases:
        spec = MovingAverage(dtype=dtype, shards=shards, decay=0.9)
        model, copy = spec.build(actor(), world), spec.build(actor(), world)
        first = weights(model)
        for step in range(5):
            model.mix(iter(given(first, step).items()), 1 - spec.decay)
        saved = model.saved()
        copy.offload()  # what is installed goes to where the weights are
        copy.install(saved)
        copy.reload()
        whole = {name: tensor.full_tensor() for name, tensor in saved.items()}
        seen[f"{dtype} {shards}"] = {"first": first, "last": weights(model), "copy": weights(copy), "saved": whole}
    return seen


def turns(world: World) -> Any:
    """Two frozen models that take turns on the device, many times: what they take there, and what they give."""
    models = [Reference(model=str(MODELS / name), **EXACT).build(actor(), world) for name in ("actor", "other weights")]
    before, alone = [weights(model) for model in models], on_device(models[0])
    answers = [logprobs(model, SHARES[world.size][world.rank]) for model in models]
    for model in models:
        model.offload()
    nothing, taken, same = on_device(*models), [], []
    refused = [refusal(lambda: logprobs(models[0], ALL), RoleError), refusal(lambda: models[1].mix(iter(()), 0.5), RoleError)]
    for _ in range(4):
        for model, answer in zip(models, answers, strict=True):
            model.reload()
            same.append(torch.equal(logprobs(model, SHARES[world.size][world.rank]), answer))
            taken.append(on_device(*models))
            model.offload()
    after = [weights(model) for model in models]  # of models that are on the host
    return {
        "nothing": nothing, "taken": taken, "alone": alone, "bytes": models[0].bytes, "same": same, "before": before, "after": after,
        "refused": refused,
    }  # fmt: skip


def export(world: World) -> Any:
    """From the host."""
    model = MovingAverage().build(actor(), world)
    model.mix(iter(given(weights(model), 0).items()), 0.5)
    model.offload()
    model.export(RESULTS / "exported")
    return weights(model)


def refusals(world: World) -> Any:
    """What is no Reference of this Actor, and no reward model; and what is not there on one rank alone."""
    alone = "nowhere" if world.rank == 0 else "actor"
    references = {
        name: Reference(model=str(MODELS / name)) for name in ("llama", "larger vocabulary", "other tokenizer", "nowhere", "broken")
    }
    references |= {"nowhere on rank 0": Reference(model=str(MODELS / alone)), "three shards": Reference(shards=3)}
    named = ("actor", "two labels", "no head", "no tokenizer", "broken template", "nowhere")
    judges = {name: RewardModel(model=str(MODELS / name)) for name in named}
    found = {f"reference {name}": refusal(lambda spec=spec: spec.build(actor(), world), BadInput) for name, spec in references.items()}
    return found | {f"judge {name}": refusal(lambda spec=spec: spec.build(actor(), world), BadInput) for name, spec in judges.items()}


def judges(world: World) -> Any:
    """Scores by every kind of reward model: of this rank's rows, and where all ranks but one have none."""
    seen: dict[str, Any] = {}
    for name in ("classifier", "scalar head", "windowed", "other words", "other words in a template"):
        for shards in sharings(world) if name == "classifier" else [None]:
            model = RewardModel(model=str(MODELS / name), shards=shards, **EXACT).build(actor(), world)
            own, idle = SHARES[world.size][world.rank], IDLE[world.size][world.rank]
            seen[f"{name} {shards}"] = [model.scores(random_rollouts(*own)), model.scores(random_rollouts(*idle))]
            seen[f"{name} layout"] = model.held.root.layout
            model.offload()
            refused = refusal(lambda model=model: model.scores(random_rollouts(0)), RoleError)
            model.reload()
            seen[f"{name} again"] = [refused, model.scores(random_rollouts(*own))]
            model.close()
    rough = RewardModel(model=str(MODELS / "classifier")).build(actor(), world)
    head = {p.dtype for p in rough.held.root.model.score.parameters()}
    body = {p.dtype for p in rough.held.root.model.model.parameters()}
    return seen | {"bfloat16": rough.scores(random_rollouts(*SHARES[world.size][world.rank])), "dtypes": (head, body)}


def short_judge(world: World) -> Any:
    """A model that reads twelve tokens."""
    model = RewardModel(model=str(MODELS / "short"), **EXACT).build(actor(), world)
    return model.scores(random_rollouts(*SHARES[world.size][world.rank]))


def refusal(act: Callable[[], object], kind: type[RftError]) -> str:
    """What was raised, which must be of this kind."""
    try:
        _ = act()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


SCENES = (reference, beside_the_actor, average, turns, export, refusals, judges, short_judge)


def main() -> None:
    world = open_world(1, timeout_s=120)
    seen = {scene.__name__: scene(world) for scene in SCENES}
    torch.save(seen, RESULTS / f"{world.rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
