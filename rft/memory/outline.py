"""What a model is made of, by its configuration alone: it is built on the meta device, where tensors have shapes and no memory."""

import dataclasses as dc
import functools
from typing import Any, Literal

import torch

from rft.errors import BadInput
from rft.models import attention_of
from rft.trainers.hugging_face import blocks

Head = Literal["language", "value", "reward"]
"""What stands on the decoder: the vocabulary's logits, one value for each token, or one number for each row."""


@dc.dataclass(frozen=True)
class Outline:
    """Shapes of every parameter, tied ones once, in the model's order; and how many elements are where."""

    shapes: tuple[torch.Size, ...]
    blocks: tuple[int, ...]
    """Parameters of each block."""

    @property
    def parameters(self) -> int:
        """All of them."""
        return sum(shape.numel() for shape in self.shapes)

    @property
    def largest_block(self) -> int:
        """Parameters of the largest block."""
        return max(self.blocks)

    @property
    def outside(self) -> int:
        """Parameters outside of all blocks: embeddings, the last norm, the head."""
        return self.parameters - sum(self.blocks)

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest parameter."""
        return max(shape.numel() for shape in self.shapes)


@dc.dataclass(frozen=True)
class Blueprint:
    """A configuration and the head that stands on it. Two with the same text are the same, so that what follows from them is kept."""

    text: str
    head: Head
    config: Any = dc.field(compare=False, repr=False)


def blueprint(config: Any, head: Head = "language") -> Blueprint:
    """Of a transformers configuration."""
    return Blueprint(f"{type(config).__name__} {config.to_json_string(use_diff=False)}", head, config)


def read_config(model: str) -> Any:
    """The configuration of a model folder or hub id; no other file is read. Raises `BadInput`."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{model!r} is neither a folder with a config.json nor a model that the hub gives: {error}") from error


@functools.lru_cache(maxsize=32)
def outline(of: Blueprint) -> Outline:
    """The shapes of a model's parameters. Raises `BadInput` for a model that cannot be built or does not say what its blocks are."""
    model = on_meta(of, torch.float32)
    each = tuple(sum(p.numel() for p in block.parameters()) for block in blocks(model))
    return Outline(tuple(p.shape for p in model.parameters()), each)


def on_meta(of: Blueprint, dtype: torch.dtype) -> Any:
    """The model without memory, in `dtype`."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

    kinds: dict[Head, Any] = {
        "language": AutoModelForCausalLM,
        "value": AutoModelForTokenClassification,
        "reward": AutoModelForSequenceClassification,
    }
    labels = {} if of.head == "language" else {"num_labels": 1}
    try:
        # Initial weights are drawn on the meta device too; the generator of this process is not to move.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return kinds[of.head].from_config(_copy(of.config, **labels), dtype=dtype, attn_implementation=attention_of(of.config))
    except (ValueError, KeyError, AttributeError) as error:
        raise BadInput(f"a {of.head} model cannot be made of {type(of.config).__name__}: {error}") from error


def _copy(config: Any, **changes: Any) -> Any:
    copied = type(config).from_dict(config.to_dict())
    for name, value in changes.items():
        setattr(copied, name, value)
    return copied
