"""PPO of `examples/ppo.py` on two ranks: three iterations, the first of which is the Critic's alone, with both kinds of Critic."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rft
from rft.telemetry.records import read_lines
from rft.testing.models import tiny_model
from tests.launching import ROOT, torchrun

EXAMPLES, SCRIPT = ROOT / "examples", Path(__file__).with_name("ppo_ranks.py")
SMALL = (
    "--steps", 3, "--prompts", 2, "--samples", 2, "--max-new-tokens", 4, "--held-out", 2, "--dtype", "float32",
    "--minibatch", 2, "--epochs", 2, "--critic-warmup", 1, "--lr", 1e-3, "--critic-lr", 1e-3,
)  # fmt: skip
KINDS = ("own", "shared")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both runs."""
    folder = tmp_path_factory.mktemp("ppo")
    _ = torchrun(SCRIPT, folder, "--model", model, *SMALL, timeout=400, env={"PYTHONPATH": f"{EXAMPLES}:{ROOT}"})
    return folder


@pytest.fixture(params=KINDS)
def steps(request: pytest.FixtureRequest, finished: Path) -> list[dict[str, Any]]:
    """The metrics of each iteration."""
    return [line for line in read_lines(finished / request.param / "metrics.jsonl") if "seconds" in line]


def test_the_critic_learns_from_the_first_iteration_on_and_the_actor_after_its_warm_up(steps: list[dict[str, Any]]) -> None:
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps:
        assert all(math.isfinite(value) for value in step.values())
        assert step["critic/grad_norm"] > 0
        assert 0 < step["reward"] < 1
    assert ["grad_norm" in step for step in steps] == [False, True, True]
    assert all(step["grad_norm"] > 0 and step["kl"] > 0 for step in steps[1:])
    assert steps[0]["critic/value_mean"] != 0


def test_advantages_of_the_first_iteration_are_plain_returns(steps: list[dict[str, Any]]) -> None:
    """Of every token with γ λ near 1 and values of 0: between the reward discounted by λ³ and the reward itself."""
    assert 0.95**3 * steps[0]["reward"] * 0.5 < steps[0]["critic/return_mean"] < steps[0]["reward"] * 1.5


def test_the_penalty_is_measured_where_there_is_one(finished: Path) -> None:
    own, shared = (read_lines(finished / kind / "metrics.jsonl") for kind in KINDS)
    measured = [line["reference_kl"] for line in own if "reference_kl" in line]
    assert measured[0] == pytest.approx(0, abs=1e-6), "the Actor is the Reference yet"
    assert measured[-1] != pytest.approx(0, abs=1e-6)
    assert not any("reference_kl" in line for line in shared)


def test_both_models_are_trained(finished: Path, model: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for kind in KINDS:
        after = AutoModelForCausalLM.from_pretrained(finished / kind / "model").state_dict()
        assert after.keys() == before.keys()
        assert any(not torch.equal(after[name], before[name]) for name in before)


def test_a_row_whose_reward_failed_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import ppo

    from rft.testing import scripted_launch
    from tests.rollouts import rollouts as rows

    recipe = ppo.PPO(model="none").recipe(lambda _: 0.0)
    with scripted_launch() as state:
        rollouts = rows(*"abcdefgh")
        values = torch.rand(rollouts.tokens.shape).where(rollouts.sampled, torch.tensor(0.0))
        valid = torch.arange(len(rollouts)) != 3
        given = rft.Rewards(values=torch.ones(len(rollouts)), valid=valid, failures=())
        made = ppo.estimated(state, rollouts, given, values, None, recipe)
    assert made.returns is not None
    assert not bool(made.advantages[3].any())
    assert torch.equal(made.returns[3], values[3])
    whole = made.advantages[rollouts.sampled & valid[:, None]]
    assert float(whole.mean()) == pytest.approx(0, abs=1e-6)
    assert float(whole.std(correction=0)) == pytest.approx(1, rel=1e-5)
