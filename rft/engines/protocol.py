"""What a rollout engine can do: a few verbs, the same for every engine.

An engine knows nothing of states and legality, nor of versions; it does what it is told, and what it cannot do it refuses by name.
All ranks of a TP group call the same verbs with the same arguments in the same order. After any failure `sleep("release")` must
bring it to rest, whatever it was doing.
"""

import dataclasses as dc
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from rft.images import Images
from rft.narrow import Narrows
from rft.sampling import Finish, Sampling

Keeping = Literal["release", "keep"]
WHOLE = "*"
"""The only key of `checksums` where an engine's layout hides which bytes belong to which name."""


@dc.dataclass(frozen=True, kw_only=True)
class Request:
    """One response to sample: the prompt's token ids, with the placeholders of its images, and the seed of its random numbers."""

    tokens: tuple[int, ...]
    seed: int
    images: Images | None = None
    """Only a `SeeingEngine` is given any. All requests of a prompt hold the same record."""


@dc.dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled response: its ids (an end token included, if one was sampled), their log-probs, and why it ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish


@dc.dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes on this rank's device: what weights and cache take when mapped, and what is mapped now."""

    weights: int
    cache: int
    mapped: int
    bucket: int = 0
    """What new weights go through there, while they come."""


class Engine(Protocol):
    """A rollout engine of this rank, or this rank's part of one."""

    name: str
    dtype: torch.dtype
    """Of the weights it computes with."""
    casts_to: torch.dtype | None
    """That `load` casts whatever it is given to before anything else, so that a stream in it arrives with the same bits as an exact one.
    None: not everything to the same dtype, or there is more to its loading than casting."""
    narrows: Narrows
    """What this rank takes of the tensors that it does not take whole, its slices under TP; under every name that a tensor has."""
    max_model_len: int
    """Longest prompt and response together, in tokens."""
    keeps: Literal["device", "host"] | None
    """Where `sleep("keep")` leaves the weights; None: it cannot keep them."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order. `sampling.samples` is not read: a prompt with n samples is n requests.

        An engine need not know stop strings: what comes behind one is cut off (`stopping`). It is faster if it stops there.
        """
        ...

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """log p(token t | tokens before t) at temperature 1, for every token but the first of each sequence; for the probe."""
        ...

    def sleep(self, weights: Keeping) -> None:
        """Unmaps the cache, and the weights too where `release`. Idempotent, and right in any condition."""
        ...

    def wake_weights(self) -> None:
        """Maps the weights (their values are undefined after `release`); the cache stays unmapped. Idempotent."""
        ...

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> Mapping[str, int]:
        """Installs a whole set of named tensors of any float dtype, casting them, and finishes loading once.

        Each is full (unsharded), or what `narrows` takes of it.

        Returns the checksums of what was received, as cast and as far as this rank holds it: what `checksums`
        gives where everything arrived. The iterator may contain collectives: it is exhausted, also on an error.
        Raises `SyncFailed` for names that it does not know or did not get.
        """
        ...

    def checksums(self) -> Mapping[str, int]:
        """Checksums of what lies in the engine now, read from its memory: the keys of `load`'s result, or `WHOLE` alone."""
        ...

    def wake_cache(self) -> None:
        """Maps the cache. Idempotent."""
        ...

    def flush(self) -> None:
        """Drops everything computed with older weights: prefix, multimodal and LoRA caches."""
        ...

    def memory(self) -> EngineMemory:
        """Bytes on this rank's device."""
        ...

    def close(self) -> None:
        """Gives everything back. Idempotent."""
        ...


@runtime_checkable
class SeeingEngine(Engine, Protocol):
    """An engine that may hold a model which takes images; one that holds none that does refuses requests with some."""

    takes_images: bool
    """Whether the model that it holds does."""


@runtime_checkable
class AdapterEngine(Engine, Protocol):
    """An engine that holds the base model and an adapter of it apart. `load` takes the base, and what adapter there was is gone then.

    It computes with both, always: until there is an adapter of the base that it holds, it refuses to generate.
    """

    @property
    def has_base(self) -> bool:
        """Whether it holds the base model that `load` has given it last, so that an adapter is all that it needs."""
        ...

    def load_adapter(self, tensors: Iterator[tuple[str, Tensor]]) -> Mapping[str, int]:
        """Installs a whole adapter: `<layer>.lora_A.weight` and `<layer>.lora_B.weight`, of which B A is added to the layer's weight.

        As `load` otherwise. Nothing that was computed with an older adapter is served afterwards.
        """
        ...

    def adapter_checksums(self) -> Mapping[str, int]:
        """As `checksums`, of the adapter."""
        ...
