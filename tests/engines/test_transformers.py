"""The embedded engine: the contract, and what is its own."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rft.engines import decoding
from rft.engines.protocol import Engine, Request
from rft.engines.transformers import Transformers, build
from rft.errors import BadInput
from rft.models import find_model
from rft.parallel.world import World, open_world
from rft.sampling import Sampling
from rft.spec import TransformersEngine
from rft.testing.engines import (
    GREEDY,
    MAX_MODEL_LEN,
    PROMPTS,
    EngineContract,
    check_ranks,
    folder,
    greedy,
    module,
    other,
    requests,
    tokenizer,
    wake_with,
    weights,
)
from tests.launching import torchrun

__all__ = ["folder", "module", "other", "tokenizer"]


@pytest.fixture(scope="module")
def world() -> World:
    return open_world(1, timeout_s=60)


def make(folder: Path, world: World, **options: Any) -> Transformers:
    return build(TransformersEngine(dtype="float32", max_model_len=MAX_MODEL_LEN, **options), find_model(str(folder)), world)


@pytest.fixture(scope="module")
def engine(folder: Path, world: World) -> Iterator[Engine]:
    engine = make(folder, world)
    yield engine
    engine.close()
    engine.close()


class TestContract(EngineContract):
    """All of it."""


def test_files_that_are_broken_are_said(folder: Path, world: World, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    weights_file = broken / "model.safetensors"
    _ = weights_file.write_bytes(weights_file.read_bytes()[: weights_file.stat().st_size // 2])
    with pytest.raises(BadInput, match=f"the weights in {broken} cannot be loaded: .*anew"):
        _ = make(broken, world)


def test_it_starts_awake_with_the_folders_weights(folder: Path, world: World, module: Any) -> None:
    engine = make(folder, world)
    assert engine.generate(requests(*PROMPTS), GREEDY)[1].tokens == greedy(module, PROMPTS[1], 10)
    assert engine.checksums() == engine.load(iter(weights(module).items()))


def test_more_requests_than_rows(folder: Path, world: World) -> None:
    asked, sampling = requests(*PROMPTS, *PROMPTS, *PROMPTS), Sampling(max_new_tokens=12)
    few, many = make(folder, world, max_rows=5), make(folder, world, max_rows=64)
    assert [c.tokens for c in few.generate(asked, sampling)] == [c.tokens for c in many.generate(asked, sampling)]
    assert [len(row) for row in few.score([r.tokens for r in asked])] == [len(r.tokens) - 1 for r in asked]


def test_rows_that_have_ended_leave_the_batch(folder: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    widths, step = list[int](), decoding._step

    def watched(model: Any, batch: Any, tokens: Any, number: int) -> Any:
        widths.append(len(tokens))
        return step(model, batch, tokens, number)

    engine, sampling = make(folder, world), Sampling(temperature=3.0, max_new_tokens=200)
    asked = [Request(tokens=(1, 2), seed=seed) for seed in range(32)]
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "_step", watched)
        dropping = engine.generate(asked, sampling)
    assert widths[0] == 32
    assert widths[-1] < 32 * decoding.KEEP_ABOVE
    assert sorted(widths, reverse=True) == widths
    monkeypatch.setattr(decoding, "KEEP_ABOVE", 0.0)
    assert [c.tokens for c in engine.generate(asked, sampling)] == [c.tokens for c in dropping]


def test_one_prompt_is_computed_once(folder: Path, world: World) -> None:
    engine, shapes = make(folder, world), list[tuple[int, ...]]()
    handle = engine._module.model.embed_tokens.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    asked = [Request(tokens=prompt, seed=seed) for prompt in PROMPTS[:2] for seed in range(4)]
    _ = engine.generate(asked, Sampling(max_new_tokens=2))
    handle.remove()
    assert shapes == [(2, 6), (8, 1)]


def test_released_weights_cannot_be_used(folder: Path, world: World) -> None:
    engine = make(folder, world)
    engine.sleep("release")
    assert sum(parameter.untyped_storage().nbytes() for parameter in engine._module.parameters()) == 0
    with pytest.raises((RuntimeError, AssertionError)):
        engine._module(torch.tensor([[1, 2]]))


def test_buffers_outlive_a_release(folder: Path, world: World, module: Any) -> None:
    """Rotary frequencies are in no checkpoint: an engine that released them too would never be right again."""
    engine = make(folder, world)
    frequencies = dict(engine._module.named_buffers())["model.rotary_emb.inv_freq"]
    assert not any(frequencies is tensor for tensor, _ in engine._places)
    wake_with(engine, module)
    assert engine.generate(requests(*PROMPTS), GREEDY)[3].tokens == greedy(module, PROMPTS[3], 10)
    engine._places.append((frequencies, frequencies.shape))
    engine.sleep("release")
    assert frequencies.numel() == 0, "this is what its handling prevents"


def test_every_bit_of_a_seed_counts(folder: Path, world: World) -> None:
    asked = [Request(tokens=(1, 2), seed=seed) for seed in (0, 2**62, 2**33, 1)]
    assert len({c.tokens for c in make(folder, world).generate(asked, Sampling(max_new_tokens=12))}) == 4


def test_tensor_parallelism_is_refused(folder: Path, world: World) -> None:
    import dataclasses

    with pytest.raises(BadInput, match="tensor_parallel=2"):
        build(TransformersEngine(), find_model(str(folder)), dataclasses.replace(world, tp_size=2))


def test_untied_heads(tmp_path: Path, world: World) -> None:
    from transformers import AutoModelForCausalLM

    from rft.testing.models import tiny_model

    path = tiny_model(tmp_path, "llama", tied=False)
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine = make(path, world)
    assert "lm_head.weight" in engine.checksums()
    wake_with(engine, module)
    assert engine.generate(requests(*PROMPTS), GREEDY)[0].tokens == greedy(module, PROMPTS[0], 10)


def test_the_contract_on_two_ranks_and_the_same_tokens_on_one(
    folder: Path, world: World, module: Any, tokenizer: Any, tmp_path: Path
) -> None:
    _ = torchrun(Path(__file__).with_name("on_ranks.py"), tmp_path, folder, ranks=2, timeout=240)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [len(each) for each in told] == [6, 6]
    assert told[0] | told[1] == check_ranks(make(folder, world), module, tokenizer, world)
