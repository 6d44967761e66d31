"""What launch refuses before anything is built."""

from pathlib import Path
from typing import Any

import pytest

import rft
from rft.testing.models import tiny_vision_model


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
