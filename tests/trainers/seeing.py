"""What every trainer must do with images, on ranks that have some and ranks that have none: the same as a plain single-process loop.

A test file takes all of it (`from tests.trainers.seeing import *`) and makes a fixture `seen`, for its backends.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rft.models import find_model
from rft.testing.models import tiny_model, tiny_vision_model
from tests.launching import torchrun
from tests.trainers import oracle
from tests.trainers.batches import rows_of, seeing_experience

SCRIPT = Path(__file__).with_name("vision_ranks.py")
SOURCE = seeing_experience()
ROWS = {"MIXED": ((0, 1, 2), (3, 4, 5)), "APART": ((0, 1, 3, 4), (2, 5)), "IDLE": ((0, 1, 2, 3, 4, 5), ())}
GRADIENTS = ("mixed", "images on one rank", "row by row", "an idle rank", "checkpointed", "padded")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_vision_model(folder / "seeing")
    tiny_model(folder / "text")
    return folder


def launched(models: Path, folder: Path, *backends: str) -> dict[str, list[dict[str, Any]]]:
    """What each of two ranks saw, by backend."""
    torchrun(SCRIPT, models, folder, *backends, ranks=2, timeout=300)
    return {name: [{**torch.load(folder / name / f"{rank}.pt"), "folder": folder / name} for rank in range(2)] for name in backends}


@pytest.fixture(scope="module")
def plain(models: Path) -> tuple[dict[str, torch.Tensor], float]:
    """Gradient and loss of the plain loop."""
    network = oracle.plain_model(models / "seeing")
    loss = oracle.plain_loss(network, SOURCE, None)
    loss.backward()
    return oracle.gradient(network), loss.item()


@pytest.mark.parametrize("case", GRADIENTS)
def test_the_gradient_is_that_of_a_plain_loop(case: str, seen: list[dict[str, Any]], plain: Any) -> None:
    expected, loss = plain
    assert any(".visual." in name for name in expected)
    for result in (rank["gradients"][case] for rank in seen):
        assert oracle.distance(result["gradient"], expected) <= 1e-5
        assert oracle.distance(*(visual(each) for each in (result["gradient"], expected))) <= 1e-5
        assert result["metrics"]["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)


def visual(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if ".visual." in name}


def test_logprobs_of_actor_and_reference(seen: list[dict[str, Any]], models: Path) -> None:
    table = oracle.all_logprobs(oracle.plain_model(models / "seeing"), SOURCE) * SOURCE.sampled
    for rank, result in enumerate(seen):
        for shares, got in zip([*ROWS.values()] * 2, result["logprobs"], strict=True):
            torch.testing.assert_close(got, table[list(shares[rank])], atol=1e-5, rtol=0)


def test_steps_are_those_of_a_plain_loop(seen: list[dict[str, Any]], models: Path) -> None:
    """In the second one no rank has an image: FSDP2 leaves the tower alone, and ZeRO moves it on, as AdamW does for a gradient of zeros."""
    network = oracle.plain_model(models / "seeing")
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, eps=1e-7, weight_decay=0.0, foreach=False)
    for step, rows in enumerate(((0, 1, 2, 3, 4, 5), (2, 5), (0, 1, 2, 3, 4, 5))):
        loss = oracle.plain_loss(network, rows_of(SOURCE, *rows), None)
        optimizer.zero_grad()
        loss.backward()
        for parameter in network.parameters() if seen[0]["folder"].name.startswith("zero") else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        assert all(rank["steps"]["metrics"][step]["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5) for rank in seen)
    network.save_pretrained(seen[0]["folder"] / "plain")
    assert oracle.distance(seen[0]["steps"]["weights"], load_file(seen[0]["folder"] / "plain" / "model.safetensors")) < 1e-5


def test_weights_stream_under_the_checkpoint_s_names(seen: list[dict[str, Any]], models: Path) -> None:
    stored = load_file(models / "seeing" / "model.safetensors")
    assert "visual.blocks.0.attn.qkv.weight" in stored
    for rank in seen:
        assert rank["names"].keys() == stored.keys()
        assert all(torch.equal(rank["names"][name], tensor) for name, tensor in stored.items())


def test_an_exported_model_takes_images(seen: list[dict[str, Any]], models: Path) -> None:
    folder = seen[0]["folder"] / "exported"
    found = find_model(str(folder))
    assert found.images is not None
    assert found.images.placeholder.token == 260
    before, after = (oracle.plain_model(each).state_dict() for each in (models / "seeing", folder))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_what_cannot_be_shown_is_refused_on_all_ranks(seen: list[dict[str, Any]], plain: Any) -> None:
    for rank in seen:
        text, other, loss = rank["refusals"]
        assert "rows have images, and this model takes none" in text
        assert "rank 1: row" in other
        assert "placeholders (token 260)" in other
        assert loss == pytest.approx(plain[1], rel=1e-5, abs=1e-6)
