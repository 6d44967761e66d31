"""Rollout engines, as `LaunchSpec` is given them."""

import dataclasses as dc
from typing import Any, Literal, Protocol

from rft.engines.protocol import AdapterEngine, Engine
from rft.errors import BadInput
from rft.models import ModelFolder
from rft.parallel.world import World
from rft.shapes import check_fields
from rft.spec.checks import at_least_one, check_heads, check_positions
from rft.spec.lora import LoRA

BLOCK = 16
"""Tokens of the smallest block of vLLM's cache."""
DType = Literal["bfloat16", "float32"]


class EngineSpec(Protocol):
    """Anything that builds an engine on this rank: one of those below, or your own.

    One that has `build_adapted(model, world, lora)`, too, can be sent an adapter alone (`LoRA(sync="adapter")`).
    """

    def build(self, model: ModelFolder, world: World) -> Engine:
        """The engine, awake, with the model's weights or none. Raises `MissingEngine` where it is not installed."""
        ...


@dc.dataclass(frozen=True, kw_only=True)
class TransformersEngine:
    """The embedded default: plain transformers with its own copy of the weights; nothing to install."""

    dtype: DType = "bfloat16"
    """Of the engine's copy of the weights."""
    max_model_len: int = 2048
    """Longest prompt and response together, in tokens."""
    max_rows: int = 64
    """Sequences decoded together."""

    def __post_init__(self) -> None:
        check_fields(self)
        at_least_one(self, "max_model_len", "max_rows")

    def check(self, config: Any, tensor_parallel: int) -> None:
        """Raises `BadInput` as `check_alone` does, and for rows longer than the model's."""
        self.check_alone(tensor_parallel)
        check_positions(self, config)

    def check_alone(self, tensor_parallel: int) -> None:
        """Raises `BadInput` for TP: this engine holds the whole model on every rank."""
        if tensor_parallel > 1:
            raise BadInput(
                f"the transformers engine holds the whole model on every rank, so tensor_parallel={tensor_parallel} cannot work: "
                "set tensor_parallel=1, or use VLLMEngine"
            )

    def build(self, model: ModelFolder, world: World) -> Engine:
        """Builds it. Raises as `check` does."""
        from rft.engines.transformers import build

        return build(self, model, world)

    def build_adapted(self, model: ModelFolder, world: World, lora: LoRA) -> AdapterEngine:
        """The same with a place for an adapter, which peft adds to the model's layers."""
        from rft.engines.transformers_lora import build

        return build(self, model, world, lora)


@dc.dataclass(frozen=True, kw_only=True)
class VLLMEngine:
    """vLLM in the process of its rank, on a CPU or a CUDA device."""

    dtype: DType = "bfloat16"
    """Of the engine's copy of the weights."""
    max_model_len: int = 2048
    """Longest prompt and response together, in tokens."""
    max_rows: int = 256
    """Sequences decoded together."""
    cache_bytes: int = 1 << 30
    """The KV cache on each rank: pinned, never profiled, since the device is shared with the Actor."""
    eager: bool = False
    """Run without CUDA graphs and compilation: a quicker start, slower decoding. (A CPU always does.)"""

    def __post_init__(self) -> None:
        check_fields(self)
        at_least_one(self, "max_model_len", "max_rows", "cache_bytes")

    def check(self, config: Any, tensor_parallel: int) -> None:
        """Raises `BadInput` where TP does not divide the model's heads, or can neither share nor repeat those of keys and values; for rows
        longer than the model's; and for a cache that does not hold one of them."""
        shared = check_heads(config, tensor_parallel)
        check_positions(self, config)
        self._check_cache(config, -(-shared // tensor_parallel))

    def _check_cache(self, config: Any, shared: int) -> None:
        """vLLM wants blocks for one row of full length in every layer that attends to all of it; of other layers nothing is known here."""
        kinds: list[str] | None = getattr(config, "layer_types", None)
        layers = int(config.num_hidden_layers) if kinds is None else kinds.count("full_attention")
        if getattr(config, "kv_lora_rank", None) is not None or (kinds is None and getattr(config, "sliding_window", None) is not None):
            return
        width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        number = 2 if self.dtype == "bfloat16" else 4
        least = -(-self.max_model_len // BLOCK) * BLOCK * layers * 2 * shared * width * number
        if self.cache_bytes < least:
            raise BadInput(
                f"cache_bytes={self.cache_bytes} has too few blocks for one row of max_model_len={self.max_model_len}, which takes "
                f"{least}; make it larger, or max_model_len smaller"
            )

    def build(self, model: ModelFolder, world: World) -> Engine:
        """Builds it. Raises `MissingEngine` with the line that installs vLLM, and as `check` does."""
        from rft.engines.vllm import build

        return build(self, model, world)

    def build_adapted(self, model: ModelFolder, world: World, lora: LoRA) -> AdapterEngine:
        """The same with a place for an adapter. Raises `BadInput` for layers or a rank that vLLM has no adapters for."""
        from rft.engines.vllm_lora import build

        return build(self, model, world, lora)


@dc.dataclass(frozen=True, kw_only=True)
class SGLangEngine:
    """SGLang in processes of its own, on a CPU or on CUDA devices; one engine for each TP group."""

    dtype: DType = "bfloat16"
    """Of the engine's copy of the weights."""
    max_model_len: int = 2048
    """Longest prompt and response together, in tokens."""
    max_rows: int = 256
    """Sequences decoded together."""
    cache_bytes: int = 1 << 30
    """The KV cache on each rank: pinned, never profiled, since the device is shared with the Actor."""
    eager: bool = False
    """Run without CUDA graphs: a quicker start, slower decoding. (A CPU always does.)"""
    attention: str | None = None
    """SGLang's `attention_backend`; None: its own choice. "triton" needs nothing beside SGLang itself."""
    bucket_bytes: int = 2 << 30
    """What new weights go through, on each rank's device; a tensor that is larger makes it so."""
    start_timeout_s: float = 600.0
    """How long it may take to start."""

    def __post_init__(self) -> None:
        check_fields(self)
        at_least_one(self, "max_model_len", "max_rows", "cache_bytes", "bucket_bytes")
        if self.start_timeout_s <= 0:
            raise BadInput(f"start_timeout_s must be above 0, got {self.start_timeout_s}")

    def check(self, config: Any, tensor_parallel: int) -> None:
        """Raises `BadInput` where TP does not divide the model's heads, for rows longer than the model's, for a cache whose size is not
        known here, and for one that does not hold one row."""
        from rft.engines.sglang_options import check_cache

        _ = check_heads(config, tensor_parallel)
        check_positions(self, config)
        check_cache(self, config, tensor_parallel)

    def build(self, model: ModelFolder, world: World) -> Engine:
        """Builds it. Raises `MissingEngine` with the line that installs SGLang, and as `check` does."""
        from rft.engines.sglang import build

        return build(self, model, world)
