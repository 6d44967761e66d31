"""Random mini-batches, the same for every process that makes them."""

import torch
from torch import Tensor

from rft.experience import Experience, Minibatch, take
from rft.state import BatchId
from rft.testing.models import prompt_of, some_images

ROWS = ((9, 4), (14, 6), (5, 1), (11, 0), (17, 9), (6, 3), (12, 12), (8, 5))
"""(tokens, of them prompt): a row all of prompt, one of a single prompt token, and one that sampled nothing, among others."""


def random_experience(seed: int = 0, temperature: float | None = 1.0) -> Experience:
    """Eight rows of different lengths; row 3 has a prompt of one token, row 6 sampled nothing. Padding is no token.

    Temperature None: each row was sampled at one of its own.
    """
    draw = torch.Generator().manual_seed(seed)
    rows, width = len(ROWS), max(length for length, _ in ROWS) + 2
    columns = torch.arange(width)
    lengths = torch.tensor([length for length, _ in ROWS])[:, None]
    prompts = torch.tensor([max(prompt, 1) for _, prompt in ROWS])[:, None]
    mask = columns < lengths
    sampled = mask & (columns >= prompts)
    tokens = torch.randint(0, 250, (rows, width), generator=draw).where(mask, torch.tensor(-100))
    return Experience(
        batches=(BatchId("a"),),
        origin=torch.zeros(rows, dtype=torch.int64),
        rows=torch.arange(rows),
        tokens=tokens,
        mask=mask,
        sampled=sampled,
        logprobs=(-6 * torch.rand(rows, width, generator=draw)).where(sampled, torch.tensor(0.0)),
        groups=torch.arange(rows) // 4,
        rewards=torch.rand(rows, generator=draw),
        advantages=torch.randn(rows, 1, generator=draw).where(sampled, torch.tensor(0.0)),
        temperature=torch.linspace(0.4, 1.8, rows) if temperature is None else torch.full((rows,), temperature),
        demonstrated=torch.zeros(rows, dtype=torch.bool),
    )


def rows_of(source: Experience, *rows: int) -> Minibatch:
    """The mini-batch of these rows."""
    return take(source, torch.tensor(rows, dtype=torch.int64))


def some_old(source: Experience, near: Tensor, seed: int = 1) -> Tensor:
    """Old log-probs beside `near`, some of them so far away that the clip acts."""
    draw = torch.Generator().manual_seed(seed)
    return (near + 0.3 * torch.randn(near.shape, generator=draw)).where(source.sampled, torch.tensor(0.0))


def seeing_experience(seed: int = 0) -> Experience:
    """Six rows for `rft.testing.models.tiny_vision_model`: 0 and 1 are samples of one prompt with an image, 3 has two images, 4 one.

    Rows 2 and 5 are samples of a prompt without any.
    """
    draw = torch.Generator().manual_seed(seed)
    one, two, wide = (some_images(draw, *grids) for grids in (((1, 4, 4),), ((1, 2, 4), (1, 6, 4)), ((1, 2, 8),)))
    images = (one, one, None, two, wide, None)
    prompts = [torch.tensor(prompt_of(draw, images[row])) for row in (0, 2, 3, 4)]
    rows = [
        torch.cat([prompts[n], torch.randint(0, 250, (length,), generator=draw)])
        for n, length in zip((0, 0, 1, 2, 3, 1), (5, 2, 7, 4, 6, 1), strict=True)
    ]
    starts = torch.tensor([len(prompts[n]) for n in (0, 0, 1, 2, 3, 1)])[:, None]
    width = max(map(len, rows)) + 1
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    sampled = mask & (torch.arange(width) >= starts)
    tokens = torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=-100) for row in rows])
    return Experience(
        batches=(BatchId("a"),),
        origin=torch.zeros(6, dtype=torch.int64),
        rows=torch.arange(6),
        tokens=tokens,
        mask=mask,
        sampled=sampled,
        logprobs=(-6 * torch.rand(6, width, generator=draw)).where(sampled, torch.tensor(0.0)),
        groups=torch.tensor([0, 0, 1, 2, 3, 1]),
        rewards=torch.rand(6, generator=draw),
        advantages=torch.randn(6, 1, generator=draw).where(sampled, torch.tensor(0.0)),
        temperature=torch.ones(6),
        demonstrated=torch.zeros(6, dtype=torch.bool),
        images=images,
    )
