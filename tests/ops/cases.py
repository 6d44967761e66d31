"""Random per-token cases: mask holes, empty responses, rubbish outside of the mask. And gradients by finite differences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Table = list[list[float]]


def random_tokens(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(new, old, advantages, mask), each `[batch, seq]`; NaN and infinity where the mask is False."""
    draw = torch.Generator().manual_seed(seed)
    batch, seq = (int(torch.randint(1, 9, (), generator=draw)) for _ in range(2))
    mask = torch.rand(batch, seq, generator=draw) < 0.6
    mask[0] = False
    new = -4 * torch.rand(batch, seq, generator=draw)
    old = new + 0.5 * torch.randn(batch, seq, generator=draw)
    advantages = torch.randn(batch, seq, generator=draw)
    rubbish = torch.tensor([float("nan"), float("inf"), -float("inf")])[torch.randint(0, 3, (batch, seq), generator=draw)]
    new, old, advantages = (value.where(mask, rubbish).to(dtype) for value in (new, old, advantages))
    return new, old, advantages, mask


def seeds(quick: int) -> list[Any]:
    """Seeds for `parametrize`: a few, and two hundred more that are `slow`."""
    return [*range(quick), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(quick, quick + 200))]


def slopes(function: Callable[[Table], float], at: Table, marks: list[list[bool]], step: float = 1e-5) -> Table:
    """The gradient of a double-precision function by central differences, at the marked entries; 0 elsewhere."""

    def moved(row: int, column: int, by: float) -> Table:
        return [[x + by * ((i, j) == (row, column)) for j, x in enumerate(values)] for i, values in enumerate(at)]

    def slope(row: int, column: int) -> float:
        return (function(moved(row, column, step)) - function(moved(row, column, -step))) / (2 * step)

    return [[slope(i, j) if marked else 0.0 for j, marked in enumerate(row)] for i, row in enumerate(marks)]


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    """The gradient of a scalar, in fp32."""
    (grad,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    return grad.float()
