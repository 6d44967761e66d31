from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

R = TypeVar("R")

class SamplingParams:
    temperature: float
    skip_clone: bool
    flat_logprobs: bool
    output_kind: RequestOutputKind
    def __init__(
        self,
        *,
        n: int = ...,
        temperature: float = ...,
        top_p: float = ...,
        top_k: int = ...,
        min_p: float = ...,
        max_tokens: int = ...,
        seed: int | None = ...,
        logprobs: int | None = ...,
        prompt_logprobs: int | None = ...,
        stop: list[str] | None = ...,
        stop_token_ids: list[int] | None = ...,
        ignore_eos: bool = ...,
        detokenize: bool = ...,
    ) -> None: ...

class LLM:
    llm_engine: LLMEngine
    request_counter: Iterator[int]
    def __init__(
        self,
        model: str,
        *,
        dtype: str = ...,
        load_format: str = ...,
        skip_tokenizer_init: bool = ...,
        distributed_executor_backend: str = ...,
        tensor_parallel_size: int = ...,
        max_model_len: int = ...,
        max_num_seqs: int = ...,
        kv_cache_memory_bytes: int = ...,
        gpu_memory_utilization: float = ...,
        enforce_eager: bool = ...,
        enable_sleep_mode: bool = ...,
        enable_prefix_caching: bool = ...,
        logprobs_mode: str = ...,
        seed: int = ...,
        enable_lora: bool = ...,
        max_loras: int = ...,
        max_lora_rank: int = ...,
        lora_target_modules: list[str] | None = ...,
    ) -> None: ...
    def generate(
        self,
        prompts: Sequence[dict[str, list[int]]],
        sampling_params: Sequence[SamplingParams],
        *,
        use_tqdm: bool = ...,
        lora_request: LoRARequest | None = ...,
    ) -> list[RequestOutput]: ...
    def wait_for_completion(self, *, use_tqdm: bool = ...) -> list[RequestOutput]: ...
    def collective_rpc(self, method: Callable[[Any], R]) -> list[R]: ...
    def sleep(self, level: int = ...) -> None: ...
    def wake_up(self, tags: list[str] | None = ...) -> bool | None: ...
    def reset_prefix_cache(self) -> bool: ...
    def reset_mm_cache(self) -> None: ...
