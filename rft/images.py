"""Images as a model takes them: what a processor makes of those of one prompt, and what stands for them among its tokens.

An image is cut into patches, on a grid of time, height and width. Among the tokens of a prompt one placeholder stands for each few of
them, in one run for each image. A model may sample the placeholder's id, too; that is a token like any other then, and comes after.
"""

import dataclasses as dc
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from rft import tree
from rft.errors import ShapeError
from rft.shapes import check_record

AXES = 3
"""Of a grid: time, height, width."""


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """The images of one prompt, processed once. All rows of the prompt hold this very record."""

    pixels: Float32[Tensor, "patch number"]
    """Their patches, one image behind the other."""
    grids: Int64[Tensor, "image axis"]
    """Patches of each image along time, height and width."""

    def __post_init__(self) -> None:
        check_record(self)
        if self.grids.shape[1] != AXES or not len(self.grids) or int(self.grids.min()) < 1:
            raise ShapeError(
                f"Images.grids must have three numbers of at least 1 for each of at least one image, got {self.grids.tolist()}"
            )
        if int(self.grids.prod(dim=1).sum()) != len(self.pixels):
            raise ShapeError(f"Images.pixels has {len(self.pixels)} patches, and the grids {self.grids.tolist()} have others")


RowImages = tuple[Images | None, ...]
"""Those of each row; None where a row has none."""


@dc.dataclass(frozen=True, kw_only=True)
class Placeholder:
    """What stands for images among the tokens of a model."""

    token: int
    """Its id."""
    patches: int
    """That one of them stands for: a square, in height and width."""
    numbers: int
    """Of a patch."""

    def counts(self, images: Images) -> tuple[int, ...]:
        """How many of them stand for each image."""
        return tuple(size // self.patches for size in images.grids.prod(dim=1).tolist())


def placeholder_of(config: Any) -> Placeholder | None:
    """That of a transformers configuration; None for a model that takes no images, or takes them in another way than this."""
    token, vision = getattr(config, "image_token_id", None), getattr(config, "vision_config", None)
    sizes = [getattr(vision, name, None) for name in ("spatial_merge_size", "patch_size", "temporal_patch_size")]
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", None))
    if any(not isinstance(size, int) for size in (token, channels, *sizes)):
        return None
    merged, patch, times = (int(size or 0) for size in sizes)
    return Placeholder(token=int(token or 0), patches=merged**2, numbers=int(channels or 0) * times * patch**2)


def places(tokens: Int64[Tensor, "row seq"], images: RowImages, placeholder: Placeholder) -> Bool[Tensor, "row seq"]:
    """Marks the placeholders of each row's images: the first ones, as many as they need."""
    needed = torch.tensor([0 if each is None else sum(placeholder.counts(each)) for each in images], dtype=torch.int64)
    found = tokens == placeholder.token
    return found & (found.cumsum(dim=1) <= needed[:, None])


def misfit(tokens: list[int], images: Images, placeholder: Placeholder) -> str | None:
    """What is wrong with the images of one row, whose tokens these are; None: nothing."""
    if images.pixels.shape[1] != placeholder.numbers:
        return f"the patches of its images have {images.pixels.shape[1]} numbers, and the model takes {placeholder.numbers}"
    if bool((images.grids[:, 1:] % round(placeholder.patches**0.5)).any()):
        return f"its images have patches of grids {images.grids.tolist()}, which placeholders of {placeholder.patches} do not divide"
    counts, runs = placeholder.counts(images), [length for _, length in runs_of(tokens, placeholder.token)]
    if tuple(runs[: len(counts)]) != counts:
        return f"its images need runs of {', '.join(map(str, counts))} placeholders (token {placeholder.token}), and it has {runs}"
    return None


def unmatched(prompt: Sequence[int], placeholder: Placeholder) -> str | None:
    """What is wrong with the tokens of a prompt that has no images; None: nothing."""
    if placeholder.token not in prompt:
        return None
    return f"it has placeholders of images (token {placeholder.token}), and no images; keep the column `images` of what it was made from"


def runs_of(tokens: list[int], token: int) -> list[tuple[int, int]]:
    """Where a token stands, as runs: the first place and the length of each."""
    ends = itertools.groupby(range(len(tokens)), key=lambda place: tokens[place] == token)
    runs = [list(group) for found, group in ends if found]
    return [(run[0], len(run)) for run in runs]
