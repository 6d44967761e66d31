"""What every engine on a real model has to do: the same tests for each, against transformers' own forward pass in fp32.

A test class inherits `EngineContract` and gives the fixture `engine`: an engine of `folder`'s model, in fp32, with room for 256
tokens. Every test finds it awake, with the folder's weights.
"""

import dataclasses as dc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rft.effects import first_token
from rft.engines.protocol import Engine, Request
from rft.engines.stopping import StopStrings
from rft.errors import BadInput, EngineFailed, SyncFailed
from rft.experience import Draw, Sampling
from rft.models import find_model
from tests.models import tiny_model

END = 257
GREEDY = Sampling(temperature=0, max_new_tokens=10)
HOT = Draw(temperature=5.0, top_k=20)
PROMPTS = ((1, 2, 3), (7, 8, 9, 10, 11, 12), (5,), tuple(range(30, 60)))
MAX_MODEL_LEN = 256


def requests(*prompts: tuple[int, ...], seed: int = 0) -> list[Request]:
    return [Request(tokens=tokens, seed=seed + index) for index, tokens in enumerate(prompts)]


def weights(module: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What a trainer sends: tied heads once."""
    return {name: parameter.detach().to(dtype) for name, parameter in module.named_parameters()}


def wake_with(engine: Engine, module: Any) -> None:
    """Brings an engine from any condition to: awake, with these weights."""
    engine.sleep("release")
    engine.wake_weights()
    assert engine.load(iter(weights(module).items())) == engine.checksums()
    engine.flush()
    engine.wake_cache()


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """log p of `Sampling`'s docstring for one row of logits, written down a second time and as plainly as possible."""
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    scaled = logits / sampling.temperature
    kept = scaled.softmax(-1) >= sampling.min_p * scaled.softmax(-1).max()
    if sampling.top_k:
        kept &= scaled >= scaled.topk(sampling.top_k).values[-1]
    if sampling.top_p < 1:
        probabilities = scaled.masked_fill(~kept, -torch.inf).softmax(-1)
        mass = 0.0
        for token in probabilities.argsort(descending=True).tolist():
            kept[token] &= mass < sampling.top_p
            mass += float(probabilities[token])
    return scaled.masked_fill(~kept, -torch.inf).log_softmax(-1)


@torch.no_grad()
def expected_logprobs(module: Any, prompt: tuple[int, ...], response: tuple[int, ...], sampling: Sampling) -> list[float]:
    logits = module(torch.tensor([prompt + response])).logits[0]
    rows = range(len(prompt) - 1, len(prompt) + len(response) - 1)
    return [float(distribution(logits[row], sampling)[token]) for row, token in zip(rows, response, strict=True)]


@torch.no_grad()
def greedy(module: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Without a cache, token by token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and tokens[-1] != END:
        tokens.append(int(module(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def is_close(ours: list[float] | tuple[float, ...], theirs: list[float], tolerance: float) -> bool:
    return torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def module(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model with other weights."""
    path = tiny_model(tmp_path_factory.mktemp("other"), tied=True, seed=1)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


class EngineContract:
    """See the module's head."""

    @pytest.fixture(autouse=True)
    def _awake(self, engine: Engine, module: Any) -> None:
        wake_with(engine, module)

    # ---- sampling ----

    def test_greedy_is_the_models_own(self, engine: Engine, module: Any) -> None:
        completions = engine.generate(requests(*PROMPTS), GREEDY)
        assert [c.tokens for c in completions] == [greedy(module, prompt, 10) for prompt in PROMPTS]
        assert engine.generate(requests(*PROMPTS, seed=99), GREEDY) == completions

    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(temperature=0),
            Sampling(),
            Sampling(temperature=0.6),
            Sampling(top_k=5),
            Sampling(top_p=0.5),
            Sampling(temperature=1.7, top_k=40, top_p=0.8),
            Sampling(temperature=4.0, top_k=40),
            Sampling(temperature=2.0, min_p=0.3),
            Sampling(temperature=2.0, top_k=30, top_p=0.9, min_p=0.1),
        ],
        ids=str,
    )
    def test_logprobs_are_those_of_the_distribution_sampled_from(self, engine: Engine, module: Any, sampling: Sampling) -> None:
        for prompt, completion in zip(PROMPTS, engine.generate(requests(*PROMPTS), sampling), strict=True):
            expected = expected_logprobs(module, prompt, completion.tokens, sampling)
            assert is_close(completion.logprobs, expected, 1e-4)

    def test_a_first_token_drawn_hot_has_the_logprob_of_that_draw(self, engine: Engine, module: Any) -> None:
        usual = Sampling(temperature=0.5, max_new_tokens=8)
        asked = requests(*PROMPTS)
        for request, completion in zip(asked, first_token.generate(engine, asked, dc.replace(usual, first=HOT)), strict=True):
            start, rest = completion.tokens[:1], completion.tokens[1:]
            hot = Sampling(temperature=HOT.temperature, top_k=HOT.top_k)
            expected = [
                *expected_logprobs(module, request.tokens, start, hot),
                *expected_logprobs(module, request.tokens + start, rest, usual),
            ]
            assert is_close(completion.logprobs, expected, 1e-4)

    def test_samples_follow_the_distribution(self, engine: Engine, module: Any) -> None:
        """The first token of 4000 responses, by a χ² test over the five tokens that may come."""
        sampling = Sampling(top_k=5, max_new_tokens=1)
        drawn = engine.generate([Request(tokens=PROMPTS[0], seed=seed) for seed in range(4000)], sampling)
        with torch.no_grad():
            expected = distribution(module(torch.tensor([PROMPTS[0]])).logits[0, -1], sampling).exp() * len(drawn)
        counts = torch.bincount(torch.tensor([c.tokens[0] for c in drawn]), minlength=len(expected))
        possible = expected > 0
        assert counts[~possible].sum() == 0
        chi = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
        assert chi < 18.5, "beyond the 99.9th percentile of χ² with four degrees of freedom"

    def test_seeds_do_not_depend_on_the_batch(self, engine: Engine) -> None:
        sampling = Sampling(max_new_tokens=20)
        asked = requests(*PROMPTS, *PROMPTS, seed=40)
        together = engine.generate(asked, sampling)
        assert [c.tokens for c in engine.generate(asked[::-1], sampling)][::-1] == [c.tokens for c in together]
        assert [engine.generate([request], sampling)[0].tokens for request in asked] == [c.tokens for c in together]

    def test_seeds_decide(self, engine: Engine) -> None:
        asked = [Request(tokens=PROMPTS[0], seed=seed) for seed in (*range(8), 0, 2**62 + 8)]
        tokens = [c.tokens for c in engine.generate(asked, Sampling(max_new_tokens=12))]
        assert tokens[0] == tokens[8]
        assert len(set(tokens)) == 9

    def test_why_a_response_ended(self, engine: Engine) -> None:
        completions = engine.generate([Request(tokens=(1, 2), seed=s) for s in range(64)], Sampling(max_new_tokens=32, temperature=1.5))
        assert {c.finish for c in completions} == {"stop", "length"}
        for completion in completions:
            assert len(completion.tokens) == len(completion.logprobs)
            if completion.finish == "stop":
                assert completion.tokens.index(END) == len(completion.tokens) - 1
            else:
                assert len(completion.tokens) == 32
                assert END not in completion.tokens

    def test_a_token_of_ones_own_ends_a_response(self, engine: Engine) -> None:
        asked = [Request(tokens=(1, 2), seed=seed) for seed in range(16)]
        whole = engine.generate(asked, Sampling(max_new_tokens=16))
        token = whole[3].tokens[5]
        for before, completion in zip(whole, engine.generate(asked, Sampling(max_new_tokens=16, stop_tokens=(token,))), strict=True):
            end = before.tokens.index(token) + 1 if token in before.tokens else len(before.tokens)
            assert completion.tokens == before.tokens[:end]
            assert completion.finish == ("stop" if completion.tokens[-1] in (token, END) else "length")

    def test_a_text_ends_a_response(self, engine: Engine, folder: Path) -> None:
        """Before or at the end of the response as it would be otherwise, and not before the text is there."""
        tokenizer = find_model(str(folder)).tokenizer
        asked = [Request(tokens=(1, 2), seed=seed) for seed in range(16)]
        whole = engine.generate(asked, Sampling(max_new_tokens=16))
        texts = [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in whole]
        text = next(letter for text in texts for letter in text[3:] if letter.isascii() and letter.isprintable())
        sampling = Sampling(max_new_tokens=16, stop=("never there", text))
        stops = StopStrings(tokenizer, sampling.stop)
        stopped = engine.generate(asked, sampling)
        assert any(len(c.tokens) < len(before.tokens) and c.finish == "stop" for c, before in zip(stopped, whole, strict=True))
        assert [(c.tokens, c.finish) for c in map(stops.cut, stopped)] == [(c.tokens, c.finish) for c in map(stops.cut, whole)]

    def test_score(self, engine: Engine, module: Any) -> None:
        for sequence, scores in zip(PROMPTS, engine.score(PROMPTS), strict=True):
            assert is_close(scores, expected_logprobs(module, sequence[:1], sequence[1:], Sampling()), 1e-5)

    def test_nothing_asked(self, engine: Engine) -> None:
        assert engine.generate([], GREEDY) == []
        assert engine.score([]) == []

    @pytest.mark.parametrize(
        ("tokens", "says"), [((), "request 1 is empty"), ((1,) * 250, "max_model_len"), ((1, 320), "vocabulary"), ((-1,), "vocabulary")]
    )
    def test_requests_that_cannot_be_served(self, engine: Engine, tokens: tuple[int, ...], says: str) -> None:
        with pytest.raises(BadInput, match=says):
            _ = engine.generate([*requests((1, 2)), Request(tokens=tokens, seed=0)], GREEDY)
        with pytest.raises(BadInput, match="stop_tokens"):
            _ = engine.generate(requests((1, 2)), dc.replace(GREEDY, stop_tokens=(100_000,)))
        assert len(engine.generate([Request(tokens=(1,) * 246, seed=0)], GREEDY)) == 1

    # ---- weights ----

    def test_new_weights_are_used(self, engine: Engine, module: Any, other: Any) -> None:
        """Among them tied heads, which come once: the scores would be those of the old head else."""
        before = engine.checksums()
        received = engine.load(iter(weights(other).items()))
        engine.flush()
        assert received == engine.checksums()
        assert received.keys() == before.keys()
        for prompt, scores in zip(PROMPTS, engine.score(PROMPTS), strict=True):
            assert is_close(scores, expected_logprobs(other, prompt[:1], prompt[1:], Sampling()), 1e-5)
        assert [c.tokens for c in engine.generate(requests(*PROMPTS), GREEDY)] == [greedy(other, p, 10) for p in PROMPTS]
        assert engine.load(iter(weights(module).items())) == before

    def test_a_tied_tensor_may_come_under_its_other_name(self, engine: Engine, module: Any) -> None:
        renamed = {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in weights(module).items()}
        assert "lm_head.weight" in renamed
        assert engine.load(iter(renamed.items())) == engine.checksums()
        engine.flush()
        assert engine.generate(requests(*PROMPTS), GREEDY)[0].tokens == greedy(module, PROMPTS[0], 10)

    def test_an_update_that_was_held_back_shows(self, engine: Engine, module: Any, other: Any) -> None:
        old, new = weights(module), weights(other)
        sent = engine.load(iter(new.items()))
        for held in ("model.layers.1.self_attn.k_proj.bias", "model.norm.weight", "model.embed_tokens.weight"):
            _ = engine.load(iter({**new, held: old[held]}.items()))
            assert {name for name, value in engine.checksums().items() if value != sent[name]} == {held}
        _ = engine.load(iter(old.items()))
        assert all(value != sent[name] for name, value in engine.checksums().items())

    def test_any_float_dtype_is_cast(self, engine: Engine, module: Any) -> None:
        rounded = weights(module, torch.bfloat16)
        received = engine.load(iter(rounded.items()))
        assert received == engine.checksums()
        assert received == engine.load((name, tensor.double()) for name, tensor in rounded.items())

    def test_what_it_casts_to_may_be_cast_before(self, engine: Engine, module: Any) -> None:
        exact, dtype = {name: tensor.double() / 3 for name, tensor in weights(module).items()}, engine.casts_to or torch.float64
        assert engine.load(iter(exact.items())) == engine.load((name, tensor.to(dtype)) for name, tensor in exact.items())

    def test_the_prefix_cache_ends_with_its_weights(self, engine: Engine, other: Any) -> None:
        """The prefix is long enough to be cached, and has just been computed with the old weights."""
        prompt = tuple(range(200))
        _ = engine.generate(requests(prompt), GREEDY)
        _ = engine.load(iter(weights(other).items()))
        engine.flush()
        assert engine.generate(requests(prompt), GREEDY)[0].tokens == greedy(other, prompt, 10)

    @pytest.mark.parametrize("fault", ["missing", "surplus", "misnamed", "shape", "twice"])
    def test_a_set_that_is_not_whole(self, engine: Engine, module: Any, fault: str) -> None:
        whole = weights(module)
        last = whole.pop("model.norm.weight")
        ending: dict[str, list[tuple[str, Tensor]]] = {
            "missing": [],
            "surplus": [("model.norm.weight", last), ("model.extra", last)],
            "misnamed": [("model.extra", last)],
            "shape": [("model.norm.weight", last[:5])],
            "twice": [("model.norm.weight", last), ("model.norm.weight", last)],
        }
        given = list[str]()

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in [*ending[fault], *whole.items()]:
                given.append(name)
                yield name, tensor

        with pytest.raises(SyncFailed, match=r"model\.extra|model\.norm\.weight"):
            _ = engine.load(stream())
        assert len(given) == len(whole) + len(ending[fault]), "other ranks take part in the stream to its end"
        with pytest.raises(EngineFailed, match="load"):
            _ = engine.generate(requests(*PROMPTS), GREEDY)

    def test_a_stream_that_fails(self, engine: Engine, module: Any) -> None:
        def stream() -> Iterator[tuple[str, Tensor]]:
            yield from list(weights(module).items())[:3]
            raise ConnectionError("a rank is gone")

        with pytest.raises(ConnectionError, match="a rank is gone"):
            _ = engine.load(stream())
        wake_with(engine, module)
        assert engine.generate(requests(*PROMPTS), GREEDY)[0].tokens == greedy(module, PROMPTS[0], 10)

    # ---- sleep ----

    def test_sleep_and_wake_any_number_of_times(self, engine: Engine, module: Any) -> None:
        """Among what must come back are buffers that no checkpoint has."""
        first = engine.generate(requests(*PROMPTS), GREEDY)
        for weights_after in ("release", "keep", "keep", "release", "release"):
            engine.sleep(weights_after)
            engine.sleep(weights_after)
            engine.wake_weights()
            engine.wake_weights()
            if weights_after == "release":
                assert engine.load(iter(weights(module).items())) == engine.checksums()
            engine.wake_cache()
            engine.wake_cache()
            assert engine.generate(requests(*PROMPTS), GREEDY) == first

    def test_asleep_means_asleep(self, engine: Engine, module: Any) -> None:
        for how in ("keep", "release"):
            engine.sleep(how)
            with pytest.raises(EngineFailed, match="wake"):
                _ = engine.generate(requests(*PROMPTS), GREEDY)
        with pytest.raises(EngineFailed, match="wake_weights"):
            _ = engine.load(iter(weights(module).items()))
        with pytest.raises(EngineFailed, match="wake_weights"):
            _ = engine.checksums()
        engine.wake_weights()
        engine.wake_cache()
        with pytest.raises(EngineFailed, match="load first"):
            _ = engine.generate(requests(*PROMPTS), GREEDY)

    def test_new_weights_while_the_cache_sleeps(self, engine: Engine, other: Any) -> None:
        engine.sleep("release")
        engine.wake_weights()
        _ = engine.load(iter(weights(other).items()))
        engine.flush()
        with pytest.raises(EngineFailed, match="wake_cache"):
            _ = engine.generate(requests(*PROMPTS), GREEDY)
        engine.wake_cache()
        assert engine.generate(requests(*PROMPTS), GREEDY)[0].tokens == greedy(other, PROMPTS[0], 10)

    def test_releasing_after_keeping(self, engine: Engine) -> None:
        engine.sleep("keep")
        engine.sleep("release")
        assert engine.memory().mapped == 0
        engine.wake_weights()
        engine.wake_cache()
        with pytest.raises(EngineFailed, match="load first"):
            _ = engine.generate(requests(*PROMPTS), GREEDY)

    def test_memory(self, engine: Engine) -> None:
        whole = engine.memory()
        assert whole.mapped == whole.weights + whole.cache
        assert whole.weights >= 1_348_096
        engine.sleep("keep")
        assert engine.memory().mapped == (whole.weights if engine.keeps == "device" else 0)
        engine.sleep("release")
        assert engine.memory().mapped == 0
        engine.wake_weights()
        assert engine.memory().mapped == whole.weights

    def test_what_it_says_of_itself(self, engine: Engine) -> None:
        assert engine.dtype == torch.float32
        assert engine.max_model_len == MAX_MODEL_LEN
