"""GRPO on figures that are drawn here, by the example, on two ranks of which some batches have no image."""

import math
from pathlib import Path

import pytest
import torch

from rft.models import find_model
from rft.telemetry.records import read_lines
from rft.testing.models import tiny_vision_model
from tests.examples.figures import see_the_same, trained


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("geometry"), model)


def test_two_steps_are_taken(finished: Path) -> None:
    lines = read_lines(finished / "run" / "metrics.jsonl")
    steps = [line for line in lines if "seconds" in line]
    assert [step["step"] for step in steps] == [0, 1]
    for step in steps:
        assert all(math.isfinite(value) for value in step.values())
        assert step["grad_norm"] > 0
    assert [line["step"] for line in lines if "accuracy" in line] == [0, 2]


def test_the_trained_model_takes_images(finished: Path, model: Path) -> None:
    from safetensors.torch import load_file

    assert find_model(str(finished / "run" / "model")).images is not None
    before, after = (load_file(folder / "model.safetensors") for folder in (model, finished / "run" / "model"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if name.startswith("visual.")} <= moved


def test_engine_actor_and_reference_see_the_same(finished: Path) -> None:
    see_the_same(finished)
