"""SGLang on this machine: the contract, and what is its own: processes, buckets, memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft.engines.protocol import Request
from rft.engines.sglang import SGLang, build
from rft.errors import BadInput, EngineFailed
from rft.experience import Sampling
from rft.models import find_model
from rft.parallel.world import World, open_world
from rft.spec import SGLangEngine
from tests.engines.contract import (
    GREEDY,
    MAX_MODEL_LEN,
    PROMPTS,
    EngineContract,
    folder,
    greedy,
    module,
    other,
    requests,
    wake_with,
    weights,
)

__all__ = ["folder", "module", "other"]
SPEC = SGLangEngine(dtype="float32", max_model_len=MAX_MODEL_LEN, max_rows=64, cache_bytes=1 << 26)


@pytest.fixture(scope="module")
def world() -> World:
    return open_world(1, timeout_s=60)


@pytest.fixture(scope="module")
def engine(folder: Path, world: World) -> Iterator[SGLang]:
    engine = build(SPEC, find_model(str(folder)), world)
    assert engine.sync_path == "plan"
    started = psutil.Process(engine._group.pid).children(recursive=True)
    assert len(started) >= 2
    yield engine
    engine.close()
    engine.close()
    assert not any(process.is_running() for process in started)


class TestContract(EngineContract):
    """All of it."""
