"""What launch refuses before anything is built."""

import json
from pathlib import Path
from typing import Any

import pytest

import rft
from rft.effects import alike, launching
from rft.testing.models import tiny_model, tiny_vision_model
from rft.testing.scripted import alone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_vision_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        ({"critic": rft.SharedCritic()}, "critic"),
        ({"critic": rft.Critic(trainer=rft.FSDP2Trainer())}, "critic"),
        ({"reward_models": {"kind": rft.RewardModel(model="/nowhere")}}, "reward_models"),
        ({"trainer": rft.FSDP2Trainer(lora=rft.LoRA(rank=4))}, r"trainer\.lora"),
    ],
)
def test_what_cannot_stand_beside_a_model_that_takes_images(model: str, beside: dict[str, Any], named: str) -> None:
    with (
        pytest.raises(rft.BadInput, match=rf"LaunchSpec\.{named} cannot be used with .*, a model that takes images"),
        rft.launch(rft.LaunchSpec(model=model, **beside)),
    ):
        pass


def test_what_is_no_specification_is_refused() -> None:
    given: Any = "a/model"
    says = r"launch\(spec\): spec must be LaunchSpec, got str; write LaunchSpec\(model=…\)"
    with pytest.raises(rft.BadInput, match=says), rft.launch(given):
        pass


def test_a_model_of_another_kind(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config().save_pretrained(tmp_path)
    with (
        pytest.raises(rft.BadInput, match="a T5Config is the configuration of no causal language model"),
        rft.launch(rft.LaunchSpec(model=str(tmp_path))),
    ):
        pass


@pytest.mark.parametrize(
    ("named", "part"),
    [("trainer", {"trainer": rft.FSDP2Trainer(shards=3)}), ("reference", {"reference": rft.Reference(shards=3)})],
)
def test_shards_that_do_not_divide_the_ranks_are_refused_by_whose_they_are(named: str, part: dict[str, Any]) -> None:
    with (
        pytest.raises(rft.BadInput, match=rf"LaunchSpec\.{named}: shards=3 does not divide the world size 1; start torchrun"),
        rft.launch(rft.LaunchSpec(model="/nowhere", **part)),
    ):
        pass


def test_marks_tell_models_apart(tmp_path: Path) -> None:
    first = alike.marks(tiny_model(tmp_path / "first"))
    assert first == alike.marks(tiny_model(tmp_path / "second")), "the folder's name says nothing"
    assert {"model.safetensors", "tokenizer.json", "hidden_size in config.json"} <= first.keys()
    trained = alike.marks(tiny_model(tmp_path / "trained", seed=1))
    assert [what for what in first if first[what] != trained[what]] == ["model.safetensors"]
    generation = tmp_path / "second" / "generation_config.json"
    _ = generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": [1, 2]}))
    ending = alike.marks(tmp_path / "second")
    assert [what for what in first if first[what] != ending[what]] == ["eos_token_id in generation_config.json"]


@pytest.mark.parametrize("place", [0, 5_000_000, 9_999_999])
def test_of_a_large_file_its_ends_and_places_between_are_looked_at(place: int, tmp_path: Path) -> None:
    """What was trained differs nearly everywhere: here in 700,000 bytes."""
    file, content = tiny_model(tmp_path) / "model.safetensors", bytearray(10_000_000)
    _ = file.write_bytes(content)
    before = alike.marks(tmp_path)["model.safetensors"]
    begin = min(place, len(content) - 700_000)
    content[begin : begin + 700_000] = b"1" * 700_000
    _ = file.write_bytes(content)
    assert alike.marks(tmp_path)["model.safetensors"] != before


def test_an_engine_that_shares_no_model_is_refused_before_ranks_are_counted() -> None:
    with pytest.raises(rft.BadInput, match="the transformers engine holds the whole model on every rank, so tensor_parallel=2 cannot work"):
        _ = rft.LaunchSpec(model="m", tensor_parallel=2)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("", "'' is no model folder: it has no config.json"),
        ("/no/such/folder", "'/no/such/folder' is neither a folder nor a model that the hub gives, whose ids have the form owner/name"),
        (3, "a model must be str, got 3"),
    ],
)
def test_what_names_no_model(named: Any, says: str) -> None:
    with pytest.raises(rft.BadInput, match=says):
        _ = rft.models.find_model(named)


def test_a_slow_dtype_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    spec = rft.LaunchSpec(model="m", engine=rft.TransformersEngine(dtype="float32"))
    monkeypatch.setattr(launching, "quick_dtype", lambda: "bfloat16")
    launching._warn_of_slowness(spec, alone())
    assert not caplog.records
    monkeypatch.setattr(launching, "quick_dtype", lambda: "float32")
    launching._warn_of_slowness(spec, alone())
    assert "many times as long in it as in float32: trainer.dtype; write dtype='float32'" in caplog.text
