"""The scripted engine is an engine like others: the contract, however it keeps its weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft.engines.faults import Faults
from rft.engines.scripted import END, SHAPES, VOCABULARY, ScriptedEngine, scripted_logits
from rft.testing.engines import LONG, PROMPTS, EngineContract
from rft.testing.scripted import Numbers


class Scripted(torch.nn.Module):
    """Its model, in the manner of transformers."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterDict({name: torch.full(shape, value) for (name,), shape in SHAPES.items()})

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self.weights.items())

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Any:
        total = sum(float(tensor.sum()) for tensor in self.weights.values())
        rows = [[scripted_logits(total, row[: end + 1]) for end in range(len(row))] for row in tokens.tolist()]
        return SimpleNamespace(logits=torch.tensor(rows))


@pytest.fixture(scope="module")
def module() -> Any:
    return Scripted(0.0)


@pytest.fixture(scope="module")
def other() -> Any:
    return Scripted(500.0)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return Numbers()


@pytest.fixture(scope="module", params=["device", "host", None])
def engine(request: pytest.FixtureRequest) -> ScriptedEngine:
    return ScriptedEngine(Faults(), keeps=request.param)


class TestContract(EngineContract):
    """All of it; the engine has no tokenizer, and knows no texts."""

    prompts = tuple(tuple(token % VOCABULARY for token in prompt) for prompt in PROMPTS)
    long = tuple(token % VOCABULARY for token in LONG)
    end = END
    stops_at_texts = False
