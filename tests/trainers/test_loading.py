"""What only rank 0 holds while a model is loaded."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rft.testing.models import tiny_config, tiny_model, tiny_tokenizer
from tests.launching import torchrun


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for the most memory that was resident")
def test_only_rank_0_holds_a_whole_model_while_it_is_loaded(tmp_path: Path) -> None:
    big, small, results = tmp_path / "big", tmp_path / "small", tmp_path / "results"
    size = large_model(big)
    tiny_model(small)
    results.mkdir()
    torchrun(Path(__file__).with_name("memory_ranks.py"), big, results, small, ranks=2, timeout=240)
    first, second = (torch.load(results / f"{rank}.pt") for rank in range(2))
    assert first["grown"] - first["held"] > 0.75 * size  # the measure sees a whole model where there is one
    # Beside what it keeps, a rank needs the tensor that is on its way to it and what a collective takes for it.
    assert second["grown"] - second["held"] < 0.35 * size


def large_model(folder: Path) -> int:
    """Random weights, untied, in fp32; returns their bytes."""
    from transformers import AutoModelForCausalLM

    config = tiny_config("llama", tied=False, heads=16, layers=16)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters())
