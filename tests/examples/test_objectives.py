"""The objectives of `examples/objectives.py`, each trained with for two steps on two ranks by the side-by-side run."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rft
from rft.testing.models import tiny_model
from tests.launching import ROOT, torchrun

EXAMPLES, SCRIPT = ROOT / "examples", Path(__file__).with_name("compare_ranks.py")
NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_plus_plus", "cispo", "ppo")
SMALL = ("--steps", 2, "--prompts", 2, "--samples", 4, "--max-new-tokens", 4, "--held-out", 3, "--dtype", "float32", "--lr", 1e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def compared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(output, folder) of all algorithms: two batches each, two updates on each."""
    folder = tmp_path_factory.mktemp("compare") / "run"
    path = {"PYTHONPATH": f"{EXAMPLES}:{ROOT}"}
    return torchrun(SCRIPT, "--model", model, "--folder", folder, *SMALL, timeout=400, env=path), folder


@pytest.fixture(scope="module")
def written(compared: tuple[str, Path]) -> dict[str, Any]:
    return json.loads((compared[1] / "compare.json").read_text())


def test_all_of_them_run_and_only_one_rank_tells(compared: tuple[str, Path], written: dict[str, Any]) -> None:
    assert tuple(written["curves"]) == NAMES
    assert written["job"]["updates"] == 2
    assert compared[0].count(": reward ") == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_trains_for_two_steps(name: str, written: dict[str, Any]) -> None:
    curve = written["curves"][name]
    assert len(curve["rewards"]) == 2
    assert all(0 < reward < 1 for reward in curve["rewards"])
    first, second, third, fourth = curve["metrics"]
    for metrics in curve["metrics"]:
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert metrics["entropy"] > 0
    for metrics in (first, third):
        assert metrics["grad_norm"] > 0
        assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5), "at the first step of a batch the ratio is 1"
        assert metrics["clip_fraction"] == 0
    for metrics in (second, fourth):
        assert abs(metrics["ratio_mean"] - 1) > 1e-5


def test_all_begin_with_the_same_weights_and_responses(written: dict[str, Any]) -> None:
    rewards = {name: curve["rewards"][0] for name, curve in written["curves"].items() if name != "dapo"}
    assert len(set(rewards.values())) == 1, "dynamic sampling alone may have asked for more"


def test_the_plot_has_a_line_for_each_and_fetches_nothing(compared: tuple[str, Path]) -> None:
    page = (compared[1] / "compare.html").read_text()
    assert all(f'"name":"{name}"' in page for name in NAMES)
    assert "<script src=" not in page


@pytest.mark.slow
def test_side_by_side_with_a_model_that_speaks(tmp_path: Path) -> None:
    """Three batches each of the real job, on two ranks: some minutes."""
    unpacked = subprocess.run(
        [sys.executable, EXAMPLES / "smollm2.py", ROOT / ".cache" / "SmolLM2-135M-Instruct"], capture_output=True, text=True, check=True
    )
    _ = torchrun(EXAMPLES / "compare.py", "--model", unpacked.stdout.strip(), "--folder", tmp_path / "run", "--steps", 3, timeout=1800)
    curves = json.loads((tmp_path / "run" / "compare.json").read_text())["curves"]
    assert tuple(curves) == NAMES
    for curve in curves.values():
        assert len(curve["rewards"]) == 3
        assert curve["metrics"]
        assert all(math.isfinite(value) for metrics in curve["metrics"] for value in metrics.values())
        assert min(metrics["ratio_mean"] for metrics in curve["metrics"]) > 0.5


def test_an_algorithm_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import compare

    with pytest.raises(rft.BadInput, match="there is no a2c; there are grpo, dr_grpo"):
        compare.algorithms(compare.Compare(model=str(model), only=("grpo", "a2c")))
