"""The embedded engine with an adapter of its own: the contract."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rft.engines.protocol import AdapterEngine
from rft.models import find_model
from rft.parallel.world import open_world
from rft.spec import TransformersEngine
from tests.engines.contract import MAX_MODEL_LEN, folder, module, other
from tests.engines.lora_contract import *  # noqa: F403
from tests.engines.lora_contract import LORA

__all__ = ["folder", "module", "other"]

_ = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def adapted(folder: Path) -> Iterator[AdapterEngine]:
    spec = TransformersEngine(dtype="float32", max_model_len=MAX_MODEL_LEN)
    engine = spec.build_adapted(find_model(str(folder)), open_world(1, timeout_s=60), LORA)
    yield engine
    engine.close()
    engine.close()
