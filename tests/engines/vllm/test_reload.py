"""vLLM with the layouts of its own CPU kernels: no plan is possible, and its layer-wise reload takes the weights."""

import contextlib
import logging
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.engines import vllm
from rft.engines.protocol import WHOLE
from rft.errors import SyncFailed
from rft.models import find_model
from rft.parallel.world import open_world
from rft.sampling import Sampling
from rft.spec import VLLMEngine
from rft.testing.engines import GREEDY, PROMPTS, expected_logprobs, folder, greedy, is_close, module, other, requests, wake_with, weights

__all__ = ["folder", "module", "other"]


@contextlib.contextmanager
def packed_layouts() -> Generator[bool]:
    yield False


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[vllm.VLLM]:
    patch = pytest.MonkeyPatch()
    patch.setattr(vllm, "plain_layouts", packed_layouts)
    spec = VLLMEngine(dtype="float32", max_model_len=256, max_rows=8, cache_bytes=1 << 26)
    engine = vllm.build(spec, find_model(str(folder)), open_world(1, timeout_s=60))
    patch.undo()
    yield engine
    engine.close()


def test_new_weights_are_used(engine: vllm.VLLM, module: Any, other: Any) -> None:
    assert engine.sync_path == "reload"
    for current in (module, other, module):
        wake_with(engine, current)
        assert [c.tokens for c in engine.generate(requests(*PROMPTS), GREEDY)] == [greedy(current, p, 10) for p in PROMPTS]
        for prompt, scores in zip(PROMPTS, engine.score(PROMPTS), strict=True):
            assert is_close(scores, expected_logprobs(current, prompt[:1], prompt[1:], Sampling()), 1e-5)


def test_one_checksum_over_all(engine: vllm.VLLM, module: Any, other: Any) -> None:
    wake_with(engine, module)
    before = engine.checksums()
    assert before.keys() == {WHOLE}
    assert engine.load(iter(weights(other).items())) != before
    assert engine.load(iter(weights(module).items())) == before


def test_a_set_that_is_not_whole(engine: vllm.VLLM, module: Any) -> None:
    given = weights(module)
    del given["model.norm.weight"]
    stream = iter([*given.items(), ("model.extra", given["model.embed_tokens.weight"])])
    with pytest.raises(SyncFailed, match=r"model\.extra is not known; model\.norm\.weight did not come"):
        _ = engine.load(stream)
    assert next(stream, None) is None
    wake_with(engine, module)
    assert engine.generate(requests(*PROMPTS), GREEDY)[0].tokens == greedy(module, PROMPTS[0], 10)


def test_the_log_says_why(folder: Path, caplog: pytest.LogCaptureFixture, engine: vllm.VLLM) -> None:
    from rft.engines.delivery import shapes_of
    from rft.engines.vllm_sync import choose_sync

    worker = engine._llm.collective_rpc(lambda worker: worker)[0]
    with caplog.at_level(logging.INFO, "rft"):
        for plain in (True, False):
            sync = choose_sync(worker, shapes_of(find_model(str(folder)).config), engine.dtype, plain=plain)
            assert sync.path == "reload"
    assert "its loading cannot be called again" in caplog.messages[0]
    assert "packs the weights of linear layers" in caplog.messages[1]
