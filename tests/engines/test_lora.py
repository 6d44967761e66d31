"""The embedded engine with an adapter of its own: the contract."""

import dataclasses as dc
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft.engines.protocol import AdapterEngine, Engine
from rft.errors import BadInput
from rft.models import ModelFolder, find_model
from rft.parallel.world import World, open_world
from rft.spec import FSDP2Trainer, LaunchSpec, TransformersEngine, VLLMEngine
from rft.testing.engines import MAX_MODEL_LEN, folder, module, other
from tests.engines.lora_contract import *  # noqa: F403
from tests.engines.lora_contract import LORA, same_job
from tests.engines.lora_cycle import cycle

__all__ = ["folder", "module", "other"]

_ = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def adapted(folder: Path) -> Iterator[AdapterEngine]:
    spec = TransformersEngine(dtype="float32", max_model_len=MAX_MODEL_LEN)
    engine = spec.build_adapted(find_model(str(folder)), open_world(1, timeout_s=60), LORA)
    yield engine
    engine.close()
    engine.close()


def test_a_job_that_sends_the_adapter_alone(folder: Path) -> None:
    spec = TransformersEngine(dtype="float32", max_model_len=MAX_MODEL_LEN)
    same_job(cycle(folder, spec, LORA), cycle(folder, spec, dc.replace(LORA, sync="merged")))


class NoPlace:
    """An engine of somebody's that has no place for an adapter."""

    def build(self, model: ModelFolder, world: World) -> Engine:
        raise AssertionError(f"{model} on {world} is refused before")


def test_what_an_engine_cannot_do_is_refused_before_it_is_built() -> None:
    with pytest.raises(BadInput, match="NoPlace cannot load an adapter alone"):
        _ = LaunchSpec(model="any", engine=NoPlace(), trainer=FSDP2Trainer(lora=LORA))
    with pytest.raises(BadInput, match="needs tensor_parallel=1, got 2"):
        _ = LaunchSpec(model="any", engine=VLLMEngine(), trainer=FSDP2Trainer(lora=LORA), tensor_parallel=2)
    merged = FSDP2Trainer(lora=dc.replace(LORA, sync="merged"))
    assert LaunchSpec(model="any", engine=NoPlace(), trainer=merged, tensor_parallel=2).adapter_alone is None
