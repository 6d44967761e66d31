"""A rollout engine whose every answer is arithmetic: for property tests of steps and loops, exact and instant.

It keeps weights, cache and memory like a real one, refuses what a real one would crash on, and remembers log-probs in a prefix
cache that serves old ones until it is flushed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from rft.engines.faults import Faults
from rft.engines.protocol import Completion, EngineMemory, Keeping, Request
from rft.errors import SyncFailed
from rft.experience import Sampling
from rft.ops.checksum import checksum

VOCABULARY = 11
END = 0


def scripted_logprob(weights: float, tokens: tuple[int, ...]) -> float:
    """The log-prob of the last of `tokens`, given those before it and the sum of the weights."""
    return -0.5 - 0.125 * ((sum(tokens) + 3 * len(tokens)) % 5) - 2.0**-10 * weights


class ScriptedEngine:
    """See the module's head. `weight_bytes` and `cache_bytes` are what it claims to take on the device."""

    name = "scripted"
    dtype = torch.float32
    casts_to: torch.dtype | None = None
    max_model_len = 64

    def __init__(
        self, faults: Faults, *, keeps: Literal["device", "host"] | None = "device", weight_bytes: int = 64, cache_bytes: int = 32
    ) -> None:
        self.keeps: Literal["device", "host"] | None = keeps
        self.weights: dict[str, Tensor] | None = None
        self.awake = False
        self.mapped, self._faults = False, faults
        self.sizes = weight_bytes, cache_bytes
        self.prefixes = dict[tuple[int, ...], float]()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self._pass("generate")
        return [self._complete(request, sampling) for request in requests]

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        self._pass("score", writes=False)
        return [[self._logprob(tokens[: end + 1]) for end in range(1, len(tokens))] for tokens in sequences]

    def sleep(self, weights: Keeping) -> None:
        self._pass("sleep")
        if weights == "keep" and self.keeps is None:
            raise RuntimeError("this engine cannot keep its weights")
        self.awake = False
        self.mapped = self.mapped and weights == "keep" and self.keeps == "device"
        if weights == "release":
            self.weights = None

    def wake_weights(self) -> None:
        self._pass("wake_weights")
        self.mapped = True

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> Mapping[str, int]:
        self._pass("load")
        received = {name: tensor.clone() for name, tensor in tensors}
        if not self.mapped:
            raise SyncFailed("the engine's weights are not mapped")
        self.weights = received
        self._pass("load")
        return {name: int(checksum(tensor)) for name, tensor in received.items()}

    def checksums(self) -> Mapping[str, int]:
        self._pass("checksums", writes=False)
        return {name: int(checksum(tensor)) for name, tensor in (self.weights or {}).items()}

    def wake_cache(self) -> None:
        self._pass("wake_cache")
        if self.weights is None or not self.mapped:
            raise RuntimeError("there are no weights to fill the cache with")
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
        while len(logprobs) < sampling.max_new_tokens and (not logprobs or tokens[-1] not in ends):
            tokens.append((request.seed + 7 * len(tokens)) % VOCABULARY)
            logprobs.append(self._logprob(tuple(tokens)))
        finish = "stop" if tokens[-1] in ends else "length"
        return Completion(tokens=tuple(tokens[len(request.tokens) :]), logprobs=tuple(logprobs), finish=finish)

    def _logprob(self, tokens: tuple[int, ...]) -> float:
        if not self.awake or self.weights is None:
            raise RuntimeError("the engine is asleep")
        total = sum(float(tensor.sum()) for tensor in self.weights.values())
        return self.prefixes.setdefault(tokens, scripted_logprob(total, tokens))

    def _pass(self, verb: str, *, writes: bool = True) -> None:
        self._faults.pass_by("engine", verb, writes=writes)
