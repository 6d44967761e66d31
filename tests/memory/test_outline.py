import pytest
import torch

from rft.errors import BadInput
from rft.memory.outline import blueprint, outline, read_config
from rft.testing.models import tiny_vision_config
from tests.memory.models import BLOCK, OUTSIDE, PARAMETERS, folder, tiny


def test_parameters_are_counted_by_block_tied_ones_once():
    shape = outline(tiny())
    assert (shape.blocks, shape.outside, shape.parameters) == ((BLOCK, BLOCK), OUTSIDE, PARAMETERS)
    assert (shape.largest_block, shape.largest_tensor) == (BLOCK, 320 * 128)
    assert outline(tiny(tied=False)).parameters == PARAMETERS + 320 * 128


def test_heads_of_one_number_stand_in_for_that_of_the_vocabulary():
    for head in ("reward", "value"):
        shape = outline(tiny(head, tied=False))
        assert (shape.parameters, shape.exact) == (PARAMETERS + 128, (torch.Size([1, 128]),))


def test_no_random_number_of_the_process_is_used():
    before = torch.get_rng_state()
    outline.cache_clear()
    _ = outline(tiny())
    assert torch.equal(before, torch.get_rng_state())


def test_only_the_configuration_is_read(tmp_path):
    assert outline(tiny()) == outline(blueprint(read_config(folder(tmp_path))))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    with pytest.raises(BadInput, match="is neither a folder with"):
        _ = read_config(str(tmp_path / "nothing here"))


def test_a_model_that_takes_images_cannot_be_planned(tmp_path):
    tiny_vision_config().save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="Qwen2_5_VLConfig, which takes images: what its vision tower takes cannot be planned yet"):
        read_config(str(tmp_path))
