"""A causal LM that answers with log-probs and entropies of the tokens asked for, and never makes the whole logits."""

import dataclasses as dc
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rft.errors import BadInput
from rft.images import Images
from rft.ops.scores import head_scores
from rft.parallel.batches import Layout
from rft.seeing import eyes
from rft.trainers import hugging_face, packed
from rft.trainers.inputs import Inputs, Look, inputs, predicting

TOLERANCE = 1e-3
"""In nats, in fp32: more than rounding makes of a deep model, and less than any other computation than ours would."""


class Scorer(nn.Module):
    """Holds a Hugging Face causal LM. What is sharded as a whole is this, so that the head is gathered where it is used."""

    def __init__(self, model: Any, layout: Layout = "padded") -> None:
        super().__init__()
        self.model = model
        self.layout: Layout = layout
        config = model.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = _scale(config)

    def forward(self, asked: Inputs) -> tuple[Tensor, ...]:
        """(log p, entropy) of the tokens asked for, `[wanted]`, in fp32: of softmax(logits / temperature), 0 meaning 1.

        Where no targets are given: the hidden states that predict them, `[wanted, width]`, in the dtype of computing.
        """
        states = predicting(self.model, asked)
        if asked.targets is None:
            return (states,)
        head = self.model.get_output_embeddings()
        heat = torch.where(asked.temperature == 0, 1.0, asked.temperature) / self._scale
        return head_scores(states, head.weight, asked.targets, heat, bias=head.bias, softcap=self._softcap)

    def borrowed(self) -> list[nn.Module]:
        """See `Root`."""
        return [self.model.get_output_embeddings()]

    def exact(self) -> list[nn.Module]:
        """See `Root`."""
        return []

    def named(self) -> dict[str, Tensor]:
        """See `Root`."""
        return hugging_face.named_tensors(self.model)


def scorer(model: Any) -> Scorer:
    """The scorer of a model that lies on the host: tried out on a few tokens, with packed rows where it can take them.

    Raises `BadInput` for a model whose logits are not what a scorer makes of its hidden states and head.
    """
    name = type(model).__name__
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise BadInput(f"{name} has no linear head (get_output_embeddings); this trainer computes log-probs from hidden states and head")
    made, text, shown = Scorer(model), _of_text(model), _with_images(model)
    if not _near(made, text):
        raise BadInput(f"{name} does more to its logits than head, scale and soft cap; this trainer cannot compute its log-probs")
    if shown is not None and not _near(made, shown):
        raise BadInput(f"{name} does more with images than to put their features in the places of tokens; it cannot be trained here")
    trials = [each for each in (text, shown) if each is not None]
    made.layout = packed.choose(model, lambda layout: all(_near(Scorer(model, layout), each) for each in trials))
    return made


def bare_scorer(model: Any, layout: Layout) -> Scorer:
    """A scorer in a layout that was found elsewhere; nothing is tried out."""
    if layout == "packed":
        packed.prepare(model)
    return Scorer(model, layout)


def _scale(config: Any) -> float:
    """What the configuration says that logits are multiplied by: Granite divides, Cohere and Falcon-H1 multiply."""
    factors = [getattr(config, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier")]
    return math.prod(factors) / (getattr(config, "logits_scaling", None) or 1.0)


@dc.dataclass(frozen=True)
class _Trial:
    """A few rows, and what a scorer is to give of them: by the model's own forward pass."""

    rows: tuple[Tensor, Tensor, Tensor, Tensor]
    look: Look | None
    expected: tuple[Tensor, Tensor]


def _near(made: Scorer, one: _Trial) -> bool:
    with torch.no_grad():
        got = made(inputs(*one.rows, made.layout, one.look))
    return all(torch.allclose(ours, theirs, atol=TOLERANCE, rtol=0) for ours, theirs in zip(got, one.expected, strict=True))


def _of_text(model: Any) -> _Trial:
    rows = trial(model)
    return _Trial(rows, None, _by_itself(model, rows, {}))


def _with_images(model: Any) -> _Trial | None:
    """The same rows with an image of two placeholders in the first; None for a model that takes none."""
    sight = eyes(model)
    if sight is None:
        return None
    tokens, *others = trial(model)
    mark, side = sight.placeholder, round(sight.placeholder.patches**0.5)
    tokens[tokens == mark.token] = mark.token - 1
    tokens[0, 1:3] = mark.token
    pixels = torch.arange(2 * mark.patches * mark.numbers).sin().view(-1, mark.numbers)
    image = Images(pixels=pixels, grids=torch.tensor([[1, side, 2 * side]]))
    own = {"pixel_values": image.pixels, "image_grid_thw": image.grids, "mm_token_type_ids": (tokens == mark.token).int()}
    rows = (tokens, others[0], others[1], others[2])
    return _Trial(rows, partial(sight.see, images=(image, None)), _by_itself(model, rows, own))


def _by_itself(model: Any, rows: tuple[Tensor, ...], images: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, by the model's own logits."""
    tokens, _, wanted, temperature = rows
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False, **images).logits.float()
    table = (logits / temperature[:, None, None]).log_softmax(dim=-1)[:, :-1]
    picked, entropy = table.gather(2, tokens[:, 1:, None]).squeeze(2), -(table.exp() * table).sum(dim=-1)
    return picked[wanted[:, 1:]], entropy[wanted[:, 1:]]


def trial(model: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two rows of five and three tokens, all but the first of each wanted, at temperature 0.7."""
    tokens = ((7 * torch.arange(10) + 3) % model.config.get_text_config().vocab_size).view(2, 5)
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    wanted = mask.clone()
    wanted[:, 0] = False
    return tokens, mask, wanted, torch.full((2,), 0.7)
