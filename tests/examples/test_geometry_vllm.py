"""The same with vLLM."""

from pathlib import Path

import pytest

from rft.testing.models import tiny_vision_model
from tests.examples.figures import see_the_same, trained


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_vllm_actor_and_reference_see_the_same(tensor_parallel: int, tmp_path: Path) -> None:
    model = tiny_vision_model(tmp_path / "model")
    see_the_same(trained(tmp_path, model, "--engine", "vllm", "--tensor-parallel", tensor_parallel))
