"""What every engine with a place for an adapter must do, against peft's own model in fp32.

A test file takes all of it (`from tests.engines.lora_contract import *`), the fixtures of `contract.py`, and gives `adapted`: an engine
of `folder`'s model in fp32, with room for 256 tokens and for adapters of rank 4 on all layers.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from rft.engines.protocol import AdapterEngine
from rft.errors import EngineFailed, SyncFailed
from rft.sampling import Sampling
from rft.spec import LoRA
from rft.testing.engines import GREEDY, PROMPTS, expected_logprobs, greedy, is_close, requests, weights
from rft.trainers import adapter
from tests.engines.lora_cycle import Seen

LORA = LoRA(rank=4, alpha=8, sync="adapter")
LONG = tuple(range(200))
"""Of a prompt that is long enough to be cached."""


def parts(module: Any, seed: int) -> dict[str, Tensor]:
    """A random adapter that shows: names and tensors as a trainer sends them, B scaled already."""
    draw = torch.Generator().manual_seed(seed)
    shapes = adapter.shapes(module, adapter.layers(module, None), LORA.rank)
    return {name: 0.2 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def merged(module: Any, given: dict[str, Tensor]) -> Any:
    """A copy of the model with the adapter added to its weights."""
    whole = copy.deepcopy(module)
    with torch.no_grad():
        for name, weight in whole.named_parameters():
            a, b = (given.get(part) for part in adapter.parts_of(name))
            if a is not None and b is not None:
                weight += b @ a
    return whole


def wake(engine: AdapterEngine, module: Any, given: dict[str, Tensor]) -> None:
    """From any condition to: awake with this base and this adapter."""
    engine.sleep("release")
    engine.wake_weights()
    assert engine.load(iter(weights(module).items())) == engine.checksums()
    send(engine, given)
    engine.wake_cache()


def send(engine: AdapterEngine, given: dict[str, Tensor]) -> None:
    assert engine.load_adapter(iter(given.items())) == engine.adapter_checksums()
    engine.flush()


def check(engine: AdapterEngine, expected: Any) -> None:
    """It generates and scores as the merged model does."""
    assert [c.tokens for c in engine.generate(requests(*PROMPTS), GREEDY)] == [greedy(expected, p, 10) for p in PROMPTS]
    for prompt, scores in zip(PROMPTS, engine.score(PROMPTS), strict=True):
        assert is_close(scores, expected_logprobs(expected, prompt[:1], prompt[1:], Sampling()), 1e-4)


def test_it_computes_with_base_and_adapter(adapted: AdapterEngine, module: Any) -> None:
    assert isinstance(adapted, AdapterEngine)
    wake(adapted, module, parts(module, 0))
    check(adapted, merged(module, parts(module, 0)))


def test_a_new_adapter_takes_the_place_of_the_old_one(adapted: AdapterEngine, module: Any) -> None:
    """The same long prompt again: whatever was kept of the old adapter would show."""
    wake(adapted, module, parts(module, 0))
    base = adapted.checksums()
    for seed in (1, 0, 2):
        _ = adapted.generate(requests(LONG), GREEDY)
        send(adapted, parts(module, seed))
        expected = merged(module, parts(module, seed))
        assert adapted.generate(requests(LONG), GREEDY)[0].tokens == greedy(expected, LONG, 10)
        check(adapted, expected)
    assert adapted.checksums() == base


def test_an_adapter_of_zeros_is_the_base(adapted: AdapterEngine, module: Any) -> None:
    wake(adapted, module, {name: torch.zeros_like(part) for name, part in parts(module, 0).items()})
    check(adapted, module)


def test_a_new_base_needs_its_adapter(adapted: AdapterEngine, module: Any, other: Any) -> None:
    wake(adapted, module, parts(module, 0))
    _ = adapted.load(iter(weights(other).items()))
    assert adapted.has_base
    with pytest.raises(EngineFailed, match="load_adapter"):
        _ = adapted.generate(requests(*PROMPTS), GREEDY)
    send(adapted, parts(module, 0))
    check(adapted, merged(other, parts(module, 0)))


def test_sleep_keeps_both_or_neither(adapted: AdapterEngine, module: Any) -> None:
    wake(adapted, module, parts(module, 0))
    adapted.sleep("keep")
    assert adapted.has_base
    adapted.wake_weights()
    adapted.wake_cache()
    check(adapted, merged(module, parts(module, 0)))
    adapted.sleep("release")
    assert not adapted.has_base
    assert adapted.memory().mapped == 0
    with pytest.raises(EngineFailed, match="wake_weights"):
        _ = adapted.load_adapter(iter(parts(module, 0).items()))
    adapted.wake_weights()
    adapted.wake_cache()
    assert not adapted.has_base
    with pytest.raises(EngineFailed, match="load first"):
        _ = adapted.generate(requests(*PROMPTS), GREEDY)


def test_an_update_that_was_held_back_shows(adapted: AdapterEngine, module: Any) -> None:
    wake(adapted, module, parts(module, 0))
    old, new = parts(module, 0), parts(module, 1)
    sent = adapted.load_adapter(iter(new.items()))
    for held in ("model.layers.1.self_attn.k_proj.lora_B.weight", "model.layers.0.mlp.up_proj.lora_A.weight"):
        _ = adapted.load_adapter(iter({**new, held: old[held]}.items()))
        assert {name for name, value in adapted.adapter_checksums().items() if value != sent[name]} == {held}


@pytest.mark.parametrize("fault", ["missing", "surplus", "shape"])
def test_an_adapter_that_is_not_whole(adapted: AdapterEngine, module: Any, fault: str) -> None:
    wake(adapted, module, parts(module, 0))
    given = parts(module, 1)
    name = "model.layers.1.self_attn.o_proj.lora_A.weight"
    last = given.pop(name)
    ending = {"missing": {}, "surplus": {name: last, "model.extra.lora_A.weight": last}, "shape": {name: last[:2]}}[fault]
    stream = iter({**given, **ending}.items())
    with pytest.raises(SyncFailed, match=r"o_proj|extra"):
        _ = adapted.load_adapter(stream)
    assert next(stream, None) is None
    assert adapted.has_base
    with pytest.raises(EngineFailed, match="load_adapter"):
        _ = adapted.generate(requests(*PROMPTS), GREEDY)
    send(adapted, parts(module, 1))
    check(adapted, merged(module, parts(module, 1)))


def same_job(alone: Seen, whole: Seen) -> None:
    """An adapter that is sent alone, and weights that it is merged into: the same samples, old and new, and less to send."""
    for one, other in zip(alone.tokens, whole.tokens, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(alone.logprobs, whole.logprobs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=0)
    assert not torch.equal(alone.tokens[0], alone.tokens[-1])  # it has learnt something
    assert max(alone.gaps) < 1e-4
    early, late = alone.reference
    assert torch.equal(early, late)  # the base, whatever the adapter has become
    torch.testing.assert_close(early, alone.logprobs[0], atol=2e-4, rtol=0)  # an adapter changes nothing at first
    adapter_alone, both = ["load_adapter"], ["load", "load_adapter"]
    assert alone.sent == [*both, *adapter_alone, *adapter_alone, *both, *adapter_alone, *both]
    assert whole.sent == ["load"] * 6
