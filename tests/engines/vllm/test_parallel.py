"""vLLM on two ranks: one engine over both (TP 2), and one on each (DP 2)."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.engines.contract import PROMPTS, greedy
from tests.launching import torchrun
from tests.models import tiny_model

SCRIPT = Path(__file__).with_name("parallel.py")
CASES = {"tied, TP 2": ("tied", 2), "untied, TP 2": ("untied", 2), "tied, DP 2": ("tied", 1)}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_greedy_tokens_of_one(case: str, tmp_path: Path) -> None:
    """A vocabulary of 330 is padded on two ranks: constants are part of the plan."""
    which, tensor_parallel = CASES[case]
    folder = tiny_model(tmp_path / "model", "qwen2" if which == "tied" else "llama", tied=which == "tied", vocab=330)
    module = AutoModelForCausalLM.from_pretrained(folder)
    _ = torchrun(SCRIPT, folder, tensor_parallel, tmp_path, ranks=2, timeout=180)
    ranks: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for found in ranks:
        assert [tuple(tokens) for tokens in found["greedy"]] == [greedy(module, prompt, 10) for prompt in PROMPTS]
        assert found["path"] == "plan"
        assert found["differ"] == ["model.norm.weight"]
        assert found["weights"] < 1.2 / tensor_parallel * sum(p.nbytes for p in module.parameters())
    assert ranks[0]["sampled"] == ranks[1]["sampled"]
