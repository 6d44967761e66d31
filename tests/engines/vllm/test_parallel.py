"""vLLM on two ranks: one engine over both (TP 2), and one on each (DP 2)."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rft.testing.engines import PROMPTS, greedy
from rft.testing.models import tiny_model
from tests.launching import torchrun

SCRIPT = Path(__file__).with_name("parallel.py")
CASES = {"tied, TP 2": ("tied", 2), "untied, TP 2": ("untied", 2), "tied, DP 2": ("tied", 1)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A vocabulary of 330 is padded on two ranks: constants are part of the plan."""
    path = tmp_path_factory.mktemp("models")
    return {
        "tied": tiny_model(path / "tied", "qwen2", tied=True, vocab=330),
        "untied": tiny_model(path / "untied", "llama", tied=False, vocab=330),
    }


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What each rank found, by case."""
    out = tmp_path_factory.mktemp("ranks")
    _ = torchrun(SCRIPT, out, *(f"{folders[which]}:{size}" for which, size in CASES.values()), ranks=2, timeout=240)
    return [dict(zip(CASES, json.loads((out / f"{rank}.json").read_text()), strict=True)) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_one_rank(case: str, folders: dict[str, Path], ranks: list[dict[str, dict[str, Any]]]) -> None:
    which, tensor_parallel = CASES[case]
    module = AutoModelForCausalLM.from_pretrained(folders[which])
    for rank in ranks:
        found = rank[case]
        assert [tuple(tokens) for tokens in found["greedy"]] == [greedy(module, prompt, 10) for prompt in PROMPTS]
        assert found["path"] == "plan"
        assert found["differ"] == ["model.norm.weight"]
        assert found["comes"] == 1 if tensor_parallel == 1 else found["comes"] < 0.52  # of all numbers; halves, and norms
        assert found["weights"] < 1.2 / tensor_parallel * sum(p.nbytes for p in module.parameters())


@pytest.mark.parametrize("case", CASES)
def test_the_ranks_sample_the_same(case: str, ranks: list[dict[str, dict[str, Any]]]) -> None:
    assert ranks[0][case]["sampled"] == ranks[1][case]["sampled"]


def test_prompts_are_answered_the_same_however_the_ranks_are_grouped(ranks: list[dict[str, dict[str, Any]]]) -> None:
    """And every rank held to the contract on ranks, by `check_ranks`."""
    together, apart = ([rank[case]["told"] for rank in ranks] for case in ("tied, TP 2", "tied, DP 2"))
    assert together == apart
    assert [len(told) for told in together] == [6, 6]
