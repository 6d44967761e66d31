"""What every backend must do with an adapter: it is held against peft's own model with AdamW in a single process.

Used as `contract.py` is.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rft.testing.models import tiny_model
from rft.trainers import adapter
from tests.launching import torchrun
from tests.trainers import backends, oracle
from tests.trainers.batches import random_experience, some_old

peft: Any = pytest.importorskip("peft")

SCRIPT = Path(__file__).with_name("lora_ranks.py")
SOURCE = random_experience()
OLD = some_old(SOURCE, torch.where(SOURCE.sampled, -6.0, 0.0))
SHARES = {1: [range(8)], 2: [range(5), range(5, 8)]}
SOME = ("q_proj", "mlp.down_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CASES = {
    "row by row": "qwen2", "checkpointed": "qwen2", "uneven shards": "uneven", "padded": "windowed",
    "some layers": "some",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the contract's, and a peft folder for each; one with few layers adapted, and one model of the same shape with other weights."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "qwen2", "qwen2", tied=True)
    tiny_model(folder / "some", "qwen2", tied=True)
    tiny_model(folder / "stranger", "qwen2", tied=True, seed=1)
    tiny_model(folder / "uneven", "llama", tied=False, vocab=321, heads=3, kv_heads=1)
    config = tiny_model(folder / "windowed", "qwen2") / "config.json"
    window = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | window))
    for name, targets in (("qwen2", ALL), ("some", SOME), ("uneven", ALL), ("windowed", ALL)):
        random_adapter(folder / name, targets, folder / f"{name}-adapter")
    return folder


def random_adapter(model: Path, targets: tuple[str, ...], folder: Path) -> None:
    """A and B are random, both."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM")
        peft.get_peft_model(oracle.plain_model(model), config).save_pretrained(folder)


def adapted(models: Path, name: str) -> Any:
    return peft.PeftModel.from_pretrained(oracle.plain_model(models / name), models / f"{name}-adapter", is_trainable=True)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def own_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {adapter.plain(name.removeprefix(adapter.PREFIX)): tensor for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def launched(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, tuple[str, ...]], Path]:
    """Runs all scenes of some backends on some ranks, once; and gives the folder of results."""

    @functools.cache
    def launch(ranks: int, backends: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("results")
        torchrun(SCRIPT, models, folder, *backends, ranks=ranks, timeout=300)
        return folder

    return launch


@pytest.fixture(scope="module")
def plain(models: Path) -> dict[str, tuple[dict[str, Tensor], float]]:
    """Gradient and loss of the plain loop, by model."""
    result = {}
    for model in ("qwen2", "uneven", "windowed", "some"):
        network = adapted(models, model)
        loss = oracle.plain_loss(network, SOURCE, OLD)
        loss.backward()
        result[model] = (own_names(oracle.gradient(network)), loss.item())
    return result


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_a_plain_loop(case: str, seen: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    expected, loss = plain[CASES[case]]
    for result in (rank["gradients"][case] for rank in seen):
        assert oracle.distance(result["gradient"], expected) <= 1e-5
        assert result["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
        assert result["metrics"]["grad_norm"] == pytest.approx(oracle.norm(expected), rel=1e-5)


def test_sharding_after_use_changes_no_gradient(seen: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    for rank in seen:
        if "resharded" in rank["gradients"]:
            assert oracle.distance(rank["gradients"]["resharded"]["gradient"], plain["qwen2"][0]) <= 1e-5


def test_bfloat16_stays_near(seen: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    result = seen[0]["gradients"]["bfloat16"]
    assert 1e-4 < oracle.distance(result["gradient"], plain["qwen2"][0]) < 0.15
    assert result["metrics"]["loss"] == pytest.approx(plain["qwen2"][1], abs=0.05)


def test_five_steps_are_those_of_a_plain_loop(seen: list[dict[str, Any]], models: Path) -> None:
    network, bare = adapted(models, "qwen2"), oracle.plain_model(models / "qwen2")
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), 1e-3, eps=1e-7, weight_decay=0.1, foreach=False)
    base = oracle.all_logprobs(bare, random_experience(temperature=0.7))
    for step in range(5):
        before = oracle.all_logprobs(network, SOURCE) if step == 4 else None
        loss = oracle.plain_loss(network, SOURCE, OLD)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
        optimizer.step()
        for rows, rank in zip(SHARES[len(seen)], seen, strict=True):
            result = rank["five_steps"]["steps"][step]
            torch.testing.assert_close(result["base"], base[list(rows)], atol=1e-5, rtol=0)
            if before is not None:
                torch.testing.assert_close(result["logprobs"], before[list(rows)], atol=5e-5, rtol=5e-5)
            assert result["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
            assert result["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    expected = {name: p.detach() for name, p in own_names(trained).items()}
    for rank in seen:
        sent = rank["five_steps"]["adapter"]
        assert oracle.distance({name: t / 2 if ".lora_B." in name else t for name, t in sent.items()}, expected) < 1e-5
    merged = {name: p.detach() for name, p in network.merge_and_unload().named_parameters()}
    assert oracle.distance(seen[0]["five_steps"]["merged"], merged) < 1e-5


def test_the_stream_has_the_checkpoint_s_names_and_leaves_the_base_alone(seen: list[dict[str, Any]], models: Path) -> None:
    stored = load_file(models / "qwen2" / "model.safetensors")
    for rank in seen:
        result = rank["five_steps"]
        assert same(result["base"], stored)  # after steps and broadcasts, bit for bit
        assert same(result["merged"], result["again"])
        assert result["manifest"] == [(name, tuple(t.shape), t.dtype) for name, t in result["merged"].items()]
        assert result["merged"].keys() == stored.keys()
        for name, tensor in result["merged"].items():
            a, b = (result["adapter"].get(part) for part in adapter.parts_of(name))
            expected = stored[name] if a is None or b is None else stored[name] + b @ a
            torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)


def test_a_new_adapter_changes_nothing(seen: list[dict[str, Any]], models: Path) -> None:
    stored = load_file(models / "qwen2" / "model.safetensors")
    for rank in seen:
        full, half = rank["beginning"]["float32"], rank["beginning"]["bfloat16"]
        assert same(full["merged"], stored)
        assert same({name: tensor.float() for name, tensor in half["merged"].items()}, {n: t.bfloat16().float() for n, t in stored.items()})
        for each, dtype in ((full, torch.float32), (half, torch.bfloat16)):
            assert torch.equal(*each["scores"])
            assert each["base"] == {dtype}
            assert each["masters"] == {torch.float32}
        shapes = adapter.shapes(oracle.plain_model(models / "qwen2"), layer_names(full["adapter"]), 4)
        assert same(full["adapter"], {name: adapter.initial(name, shape, 3) for name, shape in shapes.items()})


def layer_names(parts: dict[str, Tensor]) -> list[str]:
    return [name.removesuffix(".lora_A.weight") for name in parts if name.endswith(".lora_A.weight")]


def test_going_to_the_host_and_back_changes_nothing(seen: list[dict[str, Any]], models: Path) -> None:
    network = adapted(models, "uneven")
    moments = sum(2 * p.nbytes for p in network.parameters() if p.requires_grad)
    for rank in seen:
        result = rank["placement"]
        own = moments / (backends.shards(rank["backend"]) or len(seen))
        assert result["sizes"][1] <= 1.6 * own  # the base has none (and ZeRO 3 keeps a gradient of the adapter with them)
        assert same(*result["streams"])
        assert same(*result["adapters"])
        assert same(*result["after"])
        assert result["metrics"][0] == result["metrics"][1]


def test_a_checkpoint_has_the_adapter_alone(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        result = rank["checkpoints"]
        assert not [name for name in result["names"] if ".lora_" not in name and name not in ("lora.base", "optimizer.steps")]
        assert "another model" in result["refused"]
        assert result["metrics"][0] == result["metrics"][1]
        assert same(*result["weights"])


def test_export_is_the_merged_model(seen: list[dict[str, Any]]) -> None:
    loaded = oracle.plain_model(seen[0]["folder"] / "merged")
    assert same({name: p.detach() for name, p in loaded.named_parameters()}, seen[0]["five_steps"]["merged"])


def test_the_adapter_is_exported_as_a_peft_folder(seen: list[dict[str, Any]], models: Path) -> None:
    folder = seen[0]["folder"] / "adapter"
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(models / "qwen2")
    merged = peft.PeftModel.from_pretrained(oracle.plain_model(Path(base)), folder).merge_and_unload()
    expected = seen[0]["five_steps"]["merged"]
    assert oracle.distance({name: p.detach() for name, p in merged.named_parameters()}, expected) < 1e-6  # W + s · B A added up elsewhere


@pytest.mark.parametrize(("case", "says"), [("no module", "'qqq' matches no module"), ("on one rank", "is no peft folder")])
def test_what_does_not_fit_is_refused_on_all_ranks(case: str, says: str, seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert says in rank["refusals"][case]
