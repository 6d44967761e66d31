"""What the parts of the contract share: an engine that is awake with the model's weights, and the sizes of the model."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from rft.engines.protocol import Engine
from rft.models import find_model
from rft.testing.engines.oracle import END, LONG, PROMPTS, greedy, wake_with
from rft.testing.models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen2 with random weights and tied heads, which the engine is to be built from."""
    return tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def module(folder: Path) -> Any:
    """The same model by transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    """The model's."""
    return find_model(str(folder)).tokenizer


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model with other weights."""
    path = tiny_model(tmp_path_factory.mktemp("other"), tied=True, seed=1)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


class Contract:
    """Every test finds the engine awake, with the weights of `module`. A subclass may say that its model is another one."""

    prompts: ClassVar[tuple[tuple[int, ...], ...]] = PROMPTS
    long: ClassVar[tuple[int, ...]] = LONG
    end: ClassVar[int] = END

    @pytest.fixture(autouse=True)
    def _awake(self, engine: Engine, module: Any) -> None:
        wake_with(engine, module)

    def greedy(self, module: Any, prompt: tuple[int, ...], count: int = 10) -> tuple[int, ...]:
        """What the model itself says."""
        return greedy(module, prompt, count, self.end)

    def all_greedy(self, module: Any) -> list[tuple[int, ...]]:
        """The same for all prompts."""
        return [self.greedy(module, prompt) for prompt in self.prompts]
