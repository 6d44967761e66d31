"""Tokens, log-probs, seeds, and why a response ends."""

import dataclasses as dc
from typing import Any, ClassVar

import pytest
import torch

from rft.effects import first_token
from rft.engines.protocol import Completion, Engine, Request
from rft.engines.stopping import StopStrings
from rft.errors import BadInput
from rft.sampling import Draw, Sampling
from rft.testing.engines.base import Contract
from rft.testing.engines.oracle import GREEDY, distribution, expected_logprobs, is_close, requests

WAYS = {
    "greedy": Sampling(temperature=0),
    "plain": Sampling(),
    "cold": Sampling(temperature=0.6),
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(top_p=0.5),
    "min_p": Sampling(min_p=0.2),
    "hot, top_k": Sampling(temperature=4.0, top_k=40),
    "hot, min_p": Sampling(temperature=2.0, min_p=0.3),
    "hot, top_k, top_p": Sampling(temperature=1.7, top_k=40, top_p=0.8),
    "hot, top_k, top_p, min_p": Sampling(temperature=2.0, top_k=30, top_p=0.9, min_p=0.1),
}
HOT = Draw(temperature=5.0, top_k=20)
UNSERVED = {
    "empty": "request 1 is empty",
    "too long": "max_model_len",
    "unknown": "vocabulary",
    "negative": "vocabulary",
}


class SamplingContract(Contract):
    """See the module's head."""

    stops_at_texts: ClassVar[bool] = True
    """Whether the engine ends a response at a stop string by itself; what comes behind one is cut off anyhow."""

    def test_greedy_is_the_models_own(self, engine: Engine, module: Any) -> None:
        completions = engine.generate(requests(*self.prompts), GREEDY)
        assert [c.tokens for c in completions] == self.all_greedy(module)
        for again, before in zip(engine.generate(requests(*self.prompts, seed=99), GREEDY), completions, strict=True):
            assert (again.tokens, again.finish) == (before.tokens, before.finish)
            assert is_close(again.logprobs, before.logprobs, 1e-5)  # the prompt may come from a cache now, and round otherwise

    @pytest.mark.parametrize("way", WAYS)
    def test_logprobs_are_those_of_the_distribution_sampled_from(self, engine: Engine, module: Any, way: str) -> None:
        sampling = dc.replace(WAYS[way], max_new_tokens=40)
        for prompt, completion in zip(self.prompts, engine.generate(requests(*self.prompts), sampling), strict=True):
            assert is_close(completion.logprobs, expected_logprobs(module, prompt, completion.tokens, sampling), 1e-4)

    def test_a_first_token_drawn_hot_has_the_logprob_of_that_draw(self, engine: Engine, module: Any) -> None:
        usual = Sampling(temperature=0.5, max_new_tokens=8)
        hot = Sampling(temperature=HOT.temperature, top_k=HOT.top_k)
        asked = requests(*self.prompts)
        for request, completion in zip(asked, first_token.generate(engine, asked, dc.replace(usual, first=HOT), None), strict=True):
            start, rest = completion.tokens[:1], completion.tokens[1:]
            expected = expected_logprobs(module, request.tokens, start, hot)
            expected += expected_logprobs(module, request.tokens + start, rest, usual)
            assert is_close(completion.logprobs, expected, 1e-4)

    def test_samples_follow_the_distribution(self, engine: Engine, module: Any) -> None:
        """The first token of 4000 responses, by a χ² test over the five tokens that may come."""
        sampling, prompt = Sampling(top_k=5, max_new_tokens=1), self.prompts[0]
        drawn = engine.generate([Request(tokens=prompt, seed=seed) for seed in range(4000)], sampling)
        with torch.no_grad():
            expected = distribution(module(torch.tensor([prompt])).logits[0, -1], sampling).exp() * len(drawn)
        counts = torch.bincount(torch.tensor([c.tokens[0] for c in drawn]), minlength=len(expected))
        possible = expected > 0
        assert counts[~possible].sum() == 0
        chi = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
        assert chi < 18.5, "beyond the 99.9th percentile of χ² with four degrees of freedom"

    def test_seeds_do_not_depend_on_the_batch(self, engine: Engine) -> None:
        sampling = Sampling(max_new_tokens=20)
        asked = requests(*self.prompts, *self.prompts, seed=40)
        together = engine.generate(asked, sampling)
        assert [c.tokens for c in engine.generate(asked[::-1], sampling)][::-1] == [c.tokens for c in together]
        assert [engine.generate([request], sampling)[0].tokens for request in asked] == [c.tokens for c in together]

    def test_seeds_decide(self, engine: Engine) -> None:
        asked = [Request(tokens=self.prompts[0], seed=seed) for seed in (*range(8), 0, 2**62 + 8)]
        tokens = [c.tokens for c in engine.generate(asked, Sampling(max_new_tokens=12))]
        assert tokens[0] == tokens[8]
        assert len(set(tokens)) == 9

    def test_why_a_response_ended(self, engine: Engine) -> None:
        asked = [Request(tokens=(1, 2), seed=seed) for seed in range(64)]
        completions = engine.generate(asked, Sampling(max_new_tokens=32, temperature=1.5))
        assert {c.finish for c in completions} == {"stop", "length"}
        for completion in completions:
            assert len(completion.tokens) == len(completion.logprobs)
            if completion.finish == "stop":
                assert completion.tokens.index(self.end) == len(completion.tokens) - 1
            else:
                assert len(completion.tokens) == 32
                assert self.end not in completion.tokens

    def test_an_end_token_that_is_the_last_one_allowed_is_a_stop(self, engine: Engine) -> None:
        asked, sampling = [Request(tokens=(1, 2), seed=seed) for seed in range(64)], Sampling(max_new_tokens=32, temperature=1.5)
        ended = zip(asked, engine.generate(asked, sampling), strict=True)
        request, whole = next((request, c) for request, c in ended if c.finish == "stop" and len(c.tokens) > 1)
        (exact,) = engine.generate([request], dc.replace(sampling, max_new_tokens=len(whole.tokens)))
        (shorter,) = engine.generate([request], dc.replace(sampling, max_new_tokens=len(whole.tokens) - 1))
        assert (exact.tokens, exact.finish) == (whole.tokens, "stop")
        assert (shorter.tokens, shorter.finish) == (whole.tokens[:-1], "length")

    def test_a_token_of_ones_own_ends_a_response(self, engine: Engine) -> None:
        asked = [Request(tokens=(1, 2), seed=seed) for seed in range(16)]
        whole = engine.generate(asked, Sampling(max_new_tokens=16))
        token = next(c.tokens[5] for c in whole if len(c.tokens) > 6)
        for before, completion in zip(whole, engine.generate(asked, Sampling(max_new_tokens=16, stop_tokens=(token,))), strict=True):
            end = before.tokens.index(token) + 1 if token in before.tokens else len(before.tokens)
            assert completion.tokens == before.tokens[:end]
            assert completion.finish == ("stop" if completion.tokens[-1] in (token, self.end) else "length")

    def test_a_text_ends_a_response(self, engine: Engine, tokenizer: Any) -> None:
        """Before or at the end of the response as it would be otherwise, and not before the text is there."""
        asked = [Request(tokens=(1, 2), seed=seed) for seed in range(16)]
        whole = engine.generate(asked, Sampling(max_new_tokens=16))
        texts = [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in whole]
        text = next(letter for text in texts for letter in text[3:] if letter.isascii() and letter.isprintable())
        sampling = Sampling(max_new_tokens=16, stop=("never there", text))
        stops = StopStrings(tokenizer, sampling.stop)
        stopped = engine.generate(asked, sampling)
        shorter = [len(c.tokens) < len(before.tokens) for c, before in zip(stopped, whole, strict=True)]
        assert any(shorter) == self.stops_at_texts
        assert _told(map(stops.cut, stopped)) == _told(map(stops.cut, whole))

    def test_a_text_in_the_prompt_ends_no_response(self, engine: Engine, module: Any, tokenizer: Any) -> None:
        """Nor does one in a prompt that ends in the middle of a character, whose text is there with the response's first token only."""
        parts = [token for token in range(len(module(torch.tensor([[1]])).logits[0, 0])) if tokenizer.decode([token]) == "\ufffd"]
        cut, letters = (*self.prompts[0], *parts[:1]), [letter for letter in tokenizer.decode(self.prompts[0]) if letter.isascii()]
        asked = [Request(tokens=cut, seed=seed) for seed in range(16)]
        whole = engine.generate(asked, Sampling(max_new_tokens=8))
        sampling = Sampling(max_new_tokens=8, stop=tuple(set(letters)))
        stops = StopStrings(tokenizer, sampling.stop)
        assert _told(map(stops.cut, engine.generate(asked, sampling))) == _told(map(stops.cut, whole))

    def test_score(self, engine: Engine, module: Any) -> None:
        for sequence, scores in zip(self.prompts, engine.score(self.prompts), strict=True):
            assert is_close(scores, expected_logprobs(module, sequence[:1], sequence[1:], Sampling()), 1e-5)

    def test_nothing_asked(self, engine: Engine) -> None:
        assert engine.generate([], GREEDY) == []
        assert engine.score([]) == []

    @pytest.mark.parametrize("what", UNSERVED)
    def test_requests_that_cannot_be_served(self, engine: Engine, module: Any, what: str) -> None:
        """They are refused before anything is computed; the longest one that is allowed is served."""
        vocabulary = int(module(torch.tensor([[1]])).logits.shape[-1])
        longest = (1,) * (engine.max_model_len - GREEDY.max_new_tokens)
        tokens = {"empty": (), "too long": (*longest, 1), "unknown": (1, vocabulary), "negative": (-1,)}[what]
        with pytest.raises(BadInput, match=UNSERVED[what]):
            _ = engine.generate([*requests((1, 2)), Request(tokens=tokens, seed=0)], GREEDY)
        with pytest.raises(BadInput, match="stop_tokens"):
            _ = engine.generate(requests((1, 2)), dc.replace(GREEDY, stop_tokens=(100_000,)))
        assert len(engine.generate([Request(tokens=longest, seed=0)], GREEDY)) == 1


def _told(completions: "map[Completion]") -> list[tuple[tuple[int, ...], str]]:
    return [(c.tokens, c.finish) for c in completions]
