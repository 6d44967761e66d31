"""LoRA under FSDP2: the contract; and what is refused of its settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from rft.errors import BadInput
from rft.spec import Critic, FSDP2Trainer, LoRA
from rft.trainers import adapter
from tests.trainers.contract import results
from tests.trainers.lora_contract import *  # noqa: F403

RANKS = [pytest.param(2, id="2 ranks"), pytest.param(1, id="1 rank", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=RANKS)
def seen(request: pytest.FixtureRequest, launched: Any) -> list[dict[str, Any]]:
    return results(launched(request.param, ("fsdp2",)) / "fsdp2", request.param)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias=all"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"peft_type": "LOHA"}, "LOHA"),
    ],
)
def test_a_folder_of_another_kind_is_refused(setting: dict[str, Any], says: str, models: Path, tmp_path: Path) -> None:
    own = models / "qwen2-adapter"
    config = json.loads((own / "adapter_config.json").read_text()) | setting
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes((own / "adapter_model.safetensors").read_bytes())
    with pytest.raises(BadInput, match=says):
        _ = adapter.read(tmp_path, LoRA(rank=4, alpha=8), {})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 0}, "rank must be at least 1"),
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"alpha": float("nan")}, "alpha must be above 0"),
        ({"targets": ()}, "tuple of names"),
        ({"targets": "q_proj"}, "tuple of names"),
        ({"sync": "both"}, "'merged' or 'adapter'"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        _ = LoRA(**options)


def test_a_critic_has_no_adapter() -> None:
    with pytest.raises(BadInput, match=r"Critic\.trainer\.lora"):
        _ = Critic(trainer=FSDP2Trainer(lora=LoRA()))
