"""Rows through a sharded model, in micro-batches that all ranks plan together.

Rows lie on the host. Each micro-batch is laid out there, in pinned memory, and goes to the device while the one before it is computed.
"""

import dataclasses as dc
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rft import tree
from rft.images import RowImages
from rft.ops.packing import unpack
from rft.parallel.batches import Layout
from rft.parallel.world import World
from rft.seeing import Eyes, eyes
from rft.trainers.backend import Asked, Root
from rft.trainers.inputs import Inputs, inputs
from rft.trainers.microbatches import Agreed, agree, share_of, some_rows, to_width

T = TypeVar("T")


@dc.dataclass(frozen=True, kw_only=True)
class Passes:
    """How rows go through one model."""

    world: World
    layout: Layout
    width: int
    """Of the hidden states."""
    vocab: int
    dtype: torch.dtype
    """That the model computes in."""
    budget: int
    """Tokens of one pass."""
    rough: bool
    """Whether the fused attention is far off here: see `attention`."""
    eyes: Eyes | None = None
    """How the model takes images; None: it takes none."""

    def agree(
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        demonstrated: Bool[Tensor, "batch"] | None = None,
        images: RowImages | None = None,
    ) -> Agreed:
        """Collective: this rank's micro-batches, and what all ranks' rows amount to. Raises `BadInput` on all ranks."""
        placeholder = None if self.eyes is None else self.eyes.placeholder
        own = share_of(tokens, mask, wanted, demonstrated, images, vocab=self.vocab, placeholder=placeholder)
        return agree(self.world, own, self.budget, width=self.width, layout=self.layout)

    def laid_out(
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: Float32[Tensor, "batch"],
        images: RowImages | None = None,
    ) -> Inputs:
        """What the model takes, on the host. `images` are those of the rows; None: the vision tower takes no part."""
        look = partial(self.eyes.see, images=images) if self.eyes and images is not None else None
        return inputs(tokens, mask, wanted, temperature, self.layout, look)

    def run(self, model: Asked, asked: Inputs, wanted: Bool[Tensor, "batch seq"]) -> tuple[Tensor, ...]:
        """One pass: the root's answers as `[batch, seq]`, 0 where nothing is wanted. All on the device."""
        return tuple(unpack(values, wanted) for values in model.forward(asked))

    def first(
        self,
        model: Asked,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: float,
        images: RowImages | None = None,
    ) -> Float32[Tensor, "batch seq"]:
        """The first of the root's answers for rows on the host: there again, without gradient. Collective."""
        agreed = self.agree(tokens, mask, wanted, images=images)
        result, heat = torch.zeros(tokens.shape), torch.full((len(tokens),), temperature)
        parts = ((rows, some_rows(tokens, mask, wanted, heat, rows)) for rows in agreed.batches)
        laid = ((self.laid_out(*part, agreed.shown(images, rows)), part[2]) for rows, part in parts)
        model.training(False)
        with torch.no_grad(), self.attention():
            for rows, (asked, marked) in zip(agreed.batches, self.ahead(laid), strict=True):
                result[list(rows)] = to_width(self.run(model, asked, marked)[0].cpu(), result.shape[1])[: len(rows)]
        model.after_passes()
        return result

    def ahead(self, parts: Iterable[T]) -> Iterator[T]:
        """Each of `parts`, trees of tensors on the host, on the device; on CUDA the next one is on its way while one is used."""
        if self.world.device.type != "cuda":
            yield from parts
            return
        stream, coming = torch.cuda.Stream(), None
        for part in parts:
            going, coming = coming, self._sent(part, stream)
            if going is not None:
                yield self._arrived(*going)
        if coming is not None:
            yield self._arrived(*coming)

    def _sent(self, part: T, stream: torch.cuda.Stream) -> tuple[T, torch.cuda.Event]:
        arrived = torch.cuda.Event()
        with torch.cuda.stream(stream):
            moved = tree.tree_map(self._send, part)
            arrived.record(stream)
        return moved, arrived

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.world.device, non_blocking=True)

    def _arrived(self, part: T, event: torch.cuda.Event) -> T:
        """The part, once the computing stream waits for it: its memory is not reused before that stream is done with it."""
        computing = torch.cuda.current_stream()
        computing.wait_event(event)
        for tensor in tree.tree_leaves(part):
            tensor.record_stream(computing)
        return part

    def attention(self) -> AbstractContextManager[object]:
        """On a CPU in bf16, the plain attention: the fused one's backward pass is far off.

        (The gradient of a model of 135M differed from that in fp32 by half, and by a tenth with the plain one, which is not slower
        on short rows.) Gradient checkpointing computes the forward pass again in the backward pass, so that belongs inside too.
        """
        return sdpa_kernel(SDPBackend.MATH) if self.rough else nullcontext()


@runtime_checkable
class Readable(Protocol):
    """A model whose hidden states others read."""

    name: str
    passes: Passes
    """How rows go through it."""

    def hidden(self, asked: Inputs) -> Float[Tensor, "wanted width"]:
        """The hidden states that predict the tokens asked for, no gradient. Collective. Raises `RoleError` where it is on the host."""
        ...

    def after_passes(self) -> None:
        """As of `Asked`."""
        ...


def passes(root: Root, world: World, *, dtype: str, budget: int) -> Passes:
    """Those of a root that computes in `dtype`, with at most `budget` tokens each. Before it is sharded."""
    return Passes(
        world=world,
        layout=root.layout,
        width=root.model.config.get_text_config().hidden_size,
        vocab=root.model.get_input_embeddings().num_embeddings,
        dtype=getattr(torch, dtype),
        budget=budget,
        rough=world.device.type == "cpu" and dtype != "float32",
        eyes=eyes(root.model),
    )
