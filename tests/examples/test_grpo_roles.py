"""GRPO with a Reference and with reward models, by the examples of those names, on two ranks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import rft
from rft.telemetry.records import read_lines
from rft.testing.models import tiny_model
from tests.launching import ROOT, torchrun
from tests.trainers.judges import other_tokenizer, plain_scores, tiny_judge

EXAMPLES, SCRIPT = ROOT / "examples", Path(__file__).with_name("grpo_ranks.py")
SMALL = ("--steps", 3, "--prompts", 2, "--samples", 4, "--max-new-tokens", 4, "--held-out", 2, "--dtype", "float32", "--lr", 1e-3)
RUNS = ("loss", "reward", "judged")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "tiny")
    tiny_judge(folder / "kind")
    tiny_judge(folder / "brief", "TokenClassification", tokenizer=other_tokenizer(template=True))
    return folder


@pytest.fixture(scope="module")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs."""
    folder = tmp_path_factory.mktemp("grpo")
    path = {"PYTHONPATH": f"{EXAMPLES}:{ROOT}"}
    _ = torchrun(SCRIPT, folder, models, "--model", models / "tiny", *SMALL, timeout=500, env=path)
    return folder


def steps(finished: Path, run: str) -> list[dict[str, Any]]:
    """The metrics of each iteration."""
    return [line for line in read_lines(finished / run / "metrics.jsonl") if "seconds" in line]


@pytest.mark.parametrize("run", RUNS)
def test_all_of_them_learn_for_three_iterations(run: str, finished: Path) -> None:
    assert [step["step"] for step in steps(finished, run)] == [0, 1, 2]
    for step in steps(finished, run):
        assert all(math.isfinite(value) for value in step.values())
        assert step["grad_norm"] > 0
    assert (finished / run / "model" / "config.json").is_file()


@pytest.mark.parametrize("run", RUNS[:2])
def test_the_actor_leaves_the_reference_from_the_first_step_on(run: str, finished: Path) -> None:
    drifts = [step["drift"] for step in steps(finished, run)]
    assert drifts[0] == 0, "before the first step the two are one, bit for bit"
    assert all(abs(drift) > 1e-4 for drift in drifts[1:])


def test_the_penalty_is_in_the_loss_or_in_the_reward(finished: Path) -> None:
    in_loss, in_reward = steps(finished, "loss"), steps(finished, "reward")
    assert in_loss[0]["reference_kl"] == in_reward[0]["reference_kl"] == pytest.approx(0, abs=1e-6)
    for step in (*in_loss[1:], *in_reward[1:]):
        assert step["reference_kl"] > 1e-5
    assert in_loss[0]["reward"] == in_reward[0]["reward"], "both begin with the same responses"
    assert in_loss[2]["loss"] != in_reward[2]["loss"]


@pytest.mark.parametrize("run", RUNS)
def test_each_role_is_on_the_device_only_while_it_is_used(run: str, finished: Path) -> None:
    names = [line["name"] for line in read_lines(finished / run / "phases.jsonl") if line["name"] in ("reload", "offload", *ASKED)]
    asked = ["reference_logprobs"] if run != "judged" else ["model_rewards", "model_rewards"]
    assert names == [name for _ in range(3) for question in asked for name in ("reload", question, "offload")]


ASKED = ("reference_logprobs", "model_rewards")


def test_all_three_sources_are_told_apart(finished: Path) -> None:
    for step in steps(finished, "judged"):
        assert 0 <= step["rule"] <= 1
        assert len({step["rule"], step["kind"], step["brief"], step["reward"]}) == 4
        assert step["reward"] == pytest.approx(step["rule"], abs=1e-5), "what is standardised adds nothing to the mean"


def test_reward_models_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import grpo_rewards

    with pytest.raises(rft.BadInput, match="must end in different names"):
        _ = grpo_rewards.GrpoRewards(model="m", reward_models=("a/judge", "b/judge"))


def test_a_stand_in_is_the_difference_of_two_words(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import reward_models
    from transformers import AutoModelForCausalLM

    row = [ord(c) for c in "What is 2 + 3?5"]
    logits = (
        AutoModelForCausalLM.from_pretrained(models / "tiny", dtype=torch.bfloat16)(input_ids=torch.tensor([row])).logits[0, -1].float()
    )
    for kind in ("SequenceClassification", "TokenClassification"):
        made = reward_models.stand_in(models / "tiny", tmp_path / kind, kind, "Yes", "No")
        vocabulary = rft.models.find_model(str(made)).tokenizer.get_vocab()
        expected = logits[vocabulary["Y"]] - logits[vocabulary["N"]]
        assert plain_scores(made, [row]).item() == pytest.approx(expected.item(), abs=0.05)
