"""LoRA under FSDP2: the contract; and what is refused of its settings."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rft.errors import BadInput, MissingBackend
from rft.spec import Critic, FSDP2Trainer, LoRA
from rft.trainers import adapter
from tests.trainers import oracle
from tests.trainers.contract import results
from tests.trainers.lora_contract import *  # noqa: F403

QUICK = (2, ("fsdp2",))
SLOW = ((1, ("fsdp2",)), (2, ("fsdp2, offloaded", "fsdp2, shards=1")))
LAUNCHES = [
    pytest.param((ranks, backends, backend), id=f"{backend}, {ranks} ranks", marks=() if (ranks, backends) == QUICK else pytest.mark.slow)
    for ranks, backends in (QUICK, *SLOW)
    for backend in backends
]


@pytest.fixture(scope="module", params=LAUNCHES)
def seen(request: pytest.FixtureRequest, launched: Any) -> list[dict[str, Any]]:
    ranks, backends, backend = request.param
    return results(launched(ranks, backends) / backend, ranks)


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (("q_proj", "qqq"), "'qqq' matches no module of Qwen2ForCausalLM; its linear layers are down_proj, gate_proj, k_proj, o_proj"),
        (("embed_tokens",), "'embed_tokens' is no linear layer that can be adapted"),
        (("lm_head",), "'lm_head' is no linear layer that can be adapted"),
        (("proj",), "'proj' matches no module"),
    ],
)
def test_layers_that_are_not_there_are_refused(targets: tuple[str, ...], says: str, models: Path) -> None:
    with pytest.raises(BadInput, match=says):
        _ = adapter.layers(oracle.plain_model(models / "qwen2"), targets)


def test_layers_are_named_by_the_end_of_their_names(models: Path) -> None:
    model = oracle.plain_model(models / "qwen2")
    assert adapter.layers(model, ("0.mlp.up_proj", "v_proj")) == [
        "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.v_proj"
    ]  # fmt: skip
    assert len(adapter.layers(model, None)) == 14  # seven in each block; the head is none of them


@pytest.mark.parametrize(
    ("folder", "lora", "says"),
    [
        ("qwen2-adapter", LoRA(rank=4, alpha=8, targets=("q_proj",)), "is surplus"),
        ("some-adapter", LoRA(rank=4, alpha=8), "is not there"),
        ("uneven-adapter", LoRA(rank=4, alpha=8), "instead of"),
        ("qwen2-adapter", LoRA(rank=8, alpha=8), r"has rank 4 and alpha 8; write LoRA\(rank=4, alpha=8"),
        ("qwen2-adapter", LoRA(rank=4, alpha=4), "has rank 4 and alpha 8"),
        ("qwen2", LoRA(rank=4, alpha=8), "is no peft folder"),
    ],
)
def test_a_folder_of_another_adapter_is_refused(folder: str, lora: LoRA, says: str, models: Path) -> None:
    model = oracle.plain_model(models / "qwen2")
    shapes = adapter.shapes(model, adapter.layers(model, lora.targets), lora.rank)
    with pytest.raises(BadInput, match=says):
        _ = adapter.read(models / folder, lora, shapes)


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


def test_without_peft_the_line_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingBackend, match=r"pip install 'rft-runtime\[lora\]'"):
        adapter.put_into(None, [], LoRA(), torch.empty)
