"""What cannot work with real parts is refused before anything is touched, and the state lives on; on one rank."""

import dataclasses as dc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import rft
from rft.data.prompts import Cursor, Share, next_prompts, tokenise
from rft.models import find_model
from rft.objectives import LossTerms
from rft.spec import LoRA
from rft.testing.models import tiny_model
from tests.integration.job import QUESTIONS, SAMPLING, spec_of

State = rft.RuntimeState[Any, Any, Any, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def begun(model: Path) -> Iterator[State]:
    with rft.launch(spec_of(str(model), "transformers")) as state:
        yield state


@pytest.fixture(scope="module")
def prompts(model: Path) -> rft.Prompts:
    data = tokenise(QUESTIONS, find_model(str(model)).tokenizer, max_tokens=64)
    return next_prompts(data, Cursor(), 2, Share())[0]


def test_tokens_that_the_model_does_not_know(begun: State, prompts: rft.Prompts) -> None:
    state = rft.refresh(begun)
    with pytest.raises(rft.BadInput, match="a token outside of the model's vocabulary"):
        _ = rft.generate(state, dc.replace(prompts, tokens=prompts.tokens + 100_000), SAMPLING)
    with pytest.raises(rft.BadInput, match=r"stop_tokens=\(1000000000,\)"):
        _ = rft.generate(state, prompts, dc.replace(SAMPLING, stop_tokens=(10**9,)))
    assert len(rft.generate(state, prompts, SAMPLING)) == 2 * SAMPLING.samples
    none = dc.replace(prompts, tokens=prompts.tokens[:0], mask=prompts.mask[:0], ids=prompts.ids[:0], texts=(), answers=())
    assert rft.generate(state, none, SAMPLING).responses == (), "a rank may have no prompts, and takes part"


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        (lambda scores, _micro, _totals: LossTerms(loss=scores.logprobs.detach().sum(), metrics={}), "its loss has no gradient"),
        (lambda scores, _micro, _totals: scores.logprobs.sum(), "an objective returns LossTerms"),
    ],
)
def test_objectives_that_teach_nothing(begun: State, prompts: rft.Prompts, objective: Any, says: str) -> None:
    state = rft.refresh(begun)
    rollouts = rft.generate(state, prompts, SAMPLING)
    scored = rft.adopt_logprobs(rft.sleep(state), rollouts, source="first_step")
    experience = rft.experience(rollouts, torch.zeros(len(rollouts)), torch.ones(rollouts.tokens.shape) * rollouts.sampled)
    minibatch = rft.take(experience, torch.arange(len(experience)))
    with pytest.raises(rft.BadInput, match=says):
        _ = rft.train_step(scored, minibatch, objective)
    after, _ = rft.train_step(scored, minibatch, rft.grpo())
    assert after.version == 1


def test_an_export_that_cannot_be_written_to_its_end(begun: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("huggingface_hub.save_torch_state_dict", full)
    with pytest.raises(rft.BadInput, match=r"nothing could be written to .*: I/O error: No space left on device"):
        _ = rft.export(begun, tmp_path / "model")
    monkeypatch.undo()
    assert (rft.export(begun, str(tmp_path / "model")) / "config.json").is_file()


def test_an_export_replaces_an_earlier_one_and_nothing_else(begun: State, model: Path, tmp_path: Path) -> None:
    folder, link = rft.export(begun, tmp_path / "model"), tmp_path / "newest"
    _ = (folder / "model-00001-of-00002.safetensors").write_bytes(b"of an export that was cut otherwise")
    link.symlink_to(folder)
    assert rft.export(begun, link) == link
    assert link.is_symlink(), "it leads to what was replaced"
    assert sorted(f.name for f in folder.iterdir()) == sorted(f.name for f in rft.export(begun, tmp_path / "other").iterdir())
    (folder / "notes").mkdir()
    _ = (folder / "README.md").write_text("of the user")
    with pytest.raises(rft.BadInput, match=r"other things lie there, and would be lost: README.md, notes; name a new folder"):
        _ = rft.export(begun, folder)
    assert (folder / "README.md").read_text() == "of the user"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "newest", "other"]
    with pytest.raises(rft.BadInput, match="the model that was launched lies there, and would be lost"):
        _ = rft.export(begun, model)
    assert (model / "model.safetensors").is_file()


def test_an_adapter_of_another_scale_or_base(model: Path, tmp_path: Path) -> None:
    def adapted(of: Path, alpha: float) -> rft.LaunchSpec:
        spec = spec_of(str(of), "transformers")
        return dc.replace(spec, trainer=dc.replace(spec.trainer, lora=LoRA(rank=2, alpha=alpha)))

    other = tiny_model(tmp_path / "other", seed=1)
    with rft.launch(adapted(model, 4.0)) as state:
        _ = rft.save(state, tmp_path / "saved", {"step": 1})
    for of, alpha in ((model, 64.0), (other, 4.0)):
        with rft.launch(adapted(of, alpha)) as state:
            with pytest.raises(rft.BadInput, match="rank, alpha and base model must be the same"):
                _ = rft.restore(state, tmp_path / "saved", {"step": 0})
            assert rft.average(state, {}) == {}
