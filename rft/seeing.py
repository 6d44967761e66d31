"""Images in a forward pass of a vision-language model: where their features go among the tokens, and the positions of all tokens.

Trainers and engines show a model its images in this one way. What several rows share goes through the vision tower once. Positions are
the model's own: along time, height and width of an image, and one after the other in text (multimodal rotary embeddings).

Source: Wang et al., Qwen2-VL, https://arxiv.org/abs/2409.12191
"""

import dataclasses as dc
import weakref
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from rft import tree
from rft.errors import BadInput
from rft.images import AXES, Placeholder, RowImages, placeholder_of, places
from rft.shapes import check_record


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """The images of some lines of tokens: padded rows, or one line of packed ones."""

    pixels: Float32[Tensor, "patch number"]
    """Of all images that differ. Where there is none: those of one that goes nowhere."""
    grids: Int64[Tensor, "image axis"]
    places: Int64[Tensor, "placeholder"]
    """Where features go, counted through all lines."""
    sources: Int64[Tensor, "placeholder"]
    """Which features these are, counted through all images."""
    positions: Int64[Tensor, "axis line column"]
    """Of every token, along time, height and width."""

    def __post_init__(self) -> None:
        check_record(self)

    def to(self, device: torch.device) -> "Seen":
        """The same, on a device."""
        return Seen(**{field.name: getattr(self, field.name).to(device) for field in dc.fields(self)})

    def packed(self, mask: Bool[Tensor, "row seq"]) -> "Seen":
        """Of padded rows: the same with the marked tokens one behind the other, in one line."""
        new = mask.flatten().cumsum(dim=0) - 1
        return dc.replace(self, places=new[self.places], positions=self.positions[:, None, mask])


@dc.dataclass(frozen=True)
class Eyes:
    """How a model takes images."""

    placeholder: Placeholder
    rope: "weakref.WeakMethod[Any]"
    """Its own positions; a model that is given back is not kept by this."""

    def see(self, tokens: Int64[Tensor, "row seq"], mask: Bool[Tensor, "row seq"], images: RowImages) -> Seen:
        """Of padded rows on the host, wherever they begin; each has a token at least. `misfit` has been asked before."""
        tokens = tokens.masked_fill(~mask, -1)  # whatever padding is, it is no placeholder
        here, given = places(tokens, images, self.placeholder), [each for each in images if each is not None]
        distinct = list({id(each): each for each in given}.values())
        sizes = [sum(self.placeholder.counts(each)) for each in distinct]
        ends = dict(zip(map(id, distinct), torch.tensor(sizes).cumsum(0).tolist(), strict=True))
        sources = [torch.arange(ends[id(each)] - sum(self.placeholder.counts(each)), ends[id(each)]) for each in given]
        return Seen(
            pixels=torch.cat([each.pixels for each in distinct] or [torch.zeros(self.placeholder.patches, self.placeholder.numbers)]),
            grids=torch.cat([each.grids for each in distinct] or [self._least()]),
            places=here.flatten().nonzero()[:, 0],
            sources=torch.cat([torch.zeros(0, dtype=torch.int64), *sources]),
            positions=self._positions(tokens, mask, here, [each.grids for each in given]),
        )

    def _least(self) -> Int64[Tensor, "image axis"]:
        """The grid of the smallest image."""
        side = round(self.placeholder.patches**0.5)
        return torch.tensor([[1, side, side]])

    def _positions(self, tokens: Tensor, mask: Tensor, here: Tensor, grids: list[Tensor]) -> Tensor:
        rope = self.rope()
        assert rope is not None, "a model that is given back is asked nothing"
        grid = torch.cat([torch.zeros(0, AXES, dtype=torch.int64), *grids])
        positions, _ = rope(input_ids=tokens, mm_token_type_ids=here.int(), image_grid_thw=grid, attention_mask=mask.long())
        return positions


def eyes(model: Any) -> Eyes | None:
    """Those of a Hugging Face model, with a head or without; None for a model that takes no images.

    Raises `BadInput` for one that takes them in another way than is known here.
    """
    placeholder, body = placeholder_of(model.config), model.base_model
    if placeholder is None:
        return None
    if not hasattr(body, "get_rope_index") or not hasattr(body, "get_image_features"):
        raise BadInput(f"{type(model).__name__} takes images in a way that is not known here; Qwen2-VL and Qwen2.5-VL can be used")
    return Eyes(placeholder, weakref.WeakMethod(body.get_rope_index))


def embedded(model: Any, tokens: Int64[Tensor, "line column"], seen: Seen) -> Float[Tensor, "line column width"]:
    """What the decoder is given: embeddings of the tokens, features of the images in the places of their placeholders.

    The vision tower takes part, and has a gradient, even where no feature is used: all ranks of a sharded model compute alike.
    """
    embeddings = model.get_input_embeddings()(tokens)
    output = model.base_model.get_image_features(seen.pixels, seen.grids, return_dict=True)
    features = torch.cat(tuple(output.pooler_output)).to(embeddings)
    return embeddings.flatten(0, 1).index_copy(0, seen.places, features.index_select(0, seen.sources)).view_as(embeddings)
