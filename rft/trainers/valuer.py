"""A causal LM without its head, and a value head in its place: what it answers is the value of the state before each token asked for."""

import dataclasses as dc
from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from rft.errors import BadInput
from rft.models import Kind, ModelFolder
from rft.parallel.batches import Layout
from rft.trainers import hugging_face, packed
from rft.trainers.inputs import Inputs, inputs, predicting
from rft.trainers.scorer import trial

HEAD = "score.weight"
"""The head's name in a checkpoint: that of sequence classifiers with one label, which may be where it comes from."""
TOLERANCE = 1e-3
"""Of hidden states in fp32, relative to the largest: as for log-probs."""


class ValueHead(nn.Module):
    """One linear function of the hidden states, without a bias, in fp32.

    It begins at 0: until it has learnt something every value is 0, and generalised advantages are what plain returns are, instead of
    those less a random function; and every rank begins with the same, whatever its random numbers are.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))

    def forward(self, hidden: Float[Tensor, "wanted width"]) -> Float32[Tensor, "wanted"]:
        """hidden · weight."""
        return hidden.float() @ self.weight.float()[0]


class Valuer(nn.Module):
    """Holds a Hugging Face model without a head, and the value head. Is sharded as a whole."""

    def __init__(self, model: Any, head: ValueHead, layout: Layout = "padded") -> None:
        super().__init__()
        self.model, self.head = model, head
        self.layout: Layout = layout

    def forward(self, asked: Inputs) -> tuple[Tensor]:
        """The values of what each token asked for was drawn in, `[wanted]`, in fp32."""
        return (self.head(predicting(self.model, asked)),)

    def named(self) -> dict[str, Tensor]:
        """See `Root`."""
        prefix = self.model.base_model_prefix
        named = {f"{prefix}.{name}": tensor for name, tensor in hugging_face.named_tensors(self.model).items()}
        return dict(sorted([*named.items(), (HEAD, self.head.weight)], key=lambda pair: not isinstance(pair[1], nn.Parameter)))

    def borrowed(self) -> list[nn.Module]:
        """See `Root`."""
        return []

    def exact(self) -> list[nn.Module]:
        """See `Root`: the head."""
        return [self.head]


def valuer(folder: ModelFolder, *, checkpointing: bool) -> Valuer:
    """That of a folder, whole and on the host, with packed rows where the model can take them.

    Of a causal LM the head is left out and the value head is new; of a sequence classifier with one label its head is the value head.
    Raises `BadInput` for what cannot be loaded, and for a classifier whose head gives no single number.
    """
    loaded = hugging_face.load(folder, checkpointing=checkpointing, kind=_kind(folder))
    model, head = loaded.base_model, ValueHead(loaded.config.get_text_config().hidden_size)
    if _kind(folder) != "CausalLM":
        _ = head.weight.data.copy_(_score(loaded, folder))
    expected = _states(model, "padded")
    layout = packed.choose(model, lambda layout: _near(_states(model, layout), expected))
    return Valuer(model, head, layout)


def bare_valuer(folder: ModelFolder, layout: Layout, *, checkpointing: bool) -> Valuer:
    """The same without memory for weights, in a layout that was found elsewhere."""
    model = hugging_face.empty(folder, checkpointing=checkpointing, kind=_kind(folder)).base_model
    if layout == "packed":
        packed.prepare(model)
    with torch.device("meta"):
        head = ValueHead(model.config.get_text_config().hidden_size)
    return Valuer(model, head, layout)


def _kind(folder: ModelFolder) -> Kind:
    """What the folder says that it holds."""
    names = " ".join(folder.config.architectures or [])
    kinds: tuple[Kind, ...] = ("SequenceClassification", "TokenClassification")
    for kind in kinds:
        if kind in names:
            return kind
    return "CausalLM"


def _score(classifier: Any, folder: ModelFolder) -> Tensor:
    head: Any = getattr(classifier, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1 or len(list(head.parameters())) > 1:
        raise BadInput(
            f"{folder.path} is a classifier, and a value head needs its head to be one linear function without a bias (`score`, one "
            f"label); it has {head}; take a sequence classifier with one label, or a causal language model"
        )
    return head.weight.detach()


def _states(model: Any, layout: Layout) -> Tensor:
    with torch.no_grad():
        return predicting(model, dc.replace(inputs(*trial(model), layout), targets=None))


def _near(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= TOLERANCE * float(other.abs().max())
