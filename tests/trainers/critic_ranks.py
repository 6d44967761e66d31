"""What the ranks do for `critic_contract.py`, which compares what they saved here with a plain single-process loop.

    torchrun critic_ranks.py MODELS RESULTS BACKEND...

A backend is one of `backends`, for a critic on a model of its own, or "shared, " and one: a head on the Actor's hidden states. Every
scene returns what it saw on this rank; the results of rank r with a backend are in RESULTS/BACKEND/r.pt.
"""

import dataclasses as dc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rft
from rft.effects.runtime import runtime_of
from rft.errors import BadInput, NonFiniteGradient, RftError
from rft.experience import Experience, Minibatch, Prompts, take
from rft.models import find_model
from rft.objectives import LossTerms, MicroBatch, Totals, ValueObjective, critic_loss
from rft.parallel.world import World, open_world
from rft.spec import SharedCritic
from rft.steps import restore, save
from tests.trainers import backends
from tests.trainers.batches import rows_of
from tests.trainers.valued import CLIP, valued_experience

MODELS, RESULTS, BACKENDS = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
backend = BACKENDS[0]
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "max_grad_norm": float("inf")}
FIVE_STEPS: dict[str, Any] = {
    **OPTIMIZER, "eps": 1e-7, "max_grad_norm": 0.5, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 1, "total_steps": 9
}  # fmt: skip
SOURCE = valued_experience()
ALL = (0, 1, 2, 3, 4, 5, 6, 7)
SHARES = {1: [ALL], 2: [(0, 1, 2, 3, 4), (5, 6, 7)]}
IDLE = {1: [ALL], 2: [ALL, ()]}


def shared() -> bool:
    return backend.startswith("shared")


def actor(world: World, model: str = "causal", **options: Any) -> Any:
    kind = backend.removeprefix("shared, ")
    return backends.specification(kind, {"dtype": "float32", **options}).build(find_model(str(MODELS / model)), world)


def build(world: World, model: str = "valued", optimizer: dict[str, Any] = OPTIMIZER, on: Any = None, **options: Any) -> Any:
    """A critic; a shared one reads the Actor of the causal model, or `on`."""
    if shared():
        return SharedCritic(**optimizer).build(on or actor(world, **options), world)
    specification = backends.specification(backend, {"dtype": "float32", **optimizer, **options})
    return rft.Critic(model=str(MODELS / model), trainer=specification).build(find_model(str(MODELS / "causal")), world)


def share(world: World, shares: Any = SHARES, source: Experience = SOURCE) -> Minibatch:
    return rows_of(source, *shares[world.size][world.rank])


def state_of(critic: Any) -> dict[str, Tensor]:
    """Everything that is saved, in full. Collective."""
    saved: dict[str, Any] = critic.saved()
    return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in saved.items()}


def gradient(world: World, model: str = "valued", shares: Any = SHARES, objective: ValueObjective | None = None, **options: Any) -> Any:
    """One step's metrics and its gradient: AdamW's first moment is (1 − β₁) times it."""
    critic = build(world, model, **options)
    metrics = critic.step(share(world, shares), objective or critic_loss())
    moments = {name.removeprefix("optimizer.exp_avg."): tensor / 0.1 for name, tensor in state_of(critic).items() if ".exp_avg." in name}
    critic.close()
    return {"gradient": moments, "metrics": metrics}


def gradients(world: World) -> Any:
    seen = {
        "whole": gradient(world),
        "row by row": gradient(world, micro_batch_tokens=1),
        "a few rows": gradient(world, micro_batch_tokens=30),
        "an idle rank": gradient(world, shares=IDLE, micro_batch_tokens=30),
        "clipped": gradient(world, objective=critic_loss(clip=CLIP), micro_batch_tokens=30),
    }
    if shared():
        return seen
    return seen | {
        "checkpointed": gradient(world, micro_batch_tokens=30, gradient_checkpointing=True),
        "uneven": gradient(world, model="uneven", micro_batch_tokens=30),
        "padded": gradient(world, model="windowed", micro_batch_tokens=40),
        "causal": gradient(world, model="causal", micro_batch_tokens=30),
        "bfloat16": gradient(world, dtype="bfloat16", micro_batch_tokens=30),
    }


def five_steps(world: World) -> Any:
    """Values before each step, its metrics, and what is saved at the end."""
    critic, seen = build(world, optimizer=FIVE_STEPS, micro_batch_tokens=40), []
    batch = share(world)
    for _ in range(5):
        values = critic.values(batch.tokens, batch.mask, batch.sampled)
        seen.append({"values": values, **critic.step(batch, critic_loss(clip=CLIP))})
    return {"steps": seen, "state": state_of(critic)}


def values(world: World) -> Any:
    """On ranks with different rows, then with none on one rank, then on none at all; by a head that is not 0."""
    critic = build(world, optimizer={"lr": 1e-2}, micro_batch_tokens=30)
    if shared():
        _ = critic.step(share(world), critic_loss())
    some, idle = share(world), share(world, IDLE)
    return {
        "head": state_of(critic)["model.score.weight"],
        "some": critic.values(some.tokens, some.mask, some.sampled),
        "idle": critic.values(idle.tokens, idle.mask, idle.sampled),
        "none": critic.values(some.tokens[:0], some.mask[:0], some.sampled[:0]),
    }


def placement(world: World) -> Any:
    """A critic that goes to the host and back between steps, beside one that never does."""
    moved, still, batch, saved = build(world), build(world), share(world), []
    sizes = [moved.bytes("model"), moved.bytes("optimizer")]
    for _ in range(2):
        moved.offload("optimizer")
        refused = refusal(lambda: moved.step(batch, critic_loss()))
        moved.offload("model")
        refused += refusal(lambda: moved.values(batch.tokens, batch.mask, batch.sampled))
        held = [tensor.untyped_storage().nbytes() for shelf in moved._held.shelves.values() for tensor in shelf._tensors]
        saved.append((state_of(moved), state_of(still)))
        moved.reload("model")
        moved.reload("optimizer")
        metrics = [critic.step(batch, critic_loss()) for critic in (moved, still)]
    saved.append((state_of(moved), state_of(still)))
    after = [moved.bytes("model"), moved.bytes("optimizer")]
    return {"refused": refused, "held": held, "sizes": sizes, "after": after, "metrics": metrics, "saved": saved}


def round_trip(world: World) -> Any:
    """What one critic saves, another goes on from; installed on the host, too."""
    one, batch = build(world, optimizer=FIVE_STEPS), share(world)
    _ = [one.step(batch, critic_loss()) for _ in range(2)]
    saved, others = one.saved(), [build(world, optimizer=FIVE_STEPS) for _ in range(2)]
    others[0].install(saved)
    others[1].offload("model")
    others[1].offload("optimizer")
    others[1].install(saved)
    others[1].reload("model")
    others[1].reload("optimizer")
    metrics = [critic.step(batch, critic_loss()) for critic in (one, *others)]
    return {"metrics": metrics, "states": [state_of(critic) for critic in (one, *others)]}


def refused(world: World) -> Any:
    """Each is wrong on the last rank alone, and refused on all; then a good step, beside a critic that never saw any of it."""
    hurt, well, batch, last = build(world), build(world), share(world), world.rank == world.size - 1

    def broken(new: Tensor, micro: MicroBatch, totals: Totals) -> LossTerms:
        terms = critic_loss()(new, micro, totals)
        return dc.replace(terms, loss=terms.loss * float("nan")) if last else terms

    stranger = dc.replace(batch, sampled=batch.sampled | (torch.arange(batch.tokens.shape[1]) == 0)) if last else batch
    seen = [
        refusal(lambda: hurt.step(batch, broken), NonFiniteGradient),
        refusal(lambda: hurt.step(stranger, critic_loss()), BadInput),
        refusal(lambda: hurt.step(dc.replace(batch, returns=None) if last else batch, critic_loss()), BadInput),
        refusal(lambda: hurt.step(dc.replace(batch, demonstrated=~batch.demonstrated), critic_loss()), BadInput),
    ]
    metrics = [critic.step(batch, critic_loss()) for critic in (hurt, well)]
    return {"refused": seen, "metrics": metrics, "states": (state_of(hurt), state_of(well))}


def the_actor_is_not_moved(world: World) -> Any:
    """Values and steps of a shared critic, between a step of the Actor that both Actors take."""
    if not shared():
        return None
    read, alone, batch = actor(world, lr=1e-3, micro_batch_tokens=30), actor(world, lr=1e-3, micro_batch_tokens=30), share(world)
    critic = build(world, on=read)
    for _ in range(2):
        _ = critic.values(batch.tokens, batch.mask, batch.sampled)
        _ = critic.step(batch, critic_loss())
        metrics = [each.step(batch, None, rft.grpo()) for each in (read, alone)]
    return {"metrics": metrics, "states": [state_of(each) for each in (read, alone)]}


# ---- as steps ----


def steps(world: World) -> Any:
    """Warm-up of a critic in a runtime: what it changes, and what is refused; one thing after the other."""
    kind = backends.specification(backend.removeprefix("shared, "), {"dtype": "float32", "lr": 1e-2})
    critic: Any = SharedCritic(lr=1e-2) if shared() else rft.Critic(trainer=dc.replace(kind, lr=1e-3))
    spec = rft.LaunchSpec(
        model=str(MODELS / "causal"), engine=rft.TransformersEngine(dtype="float32", max_model_len=64), trainer=kind, critic=critic
    )
    last = world.rank == world.size - 1
    seen: dict[str, Any] = {}
    with rft.launch(spec) as begun:
        state = rft.refresh(begun)
        rollouts = rft.generate(state, some_prompts(world), rft.Sampling(samples=2, max_new_tokens=5))
        if not shared():
            seen["values away"] = refusal(lambda: rft.values(state, rollouts))
            state = rft.reload(rft.reload(state, rft.CRITIC), rft.CRITIC_OPTIMIZER)
        values, generation, version = rft.values(state, rollouts), state.generation, state.version
        experience = rft.experience(rollouts, torch.zeros(len(rollouts)), torch.zeros(values.shape), values=values)
        minibatch = take(experience, torch.arange(len(rollouts)))
        nan = torch.full(values.shape, float("nan"))
        seen["no returns"] = refusal(lambda: rft.train_critic(state, minibatch, critic_loss()))
        broken = dc.replace(minibatch, returns=nan if last else values)
        seen["NaN returns"] = refusal(lambda: rft.train_critic(state, broken, critic_loss()))
        seen["no objective"] = refusal(lambda: rft.train_critic(state, minibatch, None))
        state = rft.offload(state, rft.CRITIC_OPTIMIZER)
        good = dc.replace(minibatch, returns=torch.where(rollouts.sampled, 1.0, 0.0))
        seen["optimizer away"] = refusal(lambda: rft.train_critic(state, good, critic_loss()))
        state = rft.reload(state, rft.CRITIC_OPTIMIZER)
        seen["weights"] = [dict(runtime_of(state).trainer.stream_weights())]
        seen["weights"][0] = {name: tensor.clone() for name, tensor in seen["weights"][0].items()}
        losses = []
        for _ in range(3):
            state, metrics = rft.train_critic(state, good, critic_loss())
            losses.append(metrics["value_loss"])
        # The engine is Fresh still: it generates without a broadcast, and the same tokens.
        again = rft.generate(state, some_prompts(world), rft.Sampling(samples=2, max_new_tokens=5))
        seen["same tokens"] = torch.equal(again.tokens, rollouts.tokens)
        seen["weights"].append({name: tensor.clone() for name, tensor in runtime_of(state).trainer.stream_weights()})
        seen |= {"losses": losses, "version": (version, state.version), "took": state.generation - generation, "values": values}
        # What is saved with the run is what it goes on from.
        _ = save(state, RESULTS / backend / "checkpoint", {})
        state, first = rft.train_critic(state, good, critic_loss())
        state, _ = restore(state, RESULTS / backend / "checkpoint", {})
        state, second = rft.train_critic(state, good, critic_loss())
        seen["restored"] = (first, second)
        if shared():
            away = rft.offload_actor(state)
            seen["the Actor away"] = refusal(lambda: rft.values(away, rollouts)) + refusal(
                lambda: rft.train_critic(away, good, critic_loss())
            )
    with rft.launch(dc.replace(spec, critic=None, engine=None)) as state:
        seen["none"] = refusal(lambda: rft.values(state, rollouts)) + refusal(lambda: rft.train_critic(state, good, critic_loss()))
    return seen


def some_prompts(world: World) -> Prompts:
    tokens = torch.tensor([[65, 66, 67], [68, 69, 70]])[: 1 + world.rank]
    ids = torch.arange(len(tokens)) + 10 * world.rank
    texts = tuple("ab"[: len(tokens)])
    return Prompts(tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool), ids=ids, epoch=0, texts=texts, answers=texts)


def bad_models(world: World) -> Any:
    """What is no start of a critic, by name."""
    if shared():
        return {}
    names = ("two labels", "token classifier", "other tokenizer", "no head")
    return {name: refusal(lambda name=name: build(world, model=name), BadInput) for name in names}


def refusal(call: Callable[[], Any], kind: type[RftError] = RftError) -> list[str]:
    try:
        call()
    except kind as error:
        return [f"{type(error).__name__}: {error}"]
    return ["nothing was raised"]


SCENES = (gradients, five_steps, values, placement, round_trip, refused, the_actor_is_not_moved, steps, bad_models)


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
