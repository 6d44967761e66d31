import dataclasses as dc
from collections.abc import Iterator

import psutil
import pytest
import torch

import rft
from rft.effects import budget
from rft.effects.runtime import runtime_of
from rft.errors import DoesNotFit
from rft.testing import scripted_launch
from rft.testing.models import tiny_config
from tests.refusals import State

# The scripted device, in bytes: Actor 128, its optimizer 256, engine weights 64, cache 32, largest tensor of the stream 8.


@pytest.fixture
def begun() -> Iterator[State]:
    with scripted_launch() as state:
        yield state


def test_what_lies_on_the_device_is_told_by_what_it_is_for(begun: State) -> None:
    there = {"actor": 128, "actor_optimizer": 256}
    assert budget.on_device(begun) == there
    state = rft.broadcast(begun)
    assert budget.on_device(state) == there | {"engine weights": 64}
    state = rft.wake(state)
    assert budget.on_device(state) == there | {"engine weights": 64, "engine cache": 32}
    state = rft.offload(rft.offload_actor(state), rft.ACTOR_OPTIMIZER)
    assert budget.on_device(state) == {"engine weights": 64, "engine cache": 32}
    state = rft.sleep(state)
    assert budget.on_device(state) == {}
    assert rft.health(state).bytes == {}


@pytest.mark.parametrize(("keeps", "left"), [("device", {"engine weights": 64}), ("host", {})])
def test_weights_that_are_kept_lie_where_the_engine_keeps_them(keeps: str, left: dict[str, int]) -> None:
    with scripted_launch(keeps=keeps) as begun:
        state = rft.sleep_keeping(rft.wake(rft.broadcast(rft.offload(begun, rft.ACTOR_OPTIMIZER))))
        assert budget.on_device(state) == {"actor": 128} | left
        assert budget.on_device(rft.wake(state)) == {"actor": 128, "engine weights": 64, "engine cache": 32}


def test_weights_that_come_back_from_the_host_need_room_too() -> None:
    with scripted_launch(keeps="host", device_bytes=480) as begun:
        state = rft.sleep_keeping(rft.wake(rft.broadcast(begun)))
        runtime_of(state).spec = dc.replace(runtime_of(state).spec, device_bytes=479)
        with pytest.raises(DoesNotFit, match=r"for engine cache, engine weights"):
            _ = rft.wake(state)


def test_the_bucket_is_what_of_the_stream_waits_for_the_engine(begun: State) -> None:
    assert budget.sync_bucket(runtime_of(begun)) == 12
    runtime_of(begun).trainer.manifest = lambda *_: ()
    assert budget.sync_bucket(runtime_of(begun)) == 0


def test_without_a_limit_a_cpu_asks_the_system_and_shares_it_among_its_ranks(begun: State, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_of(begun)
    runtime.spec = dc.replace(runtime.spec, device_bytes=None)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 152})())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    _ = rft.broadcast(begun)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    state = rft.recover(runtime.ledger.living() or begun)
    with pytest.raises(DoesNotFit):
        _ = rft.broadcast(state)


def test_without_a_limit_a_gpu_asks_the_driver_and_counts_what_torch_holds_unused(begun: State, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_of(begun)
    runtime.spec = dc.replace(runtime.spec, device_bytes=None)
    runtime.world = dc.replace(runtime.world, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 15)
    with pytest.raises(DoesNotFit):
        _ = rft.broadcast(begun)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 14)
    _ = rft.broadcast(begun)


# ---- what computing takes, by the plan's functions ----


@pytest.fixture
def modelled(begun: State) -> State:
    """The scripted runtime with the configuration of a tiny model, a limit that it does not reach, and roles to ask."""
    runtime = runtime_of(begun)
    runtime.model = dc.replace(runtime.model, config=tiny_config("qwen2", tied=True))
    trainer = rft.FSDP2Trainer(micro_batch_tokens=64)
    runtime.spec = dc.replace(runtime.spec, device_bytes=1 << 30, trainer=trainer, reference=rft.Reference(), critic=rft.Critic())
    return begun


def rows(count: int, tokens: int) -> torch.Tensor:
    return torch.ones(count, tokens, dtype=torch.bool)


def test_a_step_of_several_micro_batches_needs_its_gradient_and_a_pass(modelled: State) -> None:
    needed = budget.needed_to_train(modelled, rows(4, 64))
    assert set(needed) == {"gathered weights", "gradients", "activations", "experience"}
    assert needed["gathered weights"] == 2 * 337_024
    assert needed["gradients"] == 4 * 337_024 + 2 * 4 * 147_968
    assert budget.needed_to_train(modelled, rows(1, 64))["gradients"] == 2 * 4 * 147_968
    assert budget.needed_to_train(modelled, rows(1, 256))["activations"] > 3 * needed["activations"]  # a row is never cut


def test_scoring_needs_a_pass_by_whoever_scores(modelled: State) -> None:
    own = budget.needed_to_score(modelled, rows(1, 16), rows(2, 32))
    assert own == budget.needed_to_score(modelled, rows(2, 32))
    reference = budget.needed_to_score(modelled, rows(2, 32), role=rft.REFERENCE)
    assert reference["gathered weights"] == 2 * (147_968 + 41_088)
    values = budget.needed_to_score(modelled, rows(2, 32), role=rft.CRITIC)
    assert values["gathered weights"] == 2 * (337_024 + 128)
    assert budget.needed_to_train(modelled, rows(2, 32), role=rft.CRITIC)["gradients"] > 0
    assert budget.needed_to_probe(modelled) == budget.needed_to_score(modelled, rows(1, 32))
    assert budget.needed_to_probe(rft.offload_actor(modelled)) == {}


def test_what_does_not_fit_is_refused_with_the_rows(modelled: State) -> None:
    needed = budget.needed_to_train(modelled, rows(4, 64))
    runtime = runtime_of(modelled)
    there = sum(budget.on_device(modelled).values())
    runtime.spec = dc.replace(runtime.spec, device_bytes=there + sum(needed.values()))
    budget.require_room("train_step", modelled, needed)
    runtime.spec = dc.replace(runtime.spec, device_bytes=there + sum(needed.values()) - 1)
    with pytest.raises(DoesNotFit, match=r"(?s)train_step: not enough device memory for gathered weights, .*activations \(to come\)"):
        budget.require_room("train_step", modelled, needed)


def test_nothing_is_said_of_what_is_not_known_and_on_a_cpu_without_a_limit(modelled: State) -> None:
    runtime = runtime_of(modelled)
    known = runtime.spec
    runtime.spec = dc.replace(known, device_bytes=None)
    assert budget.needed_to_train(modelled, rows(1, 8)) == {}
    runtime.spec = dc.replace(known, trainer=Own())
    assert budget.needed_to_train(modelled, rows(1, 8)) == budget.needed_to_score(modelled, rows(1, 8)) == {}
    runtime.model = dc.replace(runtime.model, config=None)
    runtime.spec = known
    assert budget.needed_to_train(modelled, rows(1, 8)) == {}
    budget.require_room("train_step", modelled, {})


class Own:
    """A trainer of somebody's own."""

    def build(self, *_: object) -> object: ...


def test_where_the_driver_runs_short_the_allocator_gives_back(begun: State, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, given = runtime_of(begun), list[str]()
    runtime.spec = dc.replace(runtime.spec, device_bytes=None)
    runtime.world = dc.replace(runtime.world, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append("back"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10, 1 << 30))
    budget.require_room("wake", begun, {"engine cache": 10})
    assert given == []
    budget.require_room("wake", begun, {"engine cache": 11})
    assert given == ["back"]
