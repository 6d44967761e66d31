"""Specifications are held to what their fields say, when they are made; and ranks to the same specification."""

import math
from pathlib import Path
from typing import Any

import pytest

import rft
from rft.effects import launching
from rft.errors import BadInput
from rft.spec import DeepSpeedTrainer, FSDP2Trainer, LoRA, SGLangEngine, TransformersEngine, VLLMEngine
from rft.testing.models import tiny_model


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: FSDP2Trainer(schedule="liner", total_steps=2), "schedule must be 'constant' or 'linear' or 'cosine', got 'liner'"),
        (lambda: FSDP2Trainer(dtype="float16"), "FSDP2Trainer.dtype must be 'bfloat16' or 'float32', got 'float16'"),
        (lambda: FSDP2Trainer(lr="1e-3"), "FSDP2Trainer.lr must be float, got '1e-3'"),
        (lambda: DeepSpeedTrainer(stage=4), "DeepSpeedTrainer.stage must be 1 or 2 or 3, got 4"),
        (lambda: TransformersEngine(dtype="nonsense"), "TransformersEngine.dtype must be 'bfloat16' or 'float32'"),
        (lambda: VLLMEngine(max_rows=1.5), "VLLMEngine.max_rows must be int, got 1.5"),
        (lambda: LoRA(sync="both"), "LoRA.sync must be 'merged' or 'adapter', got 'both'"),
        (lambda: rft.LaunchSpec(model=None), "LaunchSpec.model must be str, got None"),
        (lambda: rft.LaunchSpec(model="m", reference=True), r"LaunchSpec.reference must be Reference \| None, got True"),
        (lambda: rft.LaunchSpec(model="m", reward_models={"one": "path"}), r"LaunchSpec.reward_models must be Mapping\[str, RewardModel\]"),
        (lambda: rft.LaunchSpec(model="m", engine=TransformersEngine), r"engine must be a specification such as TransformersEngine\(\)"),
        (lambda: rft.LaunchSpec(model="m", trainer=FSDP2Trainer), r"LaunchSpec.trainer must be a specification such as FSDP2Trainer\(\)"),
        (lambda: rft.LaunchSpec(model="m", trainer=None), "LaunchSpec.trainer must be a specification .* got None"),
        (lambda: rft.LaunchSpec(model="m", trainer=SGLangEngine()), "LaunchSpec.trainer must be a specification .* got SGLangEngine"),
        (lambda: rft.LaunchSpec(model="m", trainer=rft.Critic()), "LaunchSpec.trainer must be a specification .* got Critic"),
        (lambda: rft.LaunchSpec(model="m", engine=FSDP2Trainer()), "engine must be a specification .*, or None, got FSDP2Trainer"),
        (lambda: rft.LaunchSpec(model="m", deadline_s=math.nan), "LaunchSpec.deadline_s must be above 0 and finite, got nan"),
        (lambda: rft.LaunchSpec(model="m", deadline_s=math.inf), "LaunchSpec.deadline_s must be above 0 and finite, got inf"),
        (lambda: rft.LaunchSpec(model="m", seed=True), "LaunchSpec.seed must be int, got True"),
        (lambda: LoRA(targets=["q_proj"]), r"LoRA.targets must be a tuple of names .* got \['q_proj'\]"),
        (lambda: LoRA(targets=("q_proj", 3, "v_proj")), "LoRA.targets must be a tuple of names"),
        (lambda: LoRA(adapter=""), "LoRA.adapter must be a peft folder, or None"),
        (lambda: LoRA(targets=()), r"LoRA.targets must be a tuple of names such as \('q_proj', 'v_proj'\)"),
        (lambda: FSDP2Trainer(total_steps=-3), "FSDP2Trainer.total_steps must be at least 1, got -3"),
        (lambda: DeepSpeedTrainer(total_steps=0), "DeepSpeedTrainer.total_steps must be at least 1, got 0"),
        (lambda: rft.Critic(where="disk"), "Critic.where must be 'device' or 'host', got 'disk'"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_what_it_says_is_refused(made: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        _ = made()


class Own:
    """A specification that is none of ours."""

    def build(self, *_: object) -> Any:
        raise AssertionError("it is not launched")


def test_a_specification_of_ones_own_is_taken() -> None:
    own = Own()
    assert rft.LaunchSpec(model="m", engine=own, trainer=own).engine is own


def test_whole_numbers_are_numbers() -> None:
    assert FSDP2Trainer(lr=1, max_grad_norm=float("inf")).lr == 1


class Told:
    """A lock-step that has heard of a rank with another specification."""

    def __init__(self, other: dict[str, str]) -> None:
        self.other = other

    def gather(self, value: dict[str, str]) -> list[dict[str, str]]:
        return [value, {**value, **self.other}]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"trainer.lr": "0.0"}, r"LaunchSpec.trainer.lr is 1e-06 on rank 0 and 0.0 on rank 1; give every rank the same"),
        ({"seed": "1"}, "LaunchSpec.seed is 0 on rank 0 and 1 on rank 1"),
        ({"reference": "Reference"}, "LaunchSpec.reference is None on rank 0 and Reference on rank 1"),
        ({"critic.model": "a folder"}, r"LaunchSpec.critic.model is None on rank 0 and a folder on rank 1"),
    ],
)
def test_ranks_with_other_specifications_are_refused(other: dict[str, str], says: str) -> None:
    lockstep: Any = Told(other)
    with pytest.raises(BadInput, match=says):
        launching._require_alike(rft.LaunchSpec(model="m", critic=rft.Critic()), lockstep)


def test_nodes_may_have_the_model_elsewhere() -> None:
    lockstep: Any = Told({})
    launching._require_alike(rft.LaunchSpec(model="m", reward_models={"one": rft.RewardModel(model="n")}), lockstep)


def test_the_adapter_to_begin_with_is_compared_as_models_are(tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path / "model"))
    begun = rft.LaunchSpec(model=model, trainer=FSDP2Trainer(lora=rft.LoRA(adapter=str(tmp_path / "adapter"))))
    assert launching._folders(begun) == {"model": Path(model), "trainer.lora.adapter": tmp_path / "adapter"}
