"""What every critic must do, on a model of its own and on the Actor's hidden states: it is held against a plain single-process loop.

A test file takes all of it (`from tests.trainers.critic_contract import *`) and makes of `launched` a fixture `seen`.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rft.spec import FSDP2Trainer
from rft.testing.models import tiny_config, tiny_model, tiny_tokenizer
from rft.trainers.schedule import learning_rate
from tests.launching import torchrun
from tests.trainers import oracle
from tests.trainers.valued import CLIP, PlainCritic, valued_experience

SCRIPT = Path(__file__).with_name("critic_ranks.py")
SOURCE = valued_experience()
SHARES = {1: [range(8)], 2: [range(5), range(5, 8)]}
PLAIN = {"whole": "valued", "clipped": "valued", "uneven": "uneven", "padded": "windowed", "causal": "causal"}
"""Cases that differ in more than how rows are cut, and their models."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal LM, classifiers whose heads are value heads, and folders that no critic can begin with."""
    folder = tmp_path_factory.mktemp("models")
    _ = tiny_model(folder / "causal", "qwen2", tied=False)
    classifier(folder / "valued")
    classifier(folder / "uneven", vocab=321)
    classifier(folder / "windowed")
    change(folder / "windowed", use_sliding_window=True, sliding_window=4, layer_types=["full_attention", "sliding_attention"])
    classifier(folder / "two labels", labels=2)
    classifier(folder / "token classifier", kind="TokenClassification")
    change(tiny_model(folder / "no head", "qwen2"), architectures=["Qwen2ForSequenceClassification"], id2label={"0": "value"})
    other: Any = tiny_tokenizer()
    other.add_tokens(["<|other|>"])
    other.save_pretrained(tiny_model(folder / "other tokenizer", "qwen2"))
    return folder


def classifier(folder: Path, *, vocab: int = 320, labels: int = 1, kind: str = "SequenceClassification") -> None:
    """Saves a tiny classifier with random weights."""
    import transformers

    config = tiny_config("qwen2", tied=False, vocab=vocab)
    config.num_labels = labels
    torch.manual_seed(1)
    model: Any = getattr(transformers, f"AutoModelFor{kind}").from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def change(folder: Path, **settings: Any) -> None:
    """Of a model's configuration."""
    config = folder / "config.json"
    _ = config.write_text(json.dumps(json.loads(config.read_text()) | settings))


@pytest.fixture(scope="module")
def launched(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, tuple[str, ...]], Path]:
    """Runs all scenes of some backends on some ranks, once; and gives the folder of results."""

    @functools.cache
    def launch(ranks: int, backends: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("results")
        _ = torchrun(SCRIPT, models, folder, *backends, ranks=ranks, timeout=300)
        return folder

    return launch


def results(folder: Path, ranks: int, backend: str) -> list[dict[str, Any]]:
    """What every rank saw, in rank order."""
    seen = [torch.load(folder / backend / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    return [rank | {"shared": backend.startswith("shared")} for rank in seen]


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@functools.cache
def plain_gradient(folder: Path, clip: float | None, frozen: bool) -> tuple[dict[str, Tensor], float]:
    critic = PlainCritic(folder, frozen=frozen)
    _, loss = critic.valued(SOURCE, clip)
    loss.backward()
    return {name: p.grad for name, p in critic.trained().items() if p.grad is not None}, loss.item()


def test_the_gradient_is_that_of_a_plain_loop(seen: list[dict[str, Any]], models: Path) -> None:
    assert {"whole", "row by row", "a few rows", "an idle rank", "clipped"} <= seen[0]["gradients"].keys()
    for case, result in ((case, result) for rank in seen for case, result in rank["gradients"].items() if case != "bfloat16"):
        folder = models / ("causal" if seen[0]["shared"] else PLAIN.get(case, "valued"))
        expected, loss = plain_gradient(folder, CLIP if case == "clipped" else None, seen[0]["shared"])
        assert oracle.distance(result["gradient"], expected) <= 1e-5, case
        assert result["metrics"]["loss"] == pytest.approx(loss, rel=1e-5), case
        assert result["metrics"]["grad_norm"] == pytest.approx(oracle.norm(expected), rel=1e-5), case


def test_bfloat16_stays_near(seen: list[dict[str, Any]], models: Path) -> None:
    if not seen[0]["shared"]:
        result, (expected, loss) = seen[0]["gradients"]["bfloat16"], plain_gradient(models / "valued", None, False)
        assert 1e-4 < oracle.distance(result["gradient"], expected) < 0.05
        assert result["metrics"]["loss"] == pytest.approx(loss, rel=0.02)


def test_metrics_are_those_of_the_global_batch(seen: list[dict[str, Any]], models: Path) -> None:
    folder, mask = models / ("causal" if seen[0]["shared"] else "valued"), SOURCE.sampled
    with torch.no_grad():
        values = PlainCritic(folder)(SOURCE)[mask]
    assert SOURCE.returns is not None
    returns = SOURCE.returns[mask]
    expected = {
        "value_mean": values.mean().item(),
        "return_mean": returns.mean().item(),
        "value_loss": 0.5 * (values - returns).square().mean().item(),
        "value_clip_fraction": 0.0,
        "explained_variance": 1 - (returns - values).var().item() / returns.var().item(),
    }
    for case in ("whole", "row by row", "a few rows", "an idle rank"):
        for told in (rank["gradients"][case]["metrics"] for rank in seen):
            assert {name: told[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert seen[0]["shared"] or 0 < seen[0]["gradients"]["clipped"]["metrics"]["value_clip_fraction"] < 1


@functools.cache
def plain_steps(folder: Path, frozen: bool) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Five of them: values before each, its loss, norm and learning rate; and the last weights."""
    spec = FSDP2Trainer(lr=1e-3, eps=1e-7, weight_decay=0.1, schedule="cosine", warmup_steps=1, total_steps=9, max_grad_norm=0.5)
    critic, steps = PlainCritic(folder, frozen=frozen), list[dict[str, Any]]()
    trained = critic.trained()
    optimizer = torch.optim.AdamW(trained.values(), 0.0, spec.betas, spec.eps, spec.weight_decay, foreach=False)
    for step in range(5):
        values, loss = critic.valued(SOURCE, CLIP)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), spec.max_grad_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(spec, step)
        optimizer.step()
        steps.append({"values": values.detach(), "loss": loss.item(), "grad_norm": norm.item(), "lr": learning_rate(spec, step)})
    return steps, {name: p.detach() for name, p in trained.items()}


def test_five_steps_are_those_of_a_plain_loop(seen: list[dict[str, Any]], models: Path) -> None:
    steps, weights = plain_steps(models / ("causal" if seen[0]["shared"] else "valued"), seen[0]["shared"])
    for step, expected in enumerate(steps):
        for rows, rank in zip(SHARES[len(seen)], seen, strict=True):
            result = rank["five_steps"]["steps"][step]
            torch.testing.assert_close(result["values"], expected["values"][list(rows)], atol=5e-5, rtol=5e-5)
            for name in ("loss", "grad_norm", "lr"):
                assert result[name] == pytest.approx(expected[name], rel=1e-4), name
    state = {name.removeprefix("model."): tensor for name, tensor in seen[0]["five_steps"]["state"].items() if name.startswith("model.")}
    assert oracle.distance(state, weights) < 1e-5
    assert int(seen[0]["five_steps"]["state"]["optimizer.steps"]) == 5


def test_values_are_those_of_a_plain_forward_on_any_rows(seen: list[dict[str, Any]], models: Path) -> None:
    critic = PlainCritic(models / ("causal" if seen[0]["shared"] else "valued"))
    with torch.no_grad():
        _ = critic.score.weight.copy_(seen[0]["values"]["head"])
        expected = critic(SOURCE)
    assert float(expected.abs().max()) > 0.01
    for rows, rank in zip(SHARES[len(seen)], seen, strict=True):
        result = rank["values"]
        assert result["some"].dtype == torch.float32
        torch.testing.assert_close(result["some"], expected[list(rows)], atol=1e-5, rtol=0)
        assert len(result["idle"]) in (0, 8)
        assert result["none"].shape == (0, SOURCE.tokens.shape[1])
    torch.testing.assert_close(seen[0]["values"]["idle"], expected, atol=1e-5, rtol=0)


def test_the_language_model_s_head_is_left_out_and_a_new_value_head_is_zero(seen: list[dict[str, Any]]) -> None:
    moments = seen[0]["gradients"]["whole" if seen[0]["shared"] else "causal"]["gradient"]
    assert "score.weight" in moments
    assert "lm_head.weight" not in moments
    assert all(not bool(moment.any()) for name, moment in moments.items() if name != "score.weight")  # a head of 0 passes nothing on
    assert bool(moments["score.weight"].any())


def test_all_ranks_have_the_same_to_the_last_bit(seen: list[dict[str, Any]]) -> None:
    for rank in seen[1:]:
        assert same(rank["five_steps"]["state"], seen[0]["five_steps"]["state"])


def test_going_to_the_host_and_back_changes_nothing(seen: list[dict[str, Any]]) -> None:
    for result in (rank["placement"] for rank in seen):
        assert [what.split(":")[0] for what in result["refused"]] == ["RoleError", "RoleError"]
        assert "the Critic's optimizer lies on the host" in result["refused"][0]
        assert set(result["held"]) <= {0}
        assert result["sizes"] == result["after"]
        assert min(result["sizes"]) > 0
        assert result["metrics"][0] == result["metrics"][1]
        assert all(same(*pair) for pair in result["saved"])


def test_one_goes_on_from_what_another_saved(seen: list[dict[str, Any]]) -> None:
    for result in (rank["round_trip"] for rank in seen):
        assert result["metrics"][0] == result["metrics"][1] == result["metrics"][2]
        assert all(same(state, result["states"][0]) for state in result["states"])


def test_bad_batches_are_refused_on_all_ranks_and_nothing_is_left_of_them(seen: list[dict[str, Any]]) -> None:
    for result in (rank["refused"] for rank in seen):
        nan, early, missing, shown = (refusal for (refusal,) in result["refused"])
        assert "the optimizer was not touched" in nan
        assert f"rank {len(seen) - 1}: the token at column 0 cannot be sampled" in early
        assert f"rank {len(seen) - 1}: BadInput: critic_loss needs returns; write experience(" in missing
        assert "nothing to learn" in shown  # demonstrations have no returns
        assert result["metrics"][0] == result["metrics"][1]
        assert same(*result["states"])


def test_a_shared_critic_does_not_move_the_actor(seen: list[dict[str, Any]]) -> None:
    for result in (rank["the_actor_is_not_moved"] for rank in seen if rank["shared"]):
        assert result["metrics"][0] == result["metrics"][1]
        assert same(*result["states"])


def test_a_warm_up_changes_no_version_and_the_engine_stays_fresh(seen: list[dict[str, Any]]) -> None:
    for result in (rank["steps"] for rank in seen):
        assert result["losses"] == sorted(result["losses"], reverse=True)
        assert result["losses"][-1] < result["losses"][0]
        assert result["version"][0] == result["version"][1]
        assert result["took"] == 5  # two moves of the optimizer, and three steps
        assert result["same tokens"]
        assert same(*result["weights"])
        assert not bool(result["values"].any())
        assert result["restored"][0] == result["restored"][1]


def test_what_a_state_does_not_allow_is_refused_before_anything_runs(seen: list[dict[str, Any]]) -> None:
    for result, shared in ((rank["steps"], rank["shared"]) for rank in seen):
        assert "the mini-batch has no returns; write experience(" in result["no returns"][0]
        assert "returns are not finite at sampled tokens" in result["NaN returns"][0] or "rank" in result["NaN returns"][0]
        assert "objective must be a function of (values, micro-batch, totals)" in result["no objective"][0]
        assert "CRITIC_OPTIMIZER is on the host; write instead: state = reload(" in result["optimizer away"][0]
        assert all("RoleError" in what for what in result["none"])
        if shared:
            assert all("computed by the Actor, which is offloaded" in what for what in result["the Actor away"])
        else:
            assert "CRITIC is on the host; write instead: state = reload(" in result["values away"][0]


def test_what_is_no_start_of_a_critic_is_refused_by_name(seen: list[dict[str, Any]]) -> None:
    for result in (rank["bad_models"] for rank in seen if not rank["shared"]):
        for name in ("two labels", "token classifier"):
            assert "a value head needs its head to be one linear function without a bias" in result[name][0]
        assert "is to read the Actor's tokens, and has others: its tokenizer has" in result["other tokenizer"][0]
        assert "lacks weights, or has them in another shape: score.weight" in result["no head"][0]
