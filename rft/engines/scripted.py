"""A rollout engine whose every answer is arithmetic: for property tests of steps and loops, exact and instant.

It keeps weights, cache and memory like a real one, refuses what a real one would crash on, and remembers in a prefix cache what
its model said, which it serves until it is flushed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from rft.engines.delivery import delivery
from rft.engines.faults import Faults
from rft.engines.protocol import Completion, EngineMemory, Keeping, Request
from rft.engines.requests import check_requests
from rft.engines.sampling import uniforms
from rft.errors import EngineFailed
from rft.narrow import UNCUT
from rft.ops.checksum import checksum
from rft.sampling import Sampling

VOCABULARY = 11
END = 0
SHAPES = {("body",): torch.Size([2]), ("head",): torch.Size([1])}
"""The weights of its model."""


def scripted_logits(weights: float, tokens: Sequence[int]) -> list[float]:
    """Of what may follow `tokens`, given the sum of the weights: no two are alike, and the end comes seldom."""
    start = sum(tokens) + 3 * len(tokens)
    likely = [0.25 * ((start + 5 * token) % VOCABULARY) + 2.0**-10 * weights * token for token in range(VOCABULARY)]
    likely[END] = min(likely) - 0.125
    return likely


def scripted_logprob(weights: float, tokens: tuple[int, ...]) -> float:
    """The log-prob of the last of `tokens`, given those before it and the sum of the weights.

    One beyond the vocabulary counts as its remainder: the probe of a real launch comes from a real tokenizer.
    """
    return _logprobs(scripted_logits(weights, tokens[:-1]), Sampling())[tokens[-1] % VOCABULARY]


class ScriptedEngine:
    """See the module's head. `weight_bytes` and `cache_bytes` are what it claims to take on the device."""

    name = "scripted"
    dtype = torch.float32
    casts_to: torch.dtype | None = None
    narrows = UNCUT
    max_model_len = 256

    def __init__(
        self, faults: Faults, *, keeps: Literal["device", "host"] | None = "device", weight_bytes: int = 64, cache_bytes: int = 32
    ) -> None:
        self.keeps: Literal["device", "host"] | None = keeps
        self.weights: dict[str, Tensor] | None = None
        self.awake = False
        self.mapped, self._faults = False, faults
        self.sizes = weight_bytes, cache_bytes
        self.prefixes = dict[tuple[int, ...], list[float]]()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self._pass("generate")
        self._need_weights("generate")
        if not self.awake:
            raise EngineFailed("generate: the scripted engine is asleep; call wake_cache first")
        check_requests(requests, sampling, max_model_len=self.max_model_len, vocab=VOCABULARY)
        return [self._complete(request, sampling) for request in requests]

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        self._pass("score", writes=False)
        self._need_weights("score")
        return [[self._scores(ids[:end])[ids[end] % VOCABULARY] for end in range(1, len(ids))] for ids in sequences]

    def sleep(self, weights: Keeping) -> None:
        self._pass("sleep")
        if weights == "keep" and self.keeps is None:
            raise EngineFailed("sleep: the scripted engine was told that it cannot keep its weights")
        self.awake = False
        self.mapped = self.mapped and weights == "keep" and self.keeps == "device"
        if weights == "release":
            self.weights = None

    def wake_weights(self) -> None:
        self._pass("wake_weights")
        self.mapped = True

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> Mapping[str, int]:
        self._pass("load")
        with delivery(tensors, SHAPES, self.name) as stream:
            self._need_mapped("load")
            self.weights = None
            received = {name: tensor.float().clone() for name, tensor in stream}
        self.weights = received
        self._pass("load")
        return {name: int(checksum(tensor)) for name, tensor in received.items()}

    def checksums(self) -> Mapping[str, int]:
        self._pass("checksums", writes=False)
        self._need_mapped("checksums")
        return {name: int(checksum(tensor)) for name, tensor in (self.weights or {}).items()}

    def wake_cache(self) -> None:
        self._pass("wake_cache")
        self.awake = True

    def flush(self) -> None:
        self._pass("flush")
        self.prefixes.clear()

    def memory(self) -> EngineMemory:
        self._pass("memory", writes=False)
        weights, cache = self.sizes
        return EngineMemory(weights=weights, cache=cache, mapped=weights * self.mapped + cache * self.awake)

    def close(self) -> None:
        self.weights, self.awake, self.mapped = None, False, False

    def _complete(self, request: Request, sampling: Sampling) -> Completion:
        tokens, logprobs = list(request.tokens), list[float]()
        ends = (END, *sampling.stop_tokens)
        for number in uniforms(request.seed, sampling.max_new_tokens).tolist():
            likely = _logprobs(self._logits(tuple(tokens)), sampling)
            tokens.append(_drawn(likely, number) if sampling.temperature else likely.index(max(likely)))
            logprobs.append(likely[tokens[-1]])
            if tokens[-1] in ends:
                break
        finish = "stop" if tokens[-1] in ends else "length"
        return Completion(tokens=tuple(tokens[len(request.tokens) :]), logprobs=tuple(logprobs), finish=finish)

    def _scores(self, tokens: tuple[int, ...]) -> list[float]:
        return _logprobs(self._logits(tokens), Sampling())

    def _logits(self, tokens: tuple[int, ...]) -> list[float]:
        if tokens not in self.prefixes:
            total = sum(float(tensor.sum()) for tensor in (self.weights or {}).values())
            self.prefixes[tokens] = scripted_logits(total, tokens)
        return self.prefixes[tokens]

    def _need_weights(self, verb: str) -> None:
        self._need_mapped(verb)
        if self.weights is None:
            raise EngineFailed(f"{verb}: the scripted engine holds no weights; load first")

    def _need_mapped(self, verb: str) -> None:
        if not self.mapped:
            raise EngineFailed(f"{verb}: the scripted engine's weights are not mapped; call wake_weights first")

    def _pass(self, verb: str, *, writes: bool = True) -> None:
        self._faults.pass_by("engine", verb, writes=writes)


def _logprobs(logits: Sequence[float], sampling: Sampling) -> list[float]:
    """The distribution that `Sampling` describes."""
    scaled = [logit / (sampling.temperature or 1.0) for logit in logits]
    kept = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if sampling.temperature:
        least = max(scaled) + math.log(sampling.min_p) if sampling.min_p else -math.inf
        kept = [token for token in kept[: sampling.top_k or None] if scaled[token] >= least]
        kept = kept[: _enough([math.exp(scaled[token] - scaled[kept[0]]) for token in kept], sampling.top_p)]
    whole = math.log(math.fsum(math.exp(scaled[token]) for token in kept))
    return [scaled[token] - whole if token in kept else -math.inf for token in range(len(scaled))]


def _enough(masses: Sequence[float], share: float) -> int:
    """How many of them, from the first on, have that share of the whole."""
    wanted, before = share * math.fsum(masses), 0.0
    for number, mass in enumerate(masses):
        if before >= wanted:
            return number
        before += mass
    return len(masses)


def _drawn(logprobs: Sequence[float], number: float) -> int:
    """The first token whose cumulative probability is above the number."""
    possible = [token for token, logprob in enumerate(logprobs) if logprob > -math.inf]
    before = 0.0
    for token in possible:
        before += math.exp(logprobs[token])
        if number < before:
            return token
    return possible[-1]
