"""vLLM on this machine: the contract, with the recorded plan."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.engines.protocol import Request
from rft.engines.vllm import VLLM, build
from rft.engines.vllm_memory import HostMemory
from rft.errors import BadInput, EngineFailed
from rft.models import find_model
from rft.parallel.world import World, open_world
from rft.sampling import Sampling
from rft.spec import VLLMEngine
from rft.testing.engines import (
    GREEDY,
    MAX_MODEL_LEN,
    PROMPTS,
    EngineContract,
    folder,
    greedy,
    module,
    other,
    requests,
    tokenizer,
    wake_with,
    weights,
)

__all__ = ["folder", "module", "other", "tokenizer"]


@pytest.fixture(scope="module")
def world() -> World:
    return open_world(1, timeout_s=60)


@pytest.fixture(scope="module")
def engine(folder: Path, world: World) -> Iterator[VLLM]:
    spec = VLLMEngine(dtype="float32", max_model_len=MAX_MODEL_LEN, max_rows=64, cache_bytes=1 << 26)
    engine = build(spec, find_model(str(folder)), world)
    assert engine.sync_path == "plan"
    yield engine
    engine.close()
    engine.close()


class TestContract(EngineContract):
    """All of it."""


def test_prefixes_are_really_cached(engine: VLLM, module: Any, other: Any) -> None:
    """Without `flush`, an answer would be one of the old weights' prefix: the contract's test of it is no vacuous one."""
    wake_with(engine, module)
    prompt = tuple(range(200))
    _ = engine.generate(requests(prompt), GREEDY)
    _ = engine.load(iter(weights(other).items()))
    assert engine.generate(requests(prompt), GREEDY)[0].tokens != greedy(other, prompt, 10)
    engine.flush()
    assert engine.generate(requests(prompt), GREEDY)[0].tokens == greedy(other, prompt, 10)


def test_buffers_outlive_a_release(engine: VLLM, module: Any) -> None:
    """The rotary cache is in no checkpoint: if its pages were given back too, it would be zeros from then on."""
    wake_with(engine, module)
    memory = engine._memory
    assert isinstance(memory, HostMemory)
    buffers = dict(engine._llm.collective_rpc(lambda worker: worker)[0].get_model().named_buffers())
    rotary = next(tensor for name, tensor in buffers.items() if name.endswith("cos_sin_cache"))
    kept, saved = list(memory._weights), rotary.clone()
    try:
        memory._weights.append(rotary)
        wake_with(engine, module)
        assert engine.generate(requests(*PROMPTS), GREEDY)[3].tokens != greedy(module, PROMPTS[3], 10)
    finally:
        memory._weights[:] = kept
        _ = rotary.copy_(saved)
    wake_with(engine, module)
    assert engine.generate(requests(*PROMPTS), GREEDY)[3].tokens == greedy(module, PROMPTS[3], 10)


def test_a_release_gives_pages_back(engine: VLLM, module: Any) -> None:
    wake_with(engine, module)
    held = engine._memory._weights[0]
    assert held.count_nonzero() > 0
    engine.sleep("release")
    assert held.count_nonzero() * held.element_size() < 2 * mmap.PAGESIZE, "all but the pages that it shares with others"


def test_what_a_failed_call_leaves_is_aborted(engine: VLLM, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wake_with(engine, module)
    steps, step = list[int](), engine._llm.llm_engine.step

    def failing() -> Any:
        steps.append(1)
        if len(steps) == 3:
            raise RuntimeError("in the middle")
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(engine._llm.llm_engine, "step", failing)
        with pytest.raises(RuntimeError, match="in the middle"):
            _ = engine.generate(requests(*PROMPTS), GREEDY)
    wake_with(engine, module)
    assert [c.tokens for c in engine.generate(requests(*PROMPTS), GREEDY)] == [greedy(module, p, 10) for p in PROMPTS]


def test_flushing_in_the_middle_is_refused(engine: VLLM, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wake_with(engine, module)
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(EngineFailed, match="prefix cache"):
        engine.flush()


def test_many_more_requests_than_rows(engine: VLLM, module: Any) -> None:
    wake_with(engine, module)
    asked = [Request(tokens=PROMPTS[seed % 4], seed=seed) for seed in range(150)]
    completions = engine.generate(asked, Sampling(max_new_tokens=5))
    alone = engine.generate(asked[100:101], Sampling(max_new_tokens=5))
    assert alone[0].tokens == completions[100].tokens


def test_more_tokens_of_prompts_than_go_through_in_one_step(engine: VLLM, module: Any) -> None:
    """A prompt that would be cut in two waits for the next step."""
    wake_with(engine, module)
    requests = [Request(tokens=tuple((row + place) % 250 for place in range(150)), seed=row) for row in range(30)]
    assert sum(len(request.tokens) for request in requests) > 4096
    sampled, again = (engine.generate(requests, Sampling(max_new_tokens=2)) for _ in range(2))
    assert [each.tokens for each in sampled] == [each.tokens for each in again]


def test_heads_that_tensor_parallelism_does_not_divide(folder: Path, world: World) -> None:
    import dataclasses

    with pytest.raises(BadInput, match="4 attention heads"):
        build(VLLMEngine(), find_model(str(folder)), dataclasses.replace(world, tp_size=3))
