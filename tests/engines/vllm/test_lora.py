"""vLLM with a place for an adapter: the contract; and that what vLLM keeps of older adapters is really dropped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.engines.protocol import AdapterEngine
from rft.engines.vllm_lora import AdaptedVLLM, build
from rft.errors import BadInput
from rft.models import find_model
from rft.parallel.world import World, open_world
from rft.spec import LoRA, VLLMEngine
from rft.testing.engines import GREEDY, MAX_MODEL_LEN, folder, greedy, module, other, requests
from tests.engines.lora_contract import *  # noqa: F403
from tests.engines.lora_contract import LONG, LORA, merged, parts, wake

__all__ = ["folder", "module", "other"]

_ = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def world() -> World:
    return open_world(1, timeout_s=60)


@pytest.fixture(scope="module")
def adapted(folder: Path, world: World) -> Iterator[AdapterEngine]:
    spec = VLLMEngine(dtype="float32", max_model_len=MAX_MODEL_LEN, max_rows=64, cache_bytes=1 << 26)
    engine = build(spec, find_model(str(folder)), world, LORA)
    assert engine.sync_path == "plan"
    yield engine
    engine.close()
    engine.close()


def test_each_adapter_has_an_id_and_a_name_of_its_own(adapted: AdaptedVLLM, module: Any) -> None:
    wake(adapted, module, parts(module, 0))
    before = adapted._slot.request
    _ = adapted.load_adapter(iter(parts(module, 1).items()))
    after = adapted._slot.request
    assert before.lora_int_id < after.lora_int_id
    assert before.lora_name != after.lora_name
    assert adapted._slot._manager.list_adapters().keys() == {after.lora_int_id}


def test_prefixes_of_an_older_adapter_would_be_served_under_its_name(adapted: AdaptedVLLM, module: Any) -> None:
    """Without a new name, and without `flush`: so the contract's test of a new adapter is no vacuous one. The name alone helps already."""
    wake(adapted, module, parts(module, 0))
    expected = greedy(merged(module, parts(module, 1)), LONG, 10)
    _ = adapted.generate(requests(LONG), GREEDY)
    adapted._slot._count -= 1
    _ = adapted.load_adapter(iter(parts(module, 1).items()))
    assert adapted.generate(requests(LONG), GREEDY)[0].tokens != expected
    _ = adapted.load_adapter(iter(parts(module, 1).items()))
    assert adapted.generate(requests(LONG), GREEDY)[0].tokens == expected


def test_what_has_no_place_is_refused(folder: Path, world: World) -> None:
    with pytest.raises(BadInput, match="up to rank 512"):
        _ = build(VLLMEngine(), find_model(str(folder)), world, LoRA(rank=600, alpha=8, sync="adapter"))
    with pytest.raises(BadInput, match="'nothing' matches no module"):
        _ = build(VLLMEngine(), find_model(str(folder)), world, LoRA(targets=("nothing",), sync="adapter"))
