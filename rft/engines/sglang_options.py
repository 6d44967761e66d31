"""What SGLang is started with, from a specification, a model and this rank's place. What cannot work is refused here."""

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from rft.engines.requests import end_tokens
from rft.engines.sglang_sampler import NAME
from rft.engines.sglang_setup import CPU_PLATFORM
from rft.engines.sglang_worker import LOADER
from rft.errors import BadInput, MissingEngine
from rft.models import ModelFolder
from rft.parallel.world import World
from rft.spec import SGLangEngine

SLACK = 8
"""Tokens of SGLang's context beyond the longest sequence: it keeps some back for itself, and would cut responses short."""
PAGE = 64
"""Tokens of the cache that are SGLang's own, for what is not to be written anywhere: a page, where its attention has some."""


def check(spec: SGLangEngine, model: ModelFolder, world: World) -> None:
    """Raises `MissingEngine` where SGLang is not installed, and `BadInput` for what it cannot do. Nothing has been started then."""
    if find_spec("sglang") is None:
        raise MissingEngine("SGLang is not installed: pip install 'rft-runtime[sglang]'")
    if not getattr(model.config, "architectures", None):
        raise BadInput(
            f"{model.path / 'config.json'} has no architectures, by which SGLang knows a model: save it by the model's save_pretrained"
        )
    if model.config.get_text_config() is not model.config:
        raise BadInput(
            f"SGLangEngine takes models of text alone, and {model.path} is of more than text ({type(model.config).__name__}): "
            "write LaunchSpec(engine=TransformersEngine(…) or VLLMEngine(…))"
        )
    spec.check(model.config, world.tp_size)
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if world.device.type == "cuda" and "expandable_segments:true" in allocator.lower():
        raise BadInput(
            "SGLang takes weights by CUDA IPC, which expandable segments stand against: take expandable_segments out of "
            "PYTORCH_CUDA_ALLOC_CONF"
        )


def check_cache(spec: SGLangEngine, config: Any, tensor_parallel: int) -> None:
    """Raises `BadInput` for a cache whose size is not known here, and for one that does not hold one row."""
    if getattr(config, "kv_lora_rank", None) is not None:
        raise BadInput("SGLangEngine pins the size of the cache, and knows that of plain attention alone; this model compresses its cache")
    least = bytes_per_token(spec, config, tensor_parallel) * (spec.max_model_len + SLACK + PAGE)
    if spec.cache_bytes < least:
        raise BadInput(f"cache_bytes={spec.cache_bytes} does not hold one sequence of max_model_len={spec.max_model_len}: it needs {least}")


def bytes_per_token(spec: SGLangEngine, config: Any, tensor_parallel: int) -> int:
    """What a token takes of the cache on one rank; heads that are fewer than the ranks are on several of them."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = max(int(config.num_key_value_heads) // tensor_parallel, 1)
    return 2 * int(config.num_hidden_layers) * heads * int(width) * (2 if spec.dtype == "bfloat16" else 4)


def settings(spec: SGLangEngine, model: ModelFolder, world: World, addresses: Sequence[str]) -> Mapping[str, Any]:
    """For the process of the engine. `addresses` are where each TP rank finds its rank of the job."""
    return {"options": _options(spec, model, world), "environment": _environment(world), "addresses": list(addresses)}


def _options(spec: SGLangEngine, model: ModelFolder, world: World) -> dict[str, Any]:
    cpu = world.device.type == "cpu"
    return {
        "model_path": str(model.path),
        "dtype": spec.dtype,
        "device": world.device.type,
        "base_gpu_id": world.device.index or 0,
        "tp_size": world.tp_size,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "context_length": spec.max_model_len + SLACK,
        "max_running_requests": spec.max_rows,
        "max_total_tokens": spec.cache_bytes // bytes_per_token(spec, model.config, world.tp_size) - PAGE,
        "disable_cuda_graph": spec.eager or cpu,
        # Graphs of prompts are kept where the memory saver cannot let them go; those of decoding, which are what matters, it can.
        **({} if cpu else {"cuda_graph_backend_prefill": "disabled"}),
        "enable_memory_saver": not cpu,
        "custom_weight_loader": [LOADER],
        "sampling_backend": NAME,
        "grammar_backend": "none",
        "skip_server_warmup": True,
        # All ids that end a response, and no others: SGLang would add what the configuration has to them.
        "json_model_override_args": json.dumps({"eos_token_id": list(end_tokens(model))}),
        "sleep_on_idle": True,  # it would keep a core busy else, which the trainer may need
        "random_seed": 0,
        "log_level": "error",
        # The cache is pinned by its size; this is only compared with what is free at the start.
        **({} if cpu else {"mem_fraction_static": 0.9}),
        **({} if spec.attention is None else {"attention_backend": spec.attention}),
    }


def _environment(world: World) -> dict[str, str]:
    common = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if world.device.type == "cuda":
        # The ranks' devices may be filled differently, by what else the job has there; the cache is pinned, and fits or does not.
        return common | {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[rank % len(cores)]) for rank in range(world.tp_size))
    return common | {"SGLANG_PLATFORM": CPU_PLATFORM, **({"SGLANG_CPU_OMP_THREADS_BIND": bound} if world.tp_size > 1 else {})}
