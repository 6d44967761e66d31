from typing import Any

import pytest
import torch

from rft.errors import BadInput
from rft.images import Images
from rft.seeing import Eyes, embedded, eyes
from rft.testing.models import some_images, tiny_config, tiny_vision_config


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(tiny_vision_config(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def sight(model: Any) -> Eyes:
    found = eyes(model)
    assert found is not None
    return found


DRAW = torch.Generator().manual_seed(0)
ONE, TWO = some_images(DRAW, (1, 2, 4)), some_images(DRAW, (1, 4, 2), (1, 2, 2))
# ONE has two placeholders; TWO two and one. Row 2 has sampled one more. Padding is whatever it is.
TOKENS = torch.tensor([[1, 260, 260, 2, -100, 260, 7], [3, 4, 5, 260, 260, 6, 260], [1, 260, 260, 2, 260, 260, 9], [8, 9, 0, 0, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0]]).bool()
IMAGES = (ONE, TWO, ONE, None)


def test_what_is_shared_is_seen_once(sight: Eyes) -> None:
    seen = sight.see(TOKENS, MASK, IMAGES)
    assert seen.pixels.equal(torch.cat([ONE.pixels, TWO.pixels]))
    assert seen.grids.tolist() == [[1, 2, 4], [1, 4, 2], [1, 2, 2]]
    assert seen.places.tolist() == [1, 2, 10, 11, 13, 15, 16]
    assert seen.sources.tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_positions_by_hand(sight: Eyes) -> None:
    # Time, height, width. An image takes as many positions as its longer side has placeholders; what is sampled later counts on.
    seen = sight.see(TOKENS, MASK, IMAGES)
    assert seen.positions[:, 0, :4].tolist() == [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    assert seen.positions[:, 1].tolist() == [[0, 1, 2, 3, 3, 5, 6], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 3, 5, 6]]
    assert seen.positions[:, 2, :5].tolist() == [[0, 1, 1, 3, 4], [0, 1, 1, 3, 4], [0, 1, 2, 3, 4]]
    assert seen.positions[:, 3, :2].tolist() == [[0, 1]] * 3


def test_packed(sight: Eyes) -> None:
    padded = sight.see(TOKENS, MASK, IMAGES)
    seen = padded.packed(MASK)
    assert seen.places.tolist() == [1, 2, 7, 8, 10, 12, 13]
    assert seen.positions.shape == (3, 1, 18)
    assert seen.positions[2, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 3, 5, 6, 0, 1, 2, 3, 4, 0, 1]


def test_rows_that_begin_later(sight: Eyes) -> None:
    """As an engine pads them."""
    seen = sight.see(torch.tensor([[0, 260, 1, 260, 260, 2]]), torch.tensor([[False, False, True, True, True, True]]), (ONE,))
    assert seen.places.tolist() == [3, 4]
    assert seen.positions[:, 0, 2:].tolist() == [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("images", [IMAGES, (None,) * 4])
def test_features_stand_in_the_places_of_placeholders_and_the_tower_takes_part(
    model: Any, sight: Eyes, images: tuple[Images | None, ...]
) -> None:
    tokens = TOKENS.where(MASK, torch.tensor(0))
    with torch.no_grad():
        made = {id(each): torch.cat(tuple(model.model.get_image_features(each.pixels, each.grids).pooler_output)) for each in (ONE, TWO)}
        expected = model.get_input_embeddings()(tokens)
    for row, columns in ((0, (1, 2)), (1, (3, 4, 6)), (2, (1, 2))):
        if images[row] is not None:
            expected[row, list(columns)] = made[id(images[row])]
    got = embedded(model, tokens, sight.see(tokens, MASK, images))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    model.zero_grad()
    got.square().sum().backward()
    gradients = [parameter.grad for parameter in model.model.visual.parameters()]
    assert all(gradient is not None and bool(gradient.any()) == (images is IMAGES) for gradient in gradients)


def test_other_models() -> None:
    from transformers import AutoModelForCausalLM

    text: Any = AutoModelForCausalLM.from_config(tiny_config("qwen2", tied=True))
    assert eyes(text) is None
    text.config.image_token_id, text.config.vision_config = 260, tiny_vision_config().vision_config
    with pytest.raises(BadInput, match="Qwen2ForCausalLM takes images in a way that is not known"):
        _ = eyes(text)
