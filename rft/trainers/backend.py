"""How a model is sharded, differentiated and stepped: what FSDP2 and DeepSpeed do each in their own way.

What is computed, and of whom, is the same for both and stands beside: `passes` runs rows through a model, `learner` makes an optimizer step
of them, `actor` and `critic` say what a model is for.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rft.narrow import Narrows
from rft.parallel.batches import Layout
from rft.trainers.inputs import Inputs
from rft.trainers.protocol import Part, Saved
from rft.trainers.shelf import Shelf

Wanted = Callable[[str], bool]
"""Which of the named tensors."""


def every(name: str) -> bool:
    """All of them."""
    del name
    return True


class Root(Protocol):
    """What is sharded as a whole: a Hugging Face model, and what it is asked. A `torch.nn.Module`."""

    model: Any
    layout: Layout

    def __call__(self, asked: Inputs) -> tuple[Tensor, ...]:
        """Numbers of the tokens asked for, `[wanted]` each, in fp32."""
        ...

    def named(self) -> dict[str, Tensor]:
        """Every tensor that a checkpoint has, by the name that it has there, parameters first: tied ones once."""
        ...

    def borrowed(self) -> list[nn.Module]:
        """Modules whose weights are read outside of their own forward."""
        ...

    def exact(self) -> list[nn.Module]:
        """Modules that compute in fp32, whatever the dtype is."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """As of any module."""
        ...


class Asked(Protocol):
    """A sharded root that runs forward."""

    def forward(self, asked: Inputs) -> tuple[Tensor, ...]:
        """The root's answer. Collective."""
        ...

    def training(self, mode: bool) -> None:
        """Whether a backward pass follows."""
        ...

    def after_passes(self) -> None:
        """The passes of a step, or of log-probs, are over: nothing stays gathered."""
        ...


class Steps(Asked, Saved, Protocol):
    """What an optimizer moves, micro-batch by micro-batch."""

    name: str
    steps: int
    """Optimizer steps taken."""
    shelves: dict[Part, Shelf]
    """What lies on the device and can be moved away."""

    def before_micro_batch(self, *, last: bool) -> None:
        """Called before each micro-batch of a step."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Adds a micro-batch's gradient to the step's. The loss is this rank's part of a sum over ranks."""
        ...

    def update(self) -> dict[str, float]:
        """Clips, steps, and gives `grad_norm` and `lr`. Raises `NonFiniteGradient`, the weights untouched."""
        ...

    def forget(self) -> None:
        """Lets go of whatever gradient there is, after a step and after one that failed."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


class Backend(Steps, Protocol):
    """A sharded root with its optimizer."""

    root: Root
    managed: bool
    """Whether it keeps weights or moments on the host by itself, and brings them to the device when it needs them."""

    def shape_of(self, tensor: Tensor) -> torch.Size:
        """The whole shape of a tensor of `Root.named`, of which this rank holds a part."""
        ...

    def comes_in(self, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
        """In which dtype `whole`, asked for `dtype`, gives a tensor of `Root.named`: in that one where it is sent, and smaller then."""
        ...

    def whole(
        self, wanted: Wanted = every, dtype: torch.dtype | None = None, narrows: Sequence[Narrows] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """`Root.named` in full, gathered one bucket at a time, also while it is away. Collective: exhaust it on every rank.

        As exact as it is held, unless the reader says what it will cast it to: see `comes_in`; and in full, unless the readers of all
        ranks say what they want: see `Trainer.stream_weights`.
        """
        ...

    def masters(self, wanted: Wanted = every) -> Iterator[tuple[str, Tensor]]:
        """The same in fp32, where the optimizer's weights are more exact than those that compute."""
        ...
