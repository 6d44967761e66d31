"""A broadcast is a transaction: what is streamed is held against the manifest, and what lies there against what was received."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

import rft
from rft.errors import SyncFailed
from rft.narrow import Narrows
from rft.testing import scripted_devices, scripted_launch
from tests.refusals import State, sampled


@pytest.fixture
def begun() -> Iterator[State]:
    with scripted_launch() as state:
        yield state


def test_a_broadcast_installs_the_actors_weights_and_leaves_the_cache_unmapped(begun: State) -> None:
    state = rft.broadcast(begun)
    devices = scripted_devices(state)
    assert devices.engine is not None
    assert devices.engine.weights is not None
    assert not devices.engine.awake
    for name, tensor in devices.trainer.weights.items():
        assert torch.equal(devices.engine.weights[name], tensor)
        assert devices.engine.weights[name] is not tensor


def test_an_engine_that_says_nothing_of_what_it_holds_was_not_verified(begun: State) -> None:
    engine: Any = scripted_devices(begun).engine
    load = engine.load
    engine.load, engine.checksums = lambda tensors: load(tensors) and {}, dict
    with pytest.raises(SyncFailed, match="gave no checksums"):
        _ = rft.broadcast(begun)
    assert rft.legal(begun) == ("recover", "restore")


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_the_stream_is_asked_for_in_what_the_engine_casts_to(begun: State, dtype: torch.dtype | None) -> None:
    devices, asked = scripted_devices(begun), list[torch.dtype | None]()
    assert devices.engine is not None
    trainer, devices.engine.casts_to = devices.trainer, dtype
    manifest, stream = trainer.manifest, trainer.stream_weights
    trainer.manifest = lambda dtype=None: (asked.append(dtype), manifest(dtype))[1]
    trainer.stream_weights = lambda dtype=None, narrows=(): (asked.append(dtype), stream(dtype, narrows))[1]
    assert type(rft.broadcast(begun).weights) is rft.Fresh
    assert set(asked) == {dtype}


def test_an_offloaded_actor_streams_from_the_host(begun: State) -> None:
    state = rft.wake(rft.broadcast(rft.offload_actor(begun)))
    assert len(sampled(state)) == 4


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        ({"body": torch.zeros(2)}, "the stream ended before"),
        ({"body": torch.zeros(2), "head": torch.zeros(1), "tail": torch.zeros(1)}, "where the manifest has None"),
        ({"head": torch.zeros(1), "body": torch.zeros(2)}, "head (1,) torch.float32 was streamed where the manifest has"),
        ({"body": torch.zeros(3), "head": torch.zeros(1)}, "body (3,)"),
        ({"body": torch.zeros(2), "head": torch.zeros(1, dtype=torch.bfloat16)}, "head (1,) torch.bfloat16"),
    ],
)
def test_a_stream_that_is_not_the_manifests_fails_is_exhausted_and_poisons(
    begun: State, stream: dict[str, torch.Tensor], says: str
) -> None:
    taken = list[str]()

    def stream_weights(dtype: torch.dtype | None = None, narrows: Sequence[Narrows] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        assert dtype is None
        assert not any(narrows)
        for name, tensor in stream.items():
            taken.append(name)
            yield name, tensor

    scripted_devices(begun).trainer.stream_weights = stream_weights
    with pytest.raises(SyncFailed) as caught:
        _ = rft.broadcast(begun)
    assert says in str(caught.value)
    assert taken == list(stream)
    assert rft.legal(begun) == ("recover", "restore")


@pytest.mark.parametrize("held", [{"body": 1, "head": 2}, {"body": 1}, {}])
def test_checksums_that_differ_fail_and_are_named(begun: State, held: Mapping[str, int]) -> None:
    engine = scripted_devices(begun).engine
    assert engine is not None
    engine.checksums = lambda: held
    with pytest.raises(SyncFailed, match="does not hold what it was sent: checksums differ for 2 of 2 tensors, body, head"):
        _ = rft.broadcast(begun)
    assert rft.legal(begun) == ("recover", "restore")
    del engine.checksums
    assert len(sampled(rft.refresh(rft.recover(begun)))) == 4
