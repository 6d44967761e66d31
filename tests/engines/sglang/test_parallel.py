"""SGLang on two ranks with FSDP2: an engine on each of them, and one over both."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.launching import torchrun
from tests.models import tiny_model

SCRIPT = Path(__file__).with_name("parallel.py")
CASES = ("1", "2")
Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of 330 is padded on two ranks: constants are part of the plan."""
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True, vocab=330)


@pytest.fixture(scope="module")
def ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    """What each rank found, by the size of its TP group."""
    out = tmp_path_factory.mktemp("ranks")
    _ = torchrun(SCRIPT, out, folder, *CASES, ranks=2, timeout=600)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_engine_and_actor_agree(case: str, ranks: list[dict[str, Found]]) -> None:
    for rank in ranks:
        assert rank[case]["gap"] < 1e-5
        assert rank[case]["probe"] < 1e-5
        assert rank[case]["path"] == "plan"


def test_the_ranks_sample_the_same_however_they_are_grouped(ranks: list[dict[str, Found]]) -> None:
    for rank in ranks:
        assert rank["1"]["tokens"] == rank["2"]["tokens"]
        assert rank["1"]["second"] == rank["2"]["second"] != rank["1"]["tokens"]
        assert len(rank["1"]["tokens"]) == 4
    assert not ranks[0]["1"]["tokens"].keys() & ranks[1]["1"]["tokens"].keys()


def test_a_tp_rank_holds_its_part_alone(folder: Path, ranks: list[dict[str, Found]]) -> None:
    whole = sum(parameter.nbytes for parameter in AutoModelForCausalLM.from_pretrained(folder).parameters())
    for rank in ranks:
        assert rank["1"]["weights"] >= whole
        assert rank["2"]["weights"] < 0.6 * whole


def test_the_death_of_a_tp_rank_is_told_on_all_ranks_and_is_no_end(ranks: list[dict[str, Found]]) -> None:
    for rank in ranks:
        assert rank["2"]["told"].startswith(("EngineFailed: SGLang's process is dead", "PeerFailed"))
        assert rank["2"]["after"] == rank["2"]["second"]
        assert rank["1"]["all_gone"]
        assert rank["2"]["all_gone"]
