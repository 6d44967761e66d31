"""GRPO on figures that are drawn here, by the example, on two ranks of which some batches have no image."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

from rft.models import find_model
from rft.telemetry.records import read_lines
from tests.launching import ROOT, torchrun
from tests.models import tiny_vision_model

EXAMPLES, SCRIPT = ROOT / "examples", Path(__file__).with_name("geometry_ranks.py")
SMALL = ("--steps", 2, "--prompts", 2, "--samples", 3, "--max-new-tokens", 6, "--held-out", 3, "--dtype", "float32", "--lr", 1e-3)


def drawn(folder: Path) -> Path:
    """Seven questions: five about squares on a figure of their own, one about two figures, one about none."""
    (folder / "figures").mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for count in range(1, 6):
        image = Image.new("RGB", (50 + 10 * count, 64), "white")
        for number in range(count):
            ImageDraw.Draw(image).rectangle((4 + 18 * number, 20, 14 + 18 * number, 30), fill=(200, 30 * number, 0))
        image.save(folder / "figures" / f"{count}.png")
        rows.append({"images": [f"figures/{count}.png"], "problem": "<image>How many squares are there?", "answer": str(count)})
    rows.append({"images": ["figures/2.png", "figures/3.png"], "problem": "<image><image>How many in all?", "answer": "5"})
    rows.append({"images": [], "problem": "What is 2 + 3?", "answer": "5"})
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "questions.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run, and of what the ranks saw."""
    folder = tmp_path_factory.mktemp("geometry")
    data = drawn(folder / "data")
    path = {"PYTHONPATH": f"{EXAMPLES}:{ROOT}"}
    arguments = ("--model", model, "--train", data, "--test", data, "--max-prompt-tokens", 200, *SMALL)
    _ = torchrun(SCRIPT, folder, *arguments, timeout=300, env=path)
    return folder


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
    grids = []
    for rank in range(2):
        seen = torch.load(finished / f"{rank}.pt")
        assert seen["shared"]
        grids += seen["images"][::2]
        for name in ("engine", "reference"):
            torch.testing.assert_close(seen[name], seen["actor"], atol=1e-5, rtol=0)
        assert seen["gap"] < 1e-5
        assert seen["grad_norm"] > 0
    assert sorted(len(each or []) for each in grids) == [0, 1, 1, 1, 1, 1, 2]
