"""The same with vLLM."""

from pathlib import Path

import pytest

from tests.examples.figures import see_the_same, trained
from tests.models import tiny_vision_model


@pytest.mark.slow
def test_vllm_actor_and_reference_see_the_same(tmp_path: Path) -> None:
    see_the_same(trained(tmp_path, tiny_vision_model(tmp_path / "model"), "--engine", "vllm"))
