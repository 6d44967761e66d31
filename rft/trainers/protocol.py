"""What the models of a run can do beside the engine: the Actor, the Critic, frozen ones. A few verbs, the same for every backend.

Every verb is collective: all ranks of the training group call it together. A backend knows nothing of states and legality.
"""

import dataclasses as dc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from rft.experience import Minibatch, Rollouts
from rft.images import RowImages
from rft.narrow import Narrows
from rft.objectives import Objective, ValueObjective

Part = Literal["model", "optimizer"]
"""What is moved on its own: the sharded weights (fp32 masters, in the trainer), or the optimizer's moments."""


@dc.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One named tensor of the model as it is streamed: its full shape, and the dtype that it comes in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Saved(Protocol):
    """What a run goes on from, for checkpoints: named tensors that do not depend on backend and number of ranks."""

    def saved(self) -> dict[str, Tensor]:
        """A copy on the host: DTensors cut along dimension 0 over all ranks, and plain tensors that every rank holds alike.

        Raises `RoleError`, on all ranks, where a part must be on the device for it and is not.
        """
        ...

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes back what `saved` gave, maybe to another trainer on another number of ranks: same names, shapes and kinds."""
        ...


class Movable(Protocol):
    """What is moved between host and device as a whole."""

    def offload(self) -> None:
        """Moves it to the host and gives its device memory back to the driver; on a CPU it empties the storage."""
        ...

    def reload(self) -> None:
        """Moves it back to the device, bit-identical."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes that it takes on this rank's device when it is there."""
        ...


class Frozen(Movable, Saved, Protocol):
    """A model of the Actor's architecture that no optimizer trains: the Reference, or an average of the Actor."""

    def logprobs(
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: float,
        images: RowImages | None = None,
    ) -> Float32[Tensor, "batch seq"]:
        """As `Trainer.logprobs`."""
        ...

    def mix(self, weights: Iterator[tuple[str, Tensor]], share: float) -> None:
        """weights here <- (1 - share) weights here + share · given; `given` is what `Trainer.stream_weights` gives. On the device."""
        ...

    def export(self, path: Path) -> None:
        """As `Trainer.export`."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


class Judge(Movable, Protocol):
    """A local reward model."""

    def scores(self, rollouts: Rollouts) -> Float32[Tensor, "batch"]:
        """One number for each row, on the host, no gradient; NaN for one that the model cannot read. Ranks may bring different numbers."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


class Critic(Saved, Protocol):
    """A value head with its optimizer, on a model of its own or on what the Actor makes of a row."""

    name: str

    def values(
        self, tokens: Int64[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], wanted: Bool[Tensor, "batch seq"]
    ) -> Float32[Tensor, "batch seq"]:
        """V(tokens before t) at each wanted token t, in fp32, no gradient; 0 elsewhere. On the host. Rows as in `Trainer.logprobs`."""
        ...

    def step(self, batch: Minibatch, objective: ValueObjective) -> dict[str, float]:
        """One optimizer step over the global batch; returns as `Trainer.step` does."""
        ...

    def offload(self, part: Part) -> None:
        """As `Trainer.offload`."""
        ...

    def reload(self, part: Part) -> None:
        """As `Trainer.reload`."""
        ...

    def bytes(self, part: Part) -> int:
        """As `Trainer.bytes`."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


class Trainer(Saved, Protocol):
    """The sharded Actor with its optimizer."""

    name: str
    dtype: torch.dtype
    """That it computes in."""
    managed: bool
    """Whether the backend keeps weights or moments on the host by itself, and brings them to the device when it needs them."""

    def manifest(self, dtype: torch.dtype | None = None) -> tuple[TensorSpec, ...]:
        """Every tensor that `stream_weights` gives, asked for the same dtype, in its order: parameters, and the persistent buffers
        that checkpoints have."""
        ...

    def stream_weights(self, dtype: torch.dtype | None = None, narrows: Sequence[Narrows] = ()) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their Hugging Face names, gathered one bucket at a time. Whoever holds one holds its memory, too.

        `narrows` says of every rank, in rank order and the same on each of them, what is wanted of a tensor there instead: no rank is
        then sent what it does not want, as far as the backend's layout allows.

        They come as exact as the trainer holds them. `dtype` says that the reader will cast them to it: what has to be sent from rank
        to rank may then be cast before, for fewer bytes, and comes with the bits that a cast afterwards would give.
        Works on an offloaded model too. Tied tensors come once, under the name that the checkpoint has. Contains collectives:
        exhaust it on every rank.
        """
        ...

    def logprobs(
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: float,
        images: RowImages | None = None,
    ) -> Float32[Tensor, "batch seq"]:
        """log p(token t | before t) of the wanted tokens, in fp32 from logits / temperature, no gradient; 0 elsewhere. On the host.

        `mask` marks the tokens of each row, from column 0 on; `wanted` some of them, but none at column 0, which nothing predicts.
        `images` are those of each row, whose placeholders are among its tokens; a model of text alone refuses any.
        Ranks may bring different numbers of rows and lengths; the micro-batches are planned together.
        """
        ...

    def step(self, batch: Minibatch, old: Float32[Tensor, "batch seq"] | None, objective: Objective) -> dict[str, float]:
        """One optimizer step over the global batch: this rank's rows and those of all others.

        Returns the objective's metrics of the whole batch (summed, or merged as each of them knows), and `loss`, `grad_norm` (before
        the clip), `lr`.
        """
        ...

    def offload(self, part: Part) -> None:
        """Moves a part to the host and gives its device memory back to the driver; on a CPU it empties the storage."""
        ...

    def reload(self, part: Part) -> None:
        """Moves a part back to the device, bit-identical."""
        ...

    def bytes(self, part: Part) -> int:
        """Bytes that a part takes on this rank's device when it is there."""
        ...

    def export(self, path: Path) -> None:
        """Writes the model as an ordinary Hugging Face folder, gathered; rank 0 writes."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


@dc.dataclass(frozen=True, kw_only=True)
class Sending:
    """Named, full tensors on their way: what is promised, and the stream of it. It contains collectives: exhaust it on every rank."""

    manifest: tuple[TensorSpec, ...]
    tensors: Iterator[tuple[str, Tensor]]


@runtime_checkable
class Adapted(Protocol):
    """What a trainer with LoRA does beside `Trainer`. Its `stream_weights` and `export` give the model with the adapter added to it."""

    base_fingerprint: int
    """A number that another base model does not have."""

    def base_logprobs(
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: float,
        images: RowImages | None = None,
    ) -> Float32[Tensor, "batch seq"]:
        """As `Trainer.logprobs`, of the base model: the adapter takes no part."""
        ...

    def base(self, dtype: torch.dtype | None = None) -> Sending:
        """The base model, under its Hugging Face names, as `Trainer.stream_weights` gives a model. It never changes."""
        ...

    def adapter(self) -> Sending:
        """`<layer>.lora_A.weight` and `<layer>.lora_B.weight` of each layer, in fp32: the layer's weight is W + B A (B is scaled)."""
        ...

    def export_adapter(self, path: Path) -> None:
        """Writes the adapter as a peft folder, which `LoRA.adapter` takes too; rank 0 writes."""
        ...
