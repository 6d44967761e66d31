"""What the ranks do for `test_lockstep.py`: scenes on scripted devices with a real world. `torchrun meeting.py RESULTS`.

Every scene returns what this rank saw; the results of rank r are in RESULTS/r.json.
"""

import contextlib
import dataclasses as dc
import json
import pickle
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rft
from rft.effects.runtime import runtime_of
from rft.parallel.messages import HEAD, gathered
from rft.parallel.world import World, open_world
from rft.testing import SAMPLING, scripted_devices, scripted_launch, scripted_minibatch, scripted_prompts, scripted_snapshot

Seen = dict[str, Any]


@contextlib.contextmanager
def seen_by(seen: Seen) -> Generator[None]:
    """Notes the error that is raised inside, its cause, and its message."""
    try:
        yield
    except rft.RftError as error:
        seen |= {"error": type(error).__name__, "cause": type(error.__cause__).__name__, "message": str(error)}


@contextlib.contextmanager
def untouched(state: rft.RuntimeState[Any, Any, Any, Any], seen: Seen) -> Generator[None]:
    """Notes like `seen_by`, and whether the devices are as they were and what is legal then."""
    before = scripted_snapshot(state)
    with seen_by(seen):
        yield
    seen |= {"untouched": scripted_snapshot(state) == before, "legal": list(rft.legal(state))}


def own_prompts(world: World, count: int = 2) -> rft.Prompts:
    """Prompts that no other rank has."""
    prompts = scripted_prompts(count, epoch=2)
    return dc.replace(prompts, ids=prompts.ids + 10 * world.rank)


def at_different_steps(world: World) -> Seen:
    seen: Seen = {}
    with scripted_launch(world=world) as begun:
        with untouched(begun, seen):
            _ = rft.broadcast(begun) if world.rank else rft.offload_actor(begun)
        return seen | {"generation after": rft.broadcast(begun).generation}


def with_different_roles(world: World) -> Seen:
    seen: Seen = {}
    with scripted_launch(world=world, beside="own") as begun:
        with untouched(begun, seen):
            _ = rft.reload(begun, rft.reward_model("kind") if world.rank else rft.REFERENCE)
        return seen | {"generation after": rft.reload(begun, rft.REFERENCE).generation}


def at_different_generations(world: World) -> Seen:
    seen: Seen = {}
    with scripted_launch(world=world) as begun:
        state = begun
        if world.rank:  # a step that no other rank takes, and that this one does not compare
            runtime = runtime_of(begun)
            meet, runtime.lockstep.meet = runtime.lockstep.meet, lambda *_: None
            state = rft.offload_actor(begun)
            runtime.lockstep.meet = meet
        with untouched(state, seen):
            _ = rft.broadcast(state)
    return seen


def late(world: World, *, who: int) -> Seen:
    seen: Seen = {}
    torch.distributed.barrier()
    with scripted_launch(world=world, deadline_s=2.0) as begun:
        state = rft.broadcast(begun)
        if world.rank == who:
            time.sleep(4.0)
        with untouched(state, seen):
            _ = rft.wake(state)
    return seen


def an_engine_that_fails(world: World) -> Seen:
    seen: Seen = {}
    with scripted_launch(world=world) as begun:
        scripted_devices(begun).faults.arm("load" if world.rank else None)
        with seen_by(seen):
            _ = rft.broadcast(begun)
        seen["legal"] = list(rft.legal(begun))
        scripted_devices(begun).faults.arm(None)
        state = rft.refresh(rft.recover(begun))
        return seen | {"rows after": len(rft.generate(state, own_prompts(world), SAMPLING))}


def a_verb_that_fails_before_what_is_collective(world: World) -> Seen:
    """The Actor's log-probs and its stream have collectives, as those of a real one; verbs of the engine fail on rank 1."""
    seen: Seen = {}
    with scripted_launch(world=world) as begun:
        devices = scripted_devices(begun)
        engine: Any = devices.engine
        scores, streams, loads = devices.trainer.logprobs, devices.trainer.stream_weights, engine.load

        def stream(*asked: Any) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in streams(*asked):
                dist.barrier(world.host)
                yield name, tensor

        def at_once(tensors: Any) -> Any:
            return loads(tensors) if world.rank == 0 else {}["a verb that reads nothing"]

        devices.trainer.logprobs = lambda *asked: (dist.barrier(world.host), scores(*asked))[1]
        devices.trainer.stream_weights = stream
        state: Any = rft.refresh(begun)
        failing = ("wake_weights", "wake_cache", "score", "flush", "load")
        for verb, step in [*((verb, rft.wake) for verb in failing[:3]), *((verb, rft.broadcast) for verb in failing[2:])]:
            state = rft.broadcast(rft.sleep(state)) if step is rft.wake else state
            devices.faults.arm(verb if world.rank and verb != "load" else None)
            engine.load = at_once if verb == "load" else loads
            with seen_by(seen):
                _ = step(state)
            seen[f"{verb}, {step.__name__}"] = [seen.pop("error"), seen.pop("cause"), seen.pop("message")]
            devices.faults.arm(None)
            engine.load = loads
            state = rft.refresh(rft.recover(state))
        return seen | {"rows after": len(rft.generate(state, own_prompts(world), SAMPLING))}


def manifests_that_differ(world: World) -> Seen:
    seen: Seen = {}
    with scripted_launch(world=world) as begun:
        if world.rank:
            scripted_devices(begun).trainer.weights["head"] = torch.zeros(2)
        with untouched(begun, seen):
            _ = rft.broadcast(begun)
    return seen


def memory_on_one_rank(world: World) -> Seen:
    seen: Seen = {}
    with scripted_launch(world=world, device_bytes=450 if world.rank else 1 << 20) as begun, untouched(begun, seen):
        _ = rft.broadcast(begun)
    return seen


def another_batch_on_one_rank(world: World) -> Seen:
    seen: Seen = {}
    with scripted_launch(world=world) as begun:
        ready = rft.refresh(begun)
        other = rft.generate(ready, own_prompts(world), SAMPLING)
        rollouts = rft.generate(ready, own_prompts(world), SAMPLING)
        state = rft.compute_old_logprobs(ready, rollouts)
        with untouched(state, seen):
            _ = rft.train_step(state, scripted_minibatch(other if world.rank else rollouts), rft.grpo())
        trained, _ = rft.train_step(state, scripted_minibatch(rollouts), rft.grpo())
        return seen | {"version after": trained.version}


def a_long_prompt_on_one_rank(world: World) -> Seen:
    seen: Seen = {}
    with scripted_launch(world=world) as begun:
        ready = rft.refresh(begun)
        with untouched(ready, seen):
            _ = rft.generate(ready, own_prompts(world, 300 if world.rank else 2), SAMPLING)
    return seen


def sampling_of_a_wrong_type_on_one_rank(world: World) -> Seen:
    seen: Seen = {}
    wrong: Any = {"samples": 2}
    with scripted_launch(world=world) as begun:
        ready = rft.refresh(begun)
        with untouched(ready, seen):
            _ = rft.generate(ready, own_prompts(world), wrong if world.rank else SAMPLING)
    return seen


def other_columns_on_one_rank(world: World) -> Seen:
    seen: Seen = {}
    with scripted_launch(world=world) as begun, untouched(begun, seen):
        _ = rft.average(begun, {"reward": [1.0], **({"length": [2]} if world.rank else {})})
    return seen


def a_column_of_words_on_one_rank(world: World) -> Seen:
    seen: Seen = {}
    words: Any = ["much"]
    with scripted_launch(world=world) as begun:
        ready = rft.refresh(begun)
        with untouched(ready, seen):
            _ = rft.average(ready, {"reward": words if world.rank else [1.0]})
    return seen


def old_rollouts_on_one_rank(world: World) -> Seen:
    seen: Seen = {}
    with scripted_launch(world=world) as begun:
        ready = rft.refresh(begun)
        old = rft.generate(ready, own_prompts(world), SAMPLING)
        taught, _ = rft.supervised_step(ready, scripted_minibatch(old))
        ready = rft.broadcast(taught)
        new = rft.generate(ready, own_prompts(world), SAMPLING)
        with untouched(ready, seen):
            _ = rft.compute_old_logprobs(ready, old if world.rank else new)
    return seen


def the_same_prompt_on_two_ranks(world: World) -> Seen:
    seen: Seen = {}
    with scripted_launch(world=world) as begun:
        ready = rft.refresh(begun)
        with untouched(ready, seen):
            _ = rft.generate(ready, scripted_prompts(1 + world.rank), SAMPLING)
        both = rft.generate(ready, scripted_prompts(), SAMPLING, draw=world.rank)
        return seen | {"rows after": len(both)}


def ranks_that_sample_in_two_ways(world: World) -> Seen:
    seen: Seen = {}
    with scripted_launch(world=world) as begun:
        ready = rft.refresh(begun)
        with untouched(ready, seen):
            _ = rft.generate(ready, own_prompts(world), dc.replace(SAMPLING, temperature=1.0 - 0.5 * world.rank))
        fewer = rft.generate(ready, own_prompts(world), dc.replace(SAMPLING, samples=1 + world.rank))
        return seen | {"rows after": len(fewer)}


def own_share(world: World) -> Seen:
    """A TP group generates together: what a rank gets, and what it would get alone."""
    count = 3 - 2 * world.rank
    prompts = own_prompts(world, count)
    with scripted_launch(world=world, seed=5) as begun:
        together = rft.generate(rft.refresh(begun), prompts, SAMPLING, draw=1)
    with scripted_launch(seed=5) as begun:
        alone = rft.generate(rft.refresh(begun), prompts, SAMPLING, draw=1)
    return {
        "rows": len(together),
        "groups": together.groups.tolist(),
        "same": all(
            torch.equal(getattr(together, name), getattr(alone, name))
            for name in ("tokens", "mask", "sampled", "logprobs", "versions", "groups", "samples")
        )
        and together.finish == alone.finish,
        "tokens": together.tokens.tolist(),
    }


def averages(world: World) -> Seen:
    with scripted_launch(world=world) as state:
        return dict(rft.average(state, {"x": [1.0, 2.0, 3.0] if world.rank else [6.0], "none": []}))


def values_of_any_length(world: World) -> Seen:
    """As long as travels in one collective, one more, and so long on one rank alone."""
    longest = HEAD - len(pickle.dumps(""))
    words = ("", "x" * longest, "x" * (longest + 1), "x" * 5000 * world.rank)
    return {"values": [gathered(f"{word}{world.rank}"[-max(len(word), 1) :], world.host, world.size) for word in words]}


def place(world: World) -> Seen:
    return {name: getattr(world, name) for name in ("rank", "size", "tp_rank", "tp_size", "dp_rank", "dp_size")}


def main() -> None:
    alone, together = open_world(1, timeout_s=60), open_world(2, timeout_s=60)
    scenes: dict[str, Callable[[], Seen]] = {
        "place without TP": lambda: place(alone),
        "place with TP": lambda: place(together),
        "own share": lambda: own_share(together),
        "own share without TP": lambda: own_share(alone),
        "late rank 1": lambda: late(alone, who=1),
        "late rank 0": lambda: late(alone, who=0),
    }
    for scene in (
        at_different_steps,
        with_different_roles,
        at_different_generations,
        an_engine_that_fails,
        a_verb_that_fails_before_what_is_collective,
        manifests_that_differ,
        memory_on_one_rank,
        another_batch_on_one_rank,
        a_long_prompt_on_one_rank,
        sampling_of_a_wrong_type_on_one_rank,
        the_same_prompt_on_two_ranks,
        ranks_that_sample_in_two_ways,
        other_columns_on_one_rank,
        a_column_of_words_on_one_rank,
        old_rollouts_on_one_rank,
        averages,
        values_of_any_length,
    ):
        scenes[scene.__name__.replace("_", " ")] = lambda scene=scene: scene(alone)
    results = {name: scene() for name, scene in scenes.items()}
    (Path(sys.argv[1]) / f"{alone.rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
