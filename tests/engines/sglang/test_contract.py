"""SGLang on this machine: the contract, and what is its own: processes, buckets, memory."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.engines import sglang_options
from rft.engines.protocol import Request
from rft.engines.sglang import SGLang, build
from rft.errors import BadInput, EngineFailed, MissingEngine
from rft.models import find_model
from rft.parallel.world import World, open_world
from rft.sampling import Sampling
from rft.spec import SGLangEngine
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
from rft.testing.models import tiny_vision_model
from tests.engines.sglang.processes import all_gone, family, shared_files

__all__ = ["folder", "module", "other", "tokenizer"]
SPEC = SGLangEngine(dtype="float32", max_model_len=MAX_MODEL_LEN, max_rows=64, cache_bytes=1 << 26, bucket_bytes=1 << 14)


@pytest.fixture(scope="module")
def world() -> World:
    return open_world(1, timeout_s=60)


@pytest.fixture(scope="module")
def engine(folder: Path, world: World) -> Iterator[SGLang]:
    engine = build(SPEC, find_model(str(folder)), world)
    assert engine.sync_path == "plan"
    started = family(engine._group.pid)
    assert len(started) >= 2
    shared = shared_files(started)
    assert shared, "there is something that could be left behind"
    assert not any(path.exists() for path in shared), "however it ends"
    yield engine
    engine.close()
    engine.close()
    assert all_gone(started)


class TestContract(EngineContract):
    """All of it; the engine has no tokenizer, and knows no texts."""

    stops_at_texts = False


def test_prefixes_are_really_cached(engine: SGLang, module: Any, other: Any) -> None:
    """Without `flush`, an answer would be one of the old weights' prefix: the contract's test of it is no vacuous one."""
    wake_with(engine, module)
    prompt = tuple(range(200))
    _ = engine.generate(requests(prompt), GREEDY)
    _ = engine.load(iter(weights(other).items()))
    assert engine.generate(requests(prompt), GREEDY)[0].tokens != greedy(other, prompt, 10)
    engine.flush()
    assert engine.generate(requests(prompt), GREEDY)[0].tokens == greedy(other, prompt, 10)


def test_the_weights_go_through_a_small_bucket_many_times_over(engine: SGLang, module: Any) -> None:
    assert engine.memory().bucket * 4 < engine.memory().weights
    assert engine.memory().bucket >= max(parameter.nbytes for parameter in module.parameters())


def test_a_release_gives_pages_back(engine: SGLang, module: Any) -> None:
    """Nothing that is larger than a few pages is there any more, as long as it has not come again."""
    wake_with(engine, module)
    held = engine.checksums()
    engine.sleep("release")
    engine.wake_weights()
    found = engine.checksums()
    large = [name for name, parameter in module.named_parameters() if parameter.nbytes > 1 << 16]
    assert large
    assert all(found[name] != held[name] for name in large)


def test_a_call_that_was_left_is_aborted(engine: SGLang, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wake_with(engine, module)
    process, pid = engine._group._process, engine._group.pid

    def interrupted() -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(process, "answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ = engine.generate(requests(*PROMPTS), Sampling(max_new_tokens=200))
    wake_with(engine, module)
    assert [c.tokens for c in engine.generate(requests(*PROMPTS), GREEDY)] == [greedy(module, p, 10) for p in PROMPTS]
    assert engine._group.pid == pid, "it went on, and was not started anew"


def test_a_load_that_is_interrupted_leaves_a_way_on(engine: SGLang, module: Any) -> None:
    def stream() -> Iterator[tuple[str, Any]]:
        yield from list(weights(module).items())[:5]
        raise KeyboardInterrupt

    pid = engine._group.pid
    with pytest.raises(KeyboardInterrupt):
        _ = engine.load(stream())
    wake_with(engine, module)
    assert engine._group.pid == pid


def test_answers_tell_which_weights_they_are_of(engine: SGLang, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wake_with(engine, module)
    monkeypatch.setattr(engine, "_loads", engine._loads + 1)
    with pytest.raises(EngineFailed, match="came last"):
        _ = engine.generate(requests(*PROMPTS), GREEDY)


def test_many_more_requests_than_rows(engine: SGLang, module: Any) -> None:
    wake_with(engine, module)
    asked = [Request(tokens=PROMPTS[seed % 4], seed=seed) for seed in range(150)]
    completions = engine.generate(asked, Sampling(max_new_tokens=5))
    alone = engine.generate(asked[100:101], Sampling(max_new_tokens=5))
    assert alone[0].tokens == completions[100].tokens


def test_one_token_that_is_left_has_the_probability_one(engine: SGLang, module: Any) -> None:
    wake_with(engine, module)
    drawn = engine.generate(requests(*PROMPTS), Sampling(top_k=1, temperature=0.7, max_new_tokens=10))
    assert [c.tokens for c in drawn] == [greedy(module, p, 10) for p in PROMPTS]
    assert {logprob for c in drawn for logprob in c.logprobs} == {0.0}


@pytest.mark.parametrize(
    ("changes", "tensor_parallel", "says"),
    [
        ({}, 3, "4 attention heads"),
        ({"max_model_len": 4096}, 1, "max_model_len=4096 is more than the 2048"),
        ({"cache_bytes": 1 << 10}, 1, "it needs"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    folder: Path, world: World, changes: dict[str, int], tensor_parallel: int, says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        _ = build(dataclasses.replace(SPEC, **changes), find_model(str(folder)), dataclasses.replace(world, tp_size=tensor_parallel))


def test_a_model_that_does_not_say_what_it_is(folder: Path, world: World) -> None:
    model = find_model(str(folder))
    model.config.architectures = None
    with pytest.raises(BadInput, match="has no architectures"):
        _ = build(SPEC, model, world)


def test_a_model_of_images(tmp_path: Path, world: World) -> None:
    with pytest.raises(BadInput, match=r"of text alone.*Qwen2_5_VLConfig.*TransformersEngine\(…\) or VLLMEngine"):
        _ = build(SPEC, find_model(str(tiny_vision_model(tmp_path))), world)


def test_an_engine_that_is_not_installed(folder: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_options, "find_spec", lambda _: None)
    with pytest.raises(MissingEngine, match="pip install"):
        _ = build(SPEC, find_model(str(folder)), world)
