"""SGLang on two ranks with FSDP2: an engine on each of them, and one over both."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rft.testing.models import tiny_model
from tests.launching import torchrun

SCRIPT = Path(__file__).with_name("parallel.py")
Found = dict[str, Any]


def found(folder: Path, out: Path, *cases: str) -> list[dict[str, Found]]:
    """What each rank found, by case."""
    _ = torchrun(SCRIPT, out, folder, *cases, ranks=2, timeout=600)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of 330 is padded on two ranks: constants are part of the plan."""
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True, vocab=330)


def check(folder: Path, rank: Found, tensor_parallel: int) -> None:
    """Engine and Actor agree, by a plan, and the engine holds its part of the weights alone."""
    assert rank["gap"] < 1e-5
    assert rank["probe"] < 1e-5
    assert rank["path"] == "plan"
    cut = [name for name in rank["cut"] if name.endswith(("_proj.weight", "_proj.bias", "embed_tokens.weight"))]
    assert (len(cut) > 10) is (tensor_parallel > 1)  # a TP rank is sent its slices
    whole = sum(parameter.nbytes for parameter in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert whole / tensor_parallel <= rank["weights"] < 1.2 * whole / tensor_parallel
    assert rank["second"] != rank["tokens"]
    assert rank["all_gone"]
    assert rank["left"] == []


def test_one_engine_over_two_ranks(folder: Path, tmp_path: Path) -> None:
    """And both ranks held to the contract on ranks, by `check_ranks`."""
    for rank in found(folder, tmp_path, "2", "2, contract"):
        check(folder, rank["2"], 2)
        assert len(rank["2, contract"]["told"]) == 6


@pytest.mark.slow
def test_ranks_sample_the_same_however_they_are_grouped_and_go_on_when_a_tp_rank_dies(folder: Path, tmp_path: Path) -> None:
    ranks = found(folder, tmp_path, "1", "2, killed")
    for rank in ranks:
        check(folder, rank["1"], 1)
        check(folder, rank["2, killed"], 2)
        for turn in ("tokens", "second"):
            assert rank["1"][turn] == rank["2, killed"][turn]
        assert len(rank["1"]["tokens"]) == 4
        assert rank["2, killed"]["ended"]
        assert "SGLang's process is dead" in rank["2, killed"]["told"]
        assert rank["2, killed"]["after"] == rank["2, killed"]["second"]
    assert not ranks[0]["1"]["tokens"].keys() & ranks[1]["1"]["tokens"].keys()
