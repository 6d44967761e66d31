"""SGLang in processes of its own. The first rank of a TP group owns the engine; each rank sends weights to the TP rank of its place.

    rank 0 of the group ── sglang_process ──> sglang_host, with SGLang's engine
        │                                         │  spawns
        └────── sglang_bucket ──────────> TP rank 0 (sglang_worker)
    rank 1 of the group ── sglang_bucket ────> TP rank 1

All ranks of the group call the same verbs in the same order. An engine whose processes are dead has let everything go; waking its
weights starts it anew.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rft.engines import sglang_options
from rft.engines.delivery import delivery, shapes_of
from rft.engines.protocol import Completion, EngineMemory, Keeping, Request
from rft.engines.requests import check_requests, check_sequences, end_tokens
from rft.engines.sglang_bucket import Bucket, needed
from rft.engines.sglang_calls import Sampled
from rft.engines.sglang_group import Group
from rft.errors import BadInput, EngineFailed
from rft.models import ModelFolder
from rft.narrow import Narrows
from rft.parallel.world import World
from rft.sampling import Sampling
from rft.spec import SGLangEngine

log = logging.getLogger("rft")
CACHE = ("kv_cache", "cuda_graph")
"""SGLang's tags of what sleeps whenever the engine does."""
WEIGHTS = ("weights",)


def build(spec: SGLangEngine, model: ModelFolder, world: World) -> "SGLang":
    """The engine on the devices of this TP group, awake, with no weights of meaning yet: nothing is read from the model's files.

    Collective over the TP group. Raises `MissingEngine` where SGLang is not installed or too old, `BadInput` for what it cannot do,
    `EngineFailed` with the end of its output where it does not start.
    """
    sglang_options.check(spec, model, world)
    return SGLang(spec, model, world)


class SGLang:
    """One SGLang engine, or this rank's part of one. `sync_path` tells how new weights are taken: by a plan, or by SGLang's own loading."""

    name = "sglang"
    keeps: Literal["device", "host"] | None = "device"

    def __init__(self, spec: SGLangEngine, model: ModelFolder, world: World) -> None:
        self._spec, self._device = spec, world.device
        self._ends, self._vocab = list(end_tokens(model)), int(model.config.vocab_size)
        self._shapes = shapes_of(model.config)
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.casts_to: torch.dtype | None = self.dtype  # as it is put into a bucket
        self.max_model_len = spec.max_model_len
        self._group = Group(world, lambda addresses: sglang_options.settings(spec, model, world, addresses), timeout_s=spec.start_timeout_s)
        self._bucket = needed(self._shapes.values(), self.dtype, spec.bucket_bytes)
        self._loads = 0
        self._start()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Samples all requests. Raises `BadInput` for one that cannot be served, `EngineFailed` when asleep or dead."""
        self._need("generate")
        check_requests(requests, sampling, max_model_len=self.max_model_len, vocab=self._vocab)
        if not requests:
            return []
        parameters = [self._parameters(request.seed, sampling) for request in requests]
        sampled = self._group.call("generate", [r.tokens for r in requests], parameters)
        return [self._completion(each, sampling) for each in sampled]

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """log p of every token but the first, at temperature 1. Raises as `generate` does."""
        self._need("score")
        check_sequences(sequences, max_model_len=self.max_model_len, vocab=self._vocab)
        return self._group.call("score", sequences) if sequences else []

    def sleep(self, weights: Keeping) -> None:
        """Gives back the cache, and the weights too where `release`; `keep` leaves them on the device.

        What is under way is aborted. Where the engine's processes are dead everything has been given back, which is said in the log, and
        `keep` raises `EngineFailed`.
        """
        try:
            if well := self._group.settle():
                self._release(weights)
        except EngineFailed:
            well = False
            self._group.end()
        if not well:
            self._is_down(weights)

    def wake_weights(self) -> None:
        """Maps the weights; after a release they hold nothing of meaning until `load`. Starts the engine where it is not running."""
        if not self._group.running:
            self._start()
            self._unmap_cache()
        elif not self._weights_mapped:
            self._resume(WEIGHTS)
            self._weights_mapped = True

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> Mapping[str, int]:
        """Installs a set of weights. Raises `SyncFailed` that names what is missing, unknown, of a wrong shape, or arrived changed."""
        with delivery(tensors, self._shapes, self.name, self.narrows) as stream:
            self._need_weights("load")
            self._loaded = False
            self._loads += 1
            bucket = Bucket(self._bucket, self.dtype, self._device)
            try:
                received = self._group.load(stream, str(self._loads), bucket)
            finally:
                bucket.close()
        self._loaded = True
        return received or self.checksums()  # SGLang's own loading is over only now

    def checksums(self) -> Mapping[str, int]:
        """Read from the memory of this rank's TP rank: by name with the plan, over the whole of it otherwise."""
        self._need_weights("checksums")
        return self._group.ask("checksums")

    def wake_cache(self) -> None:
        """Maps the cache, empty."""
        if not self._cache_mapped:
            self._resume(CACHE)
            self._cache_mapped = True

    def flush(self) -> None:
        """Drops the prefix cache and those of images."""
        if not self._group.call("flush"):
            raise EngineFailed("SGLang did not drop its prefix cache: some of its requests have not ended")

    def memory(self) -> EngineMemory:
        """The parameters' bytes on this rank, and those of its cache."""
        mapped = self._weights_mapped * self._weights + self._cache_mapped * self._cache
        return EngineMemory(weights=self._weights, cache=self._cache, mapped=mapped, bucket=self._bucket)

    def close(self) -> None:
        """Ends SGLang's processes."""
        self._group.end()
        self._weights_mapped = self._cache_mapped = self._loaded = False

    # ---- processes ----

    def _start(self) -> None:
        self._group.start()
        try:
            facts = self._group.ask("plan", self._shapes, self._spec.dtype)
            if facts["cache"] > self._spec.cache_bytes:
                raise BadInput(
                    f"SGLang takes {facts['cache']} bytes for this model's cache where cache_bytes={self._spec.cache_bytes}: its layers "
                    "keep something else than plain attention does, which SGLangEngine cannot size"
                )
        except BaseException:
            self._group.end()
            raise
        self._weights, self._cache, self.sync_path = int(facts["weights"]), int(facts["cache"]), str(facts["path"])
        self.narrows: Narrows = facts["narrows"]
        self._weights_mapped, self._cache_mapped, self._loaded = True, True, False
        if self.sync_path == "plan":
            log.info("SGLang takes new weights by the recorded plan")
        else:
            log.warning("SGLang takes new weights by its own loading, not by the recorded plan: %s", facts["why"])

    def _is_down(self, weights: Keeping) -> None:
        had = self._weights_mapped
        self._weights_mapped = self._cache_mapped = self._loaded = False
        if had and weights == "keep":
            raise EngineFailed("sleep_keeping: SGLang's processes are dead, and its weights with them; recover(state) leads on")
        if had:
            log.warning("SGLang's processes are dead; it is started anew when its weights are woken")

    # ---- memory ----

    def _release(self, weights: Keeping) -> None:
        self._loaded = self._loaded and weights == "keep"
        if self._cache_mapped:
            self._unmap_cache()
        if self._weights_mapped and weights == "release":
            self._unmap(WEIGHTS)
            self._weights_mapped = False

    def _unmap_cache(self) -> None:
        self.flush()
        self._unmap(CACHE)
        self._cache_mapped = False

    def _unmap(self, tags: Sequence[str]) -> None:
        if self._device.type == "cuda":
            self._group.call("release", tags)
        else:
            self._group.ask("give_back", "weights" if tags == WEIGHTS else "cache")

    def _resume(self, tags: Sequence[str]) -> None:
        """On a CPU there is nothing to do: the system gives pages when they are written."""
        if self._device.type == "cuda":
            self._group.call("resume", tags)

    # ---- conditions ----

    def _need(self, verb: str) -> None:
        self._need_weights(verb)
        if not self._loaded:
            raise EngineFailed(f"{verb}: the SGLang engine holds no weights since it was started, woken or half loaded; load first")
        if not self._cache_mapped:
            raise EngineFailed(f"{verb}: the SGLang engine is asleep; call wake_cache first")

    def _need_weights(self, verb: str) -> None:
        if not self._weights_mapped:
            raise EngineFailed(f"{verb}: the SGLang engine has let its weights go; call wake_weights first")

    # ---- requests ----

    def _parameters(self, seed: int, sampling: Sampling) -> dict[str, Any]:
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": min(sampling.top_k, self._vocab) or -1,  # it keeps them as 32-bit numbers
            "min_p": sampling.min_p,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": [*self._ends, *sampling.stop_tokens],
            "sampling_seed": seed,
        }

    def _completion(self, sampled: Sampled, sampling: Sampling) -> Completion:
        tokens, logprobs, finish, version = sampled
        if finish != "stop" and finish != "length":
            raise EngineFailed(f"SGLang ended a response for the reason {finish!r}; recover(state) leads on")
        if version != str(self._loads):
            raise EngineFailed(f"SGLang answered from weights {version!r}, where {self._loads} came last; recover(state) leads on")
        if tokens and tokens[-1] in (*self._ends, *sampling.stop_tokens):
            finish = "stop"  # SGLang before 0.5.18 says "length" of one that is the last allowed, too
        if sampling.temperature and sampling.top_k == 1:
            logprobs = [0.0] * len(tokens)  # one token was left to be drawn; SGLang takes that for greedy, and tells the model's own
        return Completion(tokens=tuple(tokens), logprobs=tuple(logprobs), finish=finish)
