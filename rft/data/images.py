"""Image files into what a model is given: read and counted when a data set is made, processed when a batch is."""

import dataclasses as dc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rft.errors import BadInput
from rft.images import Images, Placeholder


@dc.dataclass(frozen=True)
class ImageReader:
    """How prompts with images are made for one model."""

    processor: Any
    """Its image processor, of transformers."""
    placeholder: Placeholder

    def count(self, path: str) -> int:
        """Placeholders for the image in a file, which is read to its end for it, but not processed. Raises `BadInput`."""
        image = _opened(path)
        try:
            return int(self.processor.get_number_of_image_patches(image.height, image.width)) // self.placeholder.patches
        except ValueError as error:
            raise BadInput(
                f"the image {path}, {image.width} × {image.height}, is refused by the model's image processor: {error}"
            ) from error

    def expanded(self, tokens: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
        """Tokens with one placeholder for each image, into those with as many as it needs. Raises `BadInput` where there are others."""
        mark = self.placeholder.token
        if tokens.count(mark) != len(counts):
            raise BadInput(
                f"the chat template makes {tokens.count(mark)} placeholders (token {mark}) of {len(counts)} images: it must make one of "
                "each, and no question may have one in its text"
            )
        left = iter(counts)
        return tuple(token for each in tokens for token in ([mark] * next(left) if each == mark else [each]))

    def process(self, paths: Sequence[str]) -> Images:
        """What the model is given of the images of one prompt. Raises `BadInput` where one cannot be read."""
        made: Any = self.processor(images=[_opened(path) for path in paths], return_tensors="pt")
        return Images(pixels=made["pixel_values"].to(torch.float32), grids=made["image_grid_thw"].to(torch.int64))


def _opened(path: str) -> Any:
    """An image as it is to be looked at, in three colours."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise BadInput("reading images needs the package pillow: pip install 'rft-runtime[vision]'") from error
    try:
        with Image.open(Path(path).expanduser()) as image:
            turned: Any = ImageOps.exif_transpose(image)
            return turned.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow raises for broken files, by format
        raise BadInput(f"the image {path} cannot be read: {error}; mend the file, or leave its question out") from error
