"""The embedded engine with images."""

from pathlib import Path

import pytest

from rft.engines.protocol import SeeingEngine
from rft.engines.transformers import Transformers, build
from rft.errors import BadInput
from rft.models import find_model
from rft.parallel.world import World, open_world
from rft.spec import TransformersEngine
from rft.testing.engines.seeing import GREEDY, SeeingContract, folder, module, other, requests
from rft.testing.models import tiny_model

__all__ = ["folder", "module", "other"]


@pytest.fixture(scope="module")
def world() -> World:
    return open_world(1, timeout_s=60)


@pytest.fixture(scope="module")
def engine(folder: Path, world: World) -> Transformers:
    return build(TransformersEngine(dtype="float32", max_model_len=256, max_rows=4), find_model(str(folder)), world)


class TestSeeing(SeeingContract):
    """All of it."""


def test_a_model_of_text_refuses_images(tmp_path: Path, world: World) -> None:
    engine = build(TransformersEngine(dtype="float32", max_model_len=256), find_model(str(tiny_model(tmp_path))), world)
    assert isinstance(engine, SeeingEngine)
    assert not engine.takes_images
    with pytest.raises(BadInput, match="request 0 has images, and this engine's model takes none"):
        _ = engine.generate(requests(), GREEDY)
