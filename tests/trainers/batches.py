"""Random mini-batches, the same for every process that makes them."""

import torch
from torch import Tensor

from rft.experience import Experience, Minibatch, take
from rft.state import BatchId

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
