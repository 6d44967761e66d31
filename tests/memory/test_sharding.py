import dataclasses as dc
import json
from pathlib import Path

import pytest
import torch

from rft.errors import BadInput
from rft.memory.outline import Outline, outline
from rft.memory.sharding import Held, frozen, held, ours, own_slices, slices
from rft.spec import DeepSpeedTrainer, FSDP2Trainer, LoRA
from rft.spec.training import Training
from rft.testing.models import tiny_model
from tests.launching import torchrun
from tests.memory.models import PARAMETERS, tiny

# 5 rows of 3 are cut into 3 and 2 for two ranks, 2, 2, 1 and none for four; one vector of 7 into 4 and 3, and 2, 2, 2 and 1.
ODD = Outline(shapes=(torch.Size([5, 3]), torch.Size([7])), blocks=(7,))
ADAPTED = dc.replace(ODD, adapter=(torch.Size([2, 3]), torch.Size([5, 2])), adapter_blocks=(16,))


def test_slices_are_padded_weights_and_moments_are_not():
    assert slices(ODD.shapes, 2, 4) == 4 * (3 * 3 + 4)
    assert [own_slices(ODD.shapes, 2, rank, 4) for rank in (0, 1)] == [4 * (9 + 4), 4 * (6 + 3)]
    assert slices(ODD.shapes, 4, 4) == 4 * (2 * 3 + 2)
    assert [own_slices(ODD.shapes, 4, rank, 4) for rank in range(4)] == [4 * 8, 4 * 8, 4 * (3 + 2), 4 * 1]
    assert held(ODD, FSDP2Trainer(), 2, rank=1) == Held(weights=52, optimizer=2 * 36)
    assert held(ODD, FSDP2Trainer(shards=1), 2) == Held(weights=4 * 22, optimizer=2 * 4 * 22)
    assert held(ODD, FSDP2Trainer(offload=True), 1) == Held(weights=0, optimizer=0, host=3 * 4 * 22)


def test_of_an_adapted_model_the_adapter_alone_has_masters_and_moments():
    assert held(ADAPTED, FSDP2Trainer(), 2) == Held(weights=2 * (9 + 4) + 4 * (3 + 6), optimizer=8 * (3 + 6))
    shape = outline(tiny(lora=LoRA(rank=4)))
    # q 128+128, k and v 128+64, o 128+128, gate and up 128+256, down 256+128: of each layer (rows + columns) · 4.
    assert shape.adapter_blocks == (4 * (256 + 192 + 192 + 256 + 384 + 384 + 384),) * 2
    assert (shape.parameters, shape.blocks) == (PARAMETERS, (147_968,) * 2)
    assert shape.trained.outside == 0


def test_the_tiny_model_on_one_rank():
    assert held(outline(tiny()), FSDP2Trainer(), 1) == Held(weights=1_348_096, optimizer=2_696_192)
    assert frozen(outline(tiny()), "bfloat16", None, 1) == 674_048 == 2 * PARAMETERS
    assert frozen(outline(tiny()), "bfloat16", 1, 4) == 674_048


# 22 elements on 2 ranks: stages 1 and 2 fill up to a multiple of 4, so 24 and 12 of them; stage 3 each parameter: 8 of 15, 4 of 7.
ZERO = [
    (DeepSpeedTrainer(stage=1), Held(weights=2 * 24 + 4 * 12, optimizer=8 * 12 + 4 * 24)),
    (DeepSpeedTrainer(stage=1, dtype="float32"), Held(weights=4 * 24 + 4 * 12, optimizer=8 * 12)),
    (DeepSpeedTrainer(stage=2), Held(weights=2 * 24 + 4 * 12, optimizer=8 * 12)),
    (DeepSpeedTrainer(stage=3), Held(weights=2 * 12 + 4 * 12, optimizer=8 * 12 + 4 * 12)),
    (DeepSpeedTrainer(stage=3, offload_optimizer=True), Held(weights=2 * 12, optimizer=0, host=16 * 12)),
]


@pytest.mark.parametrize(("spec", "expected"), ZERO)
def test_zero_lays_weights_out_flat(spec: Training, expected: Held):
    assert held(ODD, spec, 2) == expected


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(BadInput, match="shards=2 does not divide the world size 3"):
        _ = held(ODD, FSDP2Trainer(shards=2), 3)
    with pytest.raises(BadInput, match="lora"):
        _ = held(ADAPTED, DeepSpeedTrainer(), 1)
    with pytest.raises(BadInput, match="not for Training"):
        _ = ours(Training())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    _ = tiny_model(folder / "tied")
    _ = tiny_model(folder / "uneven", "llama", tied=False, vocab=321)
    return folder


def compare(models: Path, backend: str, ranks: int) -> int:
    """How many trainers said what was planned; an assertion where one said something else."""
    results = models / f"{backend} on {ranks}"
    results.mkdir()
    _ = torchrun(Path(__file__).with_name("sharding_ranks.py"), models, backend, results, ranks=ranks)
    seen = [each for rank in range(ranks) for each in json.loads((results / f"{rank}.json").read_text())]
    assert [each for each in seen if each["told"] != each["planned"]] == []
    return len(seen)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_trainers_hold_what_was_planned(models: Path, ranks: int):
    assert compare(models, "fsdp2", ranks) == 8 * ranks
