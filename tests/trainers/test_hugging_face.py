from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft.engines.protocol import Request
from rft.engines.transformers import build
from rft.errors import BadInput
from rft.models import find_model
from rft.parallel.world import open_world
from rft.sampling import Sampling
from rft.spec import TransformersEngine
from rft.testing.models import tiny_model, tiny_tokenizer
from rft.trainers import hugging_face


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True, layers=1)


def load(path: Path) -> Any:
    return hugging_face.load(find_model(str(path)), checkpointing=False)


def test_blocks_are_the_layers(folder: Path) -> None:
    model = load(folder)
    assert hugging_face.blocks(model) == list(model.model.layers)


def test_a_model_that_does_not_say_what_its_blocks_are_is_refused(folder: Path) -> None:
    model = load(folder)
    model._no_split_modules = None
    with pytest.raises(BadInput, match="_no_split_modules"):
        hugging_face.blocks(model)


@pytest.mark.parametrize("tied", [True, False])
def test_names_are_those_of_the_file(tied: bool, tmp_path: Path) -> None:
    model = load(tiny_model(tmp_path, "qwen2", tied=tied, layers=1))
    assert sorted(hugging_face.named_tensors(model)) == sorted(load_file(tmp_path / "model.safetensors"))


def test_buffers_come_after_the_parameters_and_only_the_persistent_ones(folder: Path) -> None:
    model = load(folder)
    model.model.register_buffer("kept", torch.ones(2))
    model.model.register_buffer("left", torch.ones(2), persistent=False)
    names = list(hugging_face.named_tensors(model))
    assert names[-1] == "model.kept"
    assert "model.left" not in names
    assert "model.rotary_emb.inv_freq" not in names


def test_dropout_is_off(tmp_path: Path) -> None:
    tiny_model(tmp_path, layers=1)
    found = find_model(str(tmp_path))
    found.config.attention_dropout = 0.3
    model = hugging_face.load(found, checkpointing=False)
    assert model.model.layers[0].self_attn.attention_dropout == 0.0
    assert found.config.attention_dropout == 0.3  # and stays in what is exported


@pytest.mark.parametrize("change", ["missing", "reshaped"])
def test_weights_that_would_be_random_are_refused(change: str, folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    lost = tensors.pop(name)
    if change == "reshaped":
        tensors[name] = lost[:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=r"lacks weights, or has them in another shape: .*up_proj"):
        load(tmp_path)


def test_a_folder_without_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(BadInput, match="cannot be loaded"):
        load(tmp_path)


def test_a_broken_write_leaves_what_was_there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found, target = load(folder), find_model(str(folder)), tmp_path / "out"
    weights = {name: p.detach() for name, p in model.named_parameters()}
    hugging_face.write(target, weights, model, found)
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(type(found.tokenizer), "save_pretrained", full)
    with pytest.raises(OSError, match="disk full"):
        hugging_face.write(target, {name: w + 1 for name, w in weights.items()}, model, found)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    monkeypatch.undo()
    hugging_face.write(target, weights, model, found)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_attention_that_caps_its_scores_is_computed_as_such(tmp_path: Path) -> None:
    """transformers' default attention leaves the cap out without a word; trainer and engine must not."""
    from transformers import AutoModelForCausalLM, Gemma2Config

    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Gemma2Config(
        **sizes, num_key_value_heads=2, head_dim=8, initializer_range=0.5, attn_logit_softcapping=0.5, query_pre_attn_scalar=8
    )
    torch.manual_seed(0)
    plain: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    plain.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    tokens = torch.arange(3, 15)[None]
    expected = plain(input_ids=tokens).logits.detach()
    loaded = hugging_face.load(find_model(str(tmp_path)), checkpointing=False).eval()
    torch.testing.assert_close(loaded(input_ids=tokens).logits, expected, atol=1e-5, rtol=1e-5)
    engine: Any = build(TransformersEngine(dtype="float32", max_model_len=64), find_model(str(tmp_path)), open_world(1, timeout_s=60))
    table = expected[0].log_softmax(-1)
    scores = [float(table[t - 1, tokens[0, t]]) for t in range(1, tokens.shape[1])]
    assert engine.score([tuple(tokens[0].tolist())])[0] == pytest.approx(scores, abs=1e-4)
    completion = engine.generate([Request(tokens=tuple(tokens[0].tolist()), seed=1)], Sampling(temperature=0, max_new_tokens=1))[0]
    assert completion.logprobs[0] == pytest.approx(float(table[-1].max()), abs=1e-4)
