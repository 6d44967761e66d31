"""What a model is made of, by its configuration alone: it is built on the meta device, where tensors have shapes and no memory."""

import dataclasses as dc
import functools
from typing import Any, Literal

import torch
from torch import nn

from rft.errors import BadInput
from rft.images import placeholder_of
from rft.models import attention_of
from rft.spec import LoRA
from rft.trainers import adapter
from rft.trainers.hugging_face import blocks

Head = Literal["language", "value", "reward"]
"""What stands on the decoder: the vocabulary's logits, one value for each token, or one number for each row."""


@dc.dataclass(frozen=True)
class Outline:
    """Shapes of every parameter, tied ones once, in the model's order; and how many elements are where. An adapter's are apart."""

    shapes: tuple[torch.Size, ...]
    blocks: tuple[int, ...]
    """Parameters of each block."""
    adapter: tuple[torch.Size, ...] = ()
    """Of an adapted model's A and B, which are all that is trained."""
    adapter_blocks: tuple[int, ...] = ()
    """Parameters of the adapter in each block."""
    exact: tuple[torch.Size, ...] = ()
    """Those that stay in fp32 where a model is held in less: a head of one number."""

    @property
    def parameters(self) -> int:
        """All but an adapter's."""
        return sum(shape.numel() for shape in self.shapes)

    @property
    def trained(self) -> "Outline":
        """What has masters, moments and gradients: the adapter if there is one, else all."""
        return Outline(self.adapter, self.adapter_blocks) if self.adapter else self

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
    lora: LoRA | None
    config: Any = dc.field(compare=False, repr=False)


def blueprint(config: Any, head: Head = "language", lora: LoRA | None = None) -> Blueprint:
    """Of a transformers configuration, adapted or not."""
    return Blueprint(f"{type(config).__name__} {config.to_json_string(use_diff=False)}", head, lora, config)


def read_config(model: str) -> Any:
    """The configuration of a model folder or hub id; no other file is read. Raises `BadInput`, also for a model that takes images."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{model!r} is neither a folder with a config.json nor a model that the hub gives: {error}") from error
    if placeholder_of(config) is not None:
        raise BadInput(f"{model!r} is a {type(config).__name__}, which takes images: what its vision tower takes cannot be planned yet")
    return config


@functools.lru_cache(maxsize=32)
def outline(of: Blueprint) -> Outline:
    """The shapes of a model's parameters. Raises `BadInput` for a model that cannot be built or does not say what its blocks are."""
    model = on_meta(of, torch.float32)
    added = {id(p) for p in model.parameters() if p.requires_grad} if of.lora is not None else set[int]()
    parts = [list(block.parameters()) for block in blocks(model)]
    return Outline(
        shapes=tuple(p.shape for p in model.parameters() if id(p) not in added),
        blocks=tuple(sum(p.numel() for p in part if id(p) not in added) for part in parts),
        adapter=tuple(p.shape for p in model.parameters() if id(p) in added),
        adapter_blocks=tuple(sum(p.numel() for p in part if id(p) in added) for part in parts) if added else (),
        exact=() if of.head == "language" else tuple(p.shape for p in head_of(model).parameters()),
    )


def on_meta(of: Blueprint, dtype: torch.dtype) -> Any:
    """The model without memory, in `dtype`."""
    import transformers

    of_rewards = "TokenClassification" if "TokenClassification" in str(of.config.architectures) else "SequenceClassification"
    kind: Any = getattr(transformers, f"AutoModelFor{of_rewards if of.head == 'reward' else 'CausalLM'}")
    copied = type(of.config).from_dict(of.config.to_dict())
    if of.head == "reward":
        copied.num_labels = 1
    try:
        # Initial weights are drawn on the meta device too; the generator of this process is not to move.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model: Any = kind.from_config(copied, dtype=dtype, attn_implementation=attention_of(copied))
    except (ValueError, KeyError, AttributeError) as error:
        raise BadInput(f"a {of.head} model cannot be made of {type(of.config).__name__}: {error}") from error
    if of.lora is not None:
        _adapt(model, of.lora, dtype)
    if of.head != "value":
        return model
    body = model.base_model
    body.score = nn.Linear(copied.get_text_config().hidden_size, 1, bias=False, device="meta")
    return body


def _adapt(model: Any, lora: LoRA, dtype: torch.dtype) -> None:
    names = adapter.layers(model, lora.targets)
    shapes = adapter.shapes(model, names, lora.rank)
    adapter.put_into(model, names, lora, lambda name: torch.empty(shapes[name], dtype=dtype, device="meta"))


def head_of(model: Any) -> Any:
    """The head of one number."""
    return model.score if hasattr(model, "score") else model.classifier
