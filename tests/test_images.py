import re

import pytest
import torch

from rft.errors import ShapeError
from rft.images import Images, Placeholder, misfit, placeholder_of, places, runs_of
from rft.testing.models import tiny_config, tiny_vision_config

HOLD = Placeholder(token=9, patches=4, numbers=6)


def images(*grids: tuple[int, int, int], numbers: int = 6) -> Images:
    return Images(pixels=torch.zeros(sum(t * h * w for t, h, w in grids), numbers), grids=torch.tensor(grids))


def test_the_placeholder_of_a_configuration() -> None:
    # Patches of 8 × 8 pixels, three colours, two points in time; 2 × 2 of them for one placeholder.
    assert placeholder_of(tiny_vision_config()) == Placeholder(token=260, patches=4, numbers=3 * 2 * 8 * 8)
    assert placeholder_of(tiny_config("qwen2", tied=True)) is None


@pytest.mark.parametrize(
    ("pixels", "grids", "says"),
    [
        (torch.zeros(4, 6), [[1, 2, 4]], "has 4 patches"),
        (torch.zeros(0, 6), [[1, 0, 4]], "at least 1"),
        (torch.zeros(4, 6), [[2, 2]], "three numbers"),
        (torch.zeros(4, 6).double(), [[1, 2, 2]], "dtype float64"),
    ],
)
def test_images_that_are_none(pixels: torch.Tensor, grids: list[list[int]], says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        Images(pixels=pixels, grids=torch.tensor(grids))


def test_the_first_placeholders_are_those_of_the_images() -> None:
    # Row 0 needs 1 + 2 of them, and has sampled one more; row 1 has no image, and has sampled one.
    tokens = torch.tensor([[1, 9, 2, 9, 9, 3, 9], [1, 2, 9, 3, 3, 3, 3]])
    found = places(tokens, (images((1, 2, 2), (1, 2, 4)), None), HOLD)
    assert found.tolist() == [[False, True, False, True, True, False, False], [False] * 7]


def test_runs() -> None:
    assert runs_of([9, 9, 1, 9, 2], 9) == [(0, 2), (3, 1)]
    assert runs_of([1, 2], 9) == []


@pytest.mark.parametrize(
    ("tokens", "shown", "says"),
    [
        ([1, 9, 2, 9, 9, 3], images((1, 2, 2), (1, 2, 4)), None),
        ([1, 9, 2, 9, 9, 3, 9], images((1, 2, 2), (1, 2, 4)), None),
        ([1, 9, 9, 2, 9, 3], images((1, 2, 2), (1, 2, 4)), "runs of 1, 2 placeholders"),
        ([1, 2], images((1, 2, 2)), r"and it has \[\]"),
        ([1, 9], images((1, 1, 4)), "do not divide"),
        ([1, 9], images((1, 2, 2), numbers=5), "have 5 numbers, and the model takes 6"),
    ],
)
def test_images_and_tokens_that_do_not_fit(tokens: list[int], shown: Images, says: str | None) -> None:
    wrong = misfit(tokens, shown, HOLD)
    assert (wrong is None) if says is None else re.search(says, wrong or "")
