"""What a rollout engine holds on the device."""

import dataclasses as dc
from typing import Any

from rft.errors import BadInput
from rft.memory.activations import Pass, activations
from rft.memory.outline import Blueprint, outline
from rft.memory.sharding import itemsize
from rft.spec import DType, EngineSpec, SGLangEngine, TransformersEngine, VLLMEngine

VLLM_LIBRARIES = 2330 << 20
"""What vLLM's kernels and libraries take of the card outside of every allocator, asleep or awake: as measured on an H200 with a 0.5B and
a 7B model, with CUDA graphs and (less exactly) without."""
VLLM_BUFFERS, VLLM_GRAPHS = 256 << 20, 64 << 20
"""Its buffers, and its CUDA graphs, which share their memory: what was measured of both together is split by guess."""
MAPPED = 300 << 20
"""What mapping weights and cache takes beside them, since every piece begins on a page of its own."""
SAMPLER = 5
"""Tensors of [row, vocab] in fp32 that sampling with log-probs has at once."""
PROFILED_TOKENS = 16384
"""Tokens that vLLM computes together at most, by its own default on a card of the H200's size."""

SGLANG_PROCESS, SGLANG_GRAPHS = 1050 << 20, 300 << 20
"""What SGLang's process takes of the card, asleep or awake, and its buffers and graphs, which sleep with its cache: as measured on an H200
with a 0.5B."""
SGLANG_PREFILL = 8192
"""Tokens that SGLang computes together at most, by its own default on a card of the H200's size."""


@dc.dataclass(frozen=True, kw_only=True)
class EngineHolds:
    """Bytes of this rank."""

    dtype: DType
    """Of its weights."""
    weights: int
    cache: int
    graphs: int
    """CUDA graphs and buffers, for good, asleep or awake."""
    libraries: int
    """Outside of every allocator, for good."""
    mapped: int
    """Beside weights and cache, while they are mapped."""
    generating: int
    """While it generates."""
    keeps: str | None
    """Where a sleep that keeps the weights leaves them."""
    bucket: int = 0
    """What new weights go through, beside what gathers them."""


def engine_holds(spec: EngineSpec, of: Blueprint, tensor_parallel: int, *, rows: int, longest_prompt: int, longest: int) -> EngineHolds:
    """`rows` responses to prompts of at most `longest_prompt` tokens, each at most `longest` with its prompt.

    Raises `BadInput` for an engine that is none of ours, and for what it would refuse: at launch, or rows that are too long for it.
    """
    if isinstance(spec, VLLMEngine | SGLangEngine | TransformersEngine):
        spec.check(of.config.get_text_config(), tensor_parallel)
        if longest > spec.max_model_len:
            both = f"longest_prompt and longest_response are {longest} tokens together"
            raise BadInput(f"{both}, more than the engine's max_model_len={spec.max_model_len}")
    if isinstance(spec, VLLMEngine):
        return _vllm(spec, of, tensor_parallel)
    if isinstance(spec, SGLangEngine):
        return _sglang(spec, of, tensor_parallel)
    if isinstance(spec, TransformersEngine):
        return _transformers(spec, of, rows=min(rows, spec.max_rows), longest_prompt=longest_prompt, longest=longest)
    raise BadInput(f"memory can be planned for VLLMEngine, SGLangEngine and TransformersEngine, not for {type(spec).__name__}")


def _vllm(spec: VLLMEngine, of: Blueprint, tensor_parallel: int) -> EngineHolds:
    own, config = itemsize(spec.dtype), of.config.get_text_config()
    widest = 3 * config.intermediate_size + 2 * config.hidden_size
    prefill = PROFILED_TOKENS * own * widest // tensor_parallel
    buffers = VLLM_BUFFERS + PROFILED_TOKENS * own * int(config.hidden_size)
    return EngineHolds(
        dtype=spec.dtype,
        weights=own * sum(_part(shape, tensor_parallel) for shape in outline(of).shapes),
        cache=spec.cache_bytes,
        graphs=buffers + (0 if spec.eager else VLLM_GRAPHS),
        libraries=VLLM_LIBRARIES,
        mapped=MAPPED,
        generating=max(prefill, SAMPLER * 4 * spec.max_rows * int(config.vocab_size)),
        keeps="host",
    )


def _sglang(spec: SGLangEngine, of: Blueprint, tensor_parallel: int) -> EngineHolds:
    own, config = itemsize(spec.dtype), of.config.get_text_config()
    shapes = outline(of).shapes
    prefill = SGLANG_PREFILL * own * (3 * config.intermediate_size + 2 * config.hidden_size) // tensor_parallel
    return EngineHolds(
        dtype=spec.dtype,
        weights=own * sum(_part(shape, tensor_parallel) for shape in shapes),
        cache=spec.cache_bytes,
        graphs=0,
        libraries=SGLANG_PROCESS,
        mapped=MAPPED,
        generating=(0 if spec.eager else SGLANG_GRAPHS) + max(prefill, SAMPLER * 4 * spec.max_rows * int(config.vocab_size)),
        keeps="device",
        bucket=max(own * max(shape.numel() for shape in shapes), min(spec.bucket_bytes, own * sum(shape.numel() for shape in shapes))),
    )


def _part(shape: Any, tensor_parallel: int) -> int:
    """Matrices are cut, vectors are not (those of fused biases are small)."""
    return shape.numel() // tensor_parallel if len(shape) > 1 else shape.numel()


def _transformers(spec: TransformersEngine, of: Blueprint, *, rows: int, longest_prompt: int, longest: int) -> EngineHolds:
    own, config = itemsize(spec.dtype), of.config.get_text_config()
    heads = int(config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    layer = 2 * rows * longest * int(config.num_key_value_heads) * width * own
    # A layer's cache is made anew, one token longer, and its heads are repeated for the attention.
    growing = layer + layer * heads // int(config.num_key_value_heads)
    prompts = Pass(tokens=rows * longest_prompt, wanted=1, longest=longest_prompt, dtype=spec.dtype)
    sampling = SAMPLER * 4 * rows * int(config.vocab_size)
    return EngineHolds(
        dtype=spec.dtype,
        weights=own * outline(of).parameters,
        cache=layer * int(config.num_hidden_layers),
        graphs=0,
        libraries=0,
        mapped=0,
        generating=max(activations(of, prompts).scoring, growing + sampling),
        keeps="device",
    )
