"""What a rollout engine holds on the device."""

import dataclasses as dc
from typing import Any

from rft.errors import BadInput
from rft.memory.activations import Pass, activations
from rft.memory.outline import Blueprint, outline
from rft.memory.sharding import itemsize
from rft.spec import EngineSpec, TransformersEngine, VLLMEngine

CAPTURED_SIZES = 51
"""Batch sizes that vLLM captures a CUDA graph for, at its default of up to 512 rows."""
GRAPH_BASE, GRAPH_LAYER = 200 << 20, 6 << 20
"""What all of them take, and each layer of the model; see the benchmarks for what was measured."""
SAMPLER = 5
"""Tensors of [row, vocab] in fp32 that sampling with log-probs has at once."""
PROFILED_TOKENS = 16384
"""Tokens of the pass that vLLM tries itself on at its start, on a card of the H200's size."""


@dc.dataclass(frozen=True, kw_only=True)
class EngineHolds:
    """Bytes of this rank."""

    weights: int
    cache: int
    graphs: int
    """For good, asleep or awake."""
    generating: int
    """While it generates."""
    keeps: str | None
    """Where a sleep that keeps the weights leaves them."""


def engine_holds(spec: EngineSpec, of: Blueprint, tensor_parallel: int, *, rows: int, longest_prompt: int, longest: int) -> EngineHolds:
    """`rows` responses to prompts of at most `longest_prompt` tokens, each at most `longest` with its prompt.

    Raises `BadInput` for an engine that is none of ours.
    """
    if isinstance(spec, VLLMEngine):
        return _vllm(spec, of, tensor_parallel)
    if isinstance(spec, TransformersEngine):
        return _transformers(spec, of, rows=min(rows, spec.max_rows), longest_prompt=longest_prompt, longest=longest)
    raise BadInput(f"memory can be planned for VLLMEngine and TransformersEngine, not for {type(spec).__name__}")


def _vllm(spec: VLLMEngine, of: Blueprint, tensor_parallel: int) -> EngineHolds:
    own, config = itemsize(spec.dtype), of.config.get_text_config()
    widest = 2 * config.intermediate_size + config.intermediate_size + 2 * config.hidden_size
    activations_of_profile = PROFILED_TOKENS * own * widest // tensor_parallel
    return EngineHolds(
        weights=own * sum(_vllm_part(shape, tensor_parallel) for shape in outline(of).shapes),
        cache=spec.cache_bytes,
        graphs=0 if spec.eager else GRAPH_BASE + GRAPH_LAYER * int(config.num_hidden_layers),
        generating=max(activations_of_profile, SAMPLER * 4 * spec.max_rows * int(config.vocab_size)),
        keeps="host",
    )


def _vllm_part(shape: Any, tensor_parallel: int) -> int:
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
        weights=own * outline(of).parameters,
        cache=layer * int(config.num_hidden_layers),
        graphs=0,
        generating=max(activations(of, prompts).scoring, growing + sampling),
        keeps="device",
    )
