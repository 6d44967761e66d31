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


def test_the_bucket_is_the_largest_tensor_of_the_stream(begun: State) -> None:
    assert budget.sync_bucket(runtime_of(begun)) == 8
    runtime_of(begun).trainer.manifest = lambda: ()
    assert budget.sync_bucket(runtime_of(begun)) == 0


def test_without_a_limit_a_cpu_asks_the_system_and_shares_it_among_its_ranks(begun: State, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_of(begun)
    runtime.spec = dc.replace(runtime.spec, device_bytes=None)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 144})())
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
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 19)
    with pytest.raises(DoesNotFit):
        _ = rft.broadcast(begun)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 18)
    _ = rft.broadcast(begun)
