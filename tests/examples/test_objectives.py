"""The objectives of `examples/objectives.py`, each trained with for two steps, and the side-by-side run on two ranks."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import ROOT, torchrun
from tests.models import tiny_model

COMPARE = ROOT / "examples" / "compare.py"
NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_plus_plus", "cispo", "ppo")
SMALL = ("--steps", 2, "--prompts", 2, "--samples", 4, "--max-new-tokens", 4, "--held-out", 3, "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def compared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(output, folder) of all algorithms, two steps each, on two ranks."""
    folder = tmp_path_factory.mktemp("compare") / "run"
    return torchrun(COMPARE, "--model", model, "--folder", folder, *SMALL, timeout=400), folder


def test_every_algorithm_trains_for_two_steps_on_two_ranks(compared: tuple[str, Path]) -> None:
    output, folder = compared
    written = json.loads((folder / "compare.json").read_text())
    assert tuple(written["rewards"]) == NAMES
    assert all(len(curve) == 2 and all(0 <= reward <= 1 for reward in curve) for curve in written["rewards"].values())
    assert written["job"]["updates"] == 2
    assert [line.count(": reward ") for line in output.splitlines()].count(1) == len(NAMES), "only rank 0 tells"


def test_the_plot_has_a_curve_for_each_and_fetches_nothing(compared: tuple[str, Path]) -> None:
    page = (compared[1] / "compare.html").read_text()
    assert all(f'"name":"{name}"' in page for name in NAMES)
    assert "<script src=" not in page


@pytest.fixture(scope="module")
def examples() -> Iterator[Any]:
    """The module `compare` of the examples, whose folder is on the path as it is for a script."""
    sys.path.insert(0, str(COMPARE.parent))
    import compare

    yield compare
    sys.path.remove(str(COMPARE.parent))


@pytest.fixture(scope="module")
def trained(examples: Any, model: Path) -> dict[str, list[dict[str, float]]]:
    """The metrics of two batches, two updates each, by algorithm; rewards that differ, so that all of them have something to learn."""
    import rft
    from rft.data.prompts import Share, tokenise
    from rft.models import find_model

    job = examples.Compare(model=str(model), steps=2, prompts=2, samples=4, max_new_tokens=4, dtype="float32", held_out=3, lr=1e-3)
    data = tokenise(examples.task(job).training, find_model(job.model).tokenizer, max_tokens=job.max_prompt_tokens)
    seen: dict[str, list[dict[str, float]]] = {}
    with rft.launch(job.launch_spec()) as state:
        for name, algorithm in examples.algorithms(job).items():
            seen[name] = []
            prompts = examples.batches(data, Share(), job.longer(8))
            for _ in range(job.steps):
                state = rft.refresh(state)
                batch = algorithm.collect(state, prompts, job.sampling(), by_bytes)
                state = rft.sleep(state)
                experience = rft.experience(batch.rollouts, batch.rewards.values, algorithm.advantages(state, batch))
                state = rft.compute_old_logprobs(state, batch.rollouts)
                state, history = rft.update(state, experience, algorithm.objective, rft.Cut(epochs=2))
                seen[name] += history
        torch.distributed.barrier()
    return seen


def by_bytes(sample: Any) -> float:
    return sum(sample.response.encode()) % 7 / 7


@pytest.mark.parametrize("name", NAMES)
def test_what_is_reported_is_what_training_should_see(name: str, trained: dict[str, list[dict[str, float]]]) -> None:
    first, second, third, fourth = trained[name]
    for metrics in trained[name]:
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert metrics["entropy"] > 0
    for metrics in (first, third):
        assert metrics["grad_norm"] > 0
        assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5), "at the first step of a batch the ratio is 1"
        assert metrics["clip_fraction"] == 0
    for metrics in (second, fourth):
        assert abs(metrics["ratio_mean"] - 1) > 1e-5


def test_an_algorithm_that_is_not_there_is_refused(examples: Any, model: Path) -> None:
    import rft

    with pytest.raises(rft.BadInput, match=r"there is no a2c; there are grpo, dr_grpo"):
        examples.algorithms(examples.Compare(model=str(model), only=("grpo", "a2c")))
