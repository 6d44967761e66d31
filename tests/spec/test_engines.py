"""What an engine's specification says of a model, before anything is started."""

from types import SimpleNamespace
from typing import Any

import pytest

from rft.errors import BadInput
from rft.spec import SGLangEngine, TransformersEngine, VLLMEngine


def config(heads: int = 8, shared: int = 4, **more: Any) -> SimpleNamespace:
    """Two layers with heads of 16."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16 * heads, "num_attention_heads": heads, "num_key_value_heads": shared}
    return SimpleNamespace(model_type="llama", **sizes, **more)


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 1024, "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


@pytest.mark.parametrize(("heads", "shared", "parallel"), [(8, 8, 3), (24, 8, 3), (12, 4, 6)])
def test_heads_that_tensor_parallelism_cannot_deal_out(heads: int, shared: int, parallel: int) -> None:
    for engine in (VLLMEngine(), SGLangEngine()):
        with pytest.raises(BadInput, match=f"tensor_parallel={parallel} "):
            engine.check(config(heads, shared), parallel)


@pytest.mark.parametrize(("heads", "shared", "parallel"), [(24, 8, 4), (24, 8, 24), (12, 2, 4), (8, 1, 8)])
def test_heads_that_are_shared_or_repeated(heads: int, shared: int, parallel: int) -> None:
    assert VLLMEngine().check(config(heads, shared), parallel) is None
    assert SGLangEngine().check(config(heads, shared), parallel) is None


@pytest.mark.parametrize("engine", [VLLMEngine, SGLangEngine, TransformersEngine])
@pytest.mark.parametrize(
    ("given", "longest"),
    [
        ({"max_position_embeddings": 1024}, 1024),
        (rope("default"), 1024),
        (rope("linear", factor=2.0), 2048),
        (rope("dynamic", factor=2.5), 2560),
        (rope("yarn", factor=4.0, original_max_position_embeddings=512), 2048),
        (rope("llama3", factor=8.0, original_max_position_embeddings=128), 1024),
        ({"max_position_embeddings": 1024, "rope_scaling": {"type": "linear", "factor": 2.0}}, 2048),
        ({"max_position_embeddings": 1024, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, 2048),
    ],
)
def test_rows_are_as_long_as_the_models_configuration_allows(engine: Any, given: dict[str, Any], longest: int) -> None:
    assert engine(max_model_len=longest).check(config(**given), 1) is None
    says = rf"max_model_len={longest + 1} is more than the {longest} tokens .*; set {engine.__name__}\(max_model_len={longest}\)"
    with pytest.raises(BadInput, match=says):
        engine(max_model_len=longest + 1).check(config(**given), 1)


@pytest.mark.parametrize(
    ("given", "parallel", "layers", "heads"),
    [
        ({}, 1, 2, 4),
        ({}, 2, 2, 2),
        ({}, 8, 2, 1),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 1, 1, 4),
    ],
)
def test_the_cache_holds_one_row_of_full_length(given: dict[str, Any], parallel: int, layers: int, heads: int) -> None:
    least = 112 * layers * heads * 16 * 2 * 2  # 100 tokens take seven blocks of 16; keys and values in bfloat16
    assert VLLMEngine(max_model_len=100, cache_bytes=least).check(config(**given), parallel) is None
    with pytest.raises(BadInput, match=f"too few blocks for one row of max_model_len=100, which takes {least}"):
        VLLMEngine(max_model_len=100, cache_bytes=least - 1).check(config(**given), parallel)


@pytest.mark.parametrize(("parallel", "heads"), [(1, 4), (2, 2), (8, 1)])
def test_sglangs_cache_has_a_page_of_its_own_too(parallel: int, heads: int) -> None:
    least = (100 + 8 + 64) * 2 * heads * 16 * 2 * 2  # tokens, with what SGLang keeps back; layers; keys and values in bfloat16
    assert SGLangEngine(max_model_len=100, cache_bytes=least).check(config(), parallel) is None
    with pytest.raises(BadInput, match=f"it needs {least}"):
        SGLangEngine(max_model_len=100, cache_bytes=least - 1).check(config(), parallel)
    with pytest.raises(BadInput, match="compresses its cache"):
        SGLangEngine().check(config(kv_lora_rank=8), 1)


@pytest.mark.parametrize("given", [{"sliding_window": 64}, {"kv_lora_rank": 8}, {"layer_types": ["linear_attention"] * 2}])
def test_of_other_caches_nothing_is_said(given: dict[str, Any]) -> None:
    assert VLLMEngine(cache_bytes=1).check(config(**given), 1) is None
