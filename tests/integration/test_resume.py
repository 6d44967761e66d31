"""A run that was stopped, or killed at any moment, goes on as if nothing had been; on two ranks, with real parts.

The job itself is `resume_job.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rft
from rft.checkpoint.folder import NAME
from rft.data.prompts import tokenise
from rft.models import find_model
from rft.steps import restore, save
from rft.testing.models import tiny_model
from tests.integration.job import QUESTIONS, spec_of
from tests.integration.resume_job import KILLS, STEPS, Progress, digest, one_batch
from tests.launching import torchrun

IN_SAVES_AND_A_BATCH = 549
"""Drawn so that rank 0 is killed in the second save, rank 1 in the next one, and rank 0 in the middle of a batch."""
JOB = Path(__file__).with_name("resume_job.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, str]:
    """What one rank has saved after a batch, and the digest of it."""
    folder, data = tmp_path_factory.mktemp("alone"), tokenise(QUESTIONS, find_model(str(model)).tokenizer, max_tokens=64)
    with rft.launch(spec_of(str(model), "transformers")) as begun:
        state, progress, _ = one_batch(begun, Progress(), data)
        _ = save(state, folder, progress)
        return folder, digest(state)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory, model: Path, alone: tuple[Path, str]) -> tuple[Path, str]:
    """Where an unbroken run has been, one from each of its checkpoints, and one from what one rank has saved; and what they printed."""
    out = tmp_path_factory.mktemp("stops")
    return out, torchrun(JOB, "stops,roles,carried", model, out, alone[0], timeout=600)


@pytest.fixture(scope="module")
def out(printed: tuple[Path, str]) -> Path:
    return printed[0]


def told(out: Path, scene: str, rank: int) -> Any:
    return json.loads((out / f"{scene}-{rank}.json").read_text())


@pytest.fixture(scope="module")
def whole(out: Path) -> list[Any]:
    """The unbroken run, as each rank saw it."""
    return [told(out, "stops", rank)["0"] for rank in range(2)]


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_a_run_that_stopped_after_any_batch_goes_on_as_if_it_had_not(out: Path, whole: list[Any], stop: int) -> None:
    for rank, unbroken in enumerate(whole):
        resumed = told(out, "stops", rank)[str(stop)]
        assert resumed["seen"] == unbroken["seen"][stop:], "tokens, metrics, random numbers, and the loop's own values"
        assert resumed["digest"] == unbroken["digest"], "weights and moments, bit for bit"


def test_the_stops_are_at_epoch_boundaries_too_and_something_is_learnt(whole: list[Any]) -> None:
    assert [seen["epoch"] for seen in whole[0]["seen"]] == [0, 0, 1]
    assert all(seen["metrics"]["grad_norm"] > 0 for seen in whole[0]["seen"])


def test_a_critic_and_a_moving_average_go_on_too(out: Path) -> None:
    for rank in range(2):
        seen = told(out, "roles", rank)
        assert seen["resumed"] == seen["whole"]
        assert seen["whole"]["seen"]["critic"]["grad_norm"] > 0


# ---- killed ----


def kill(model: Path, out: Path, whole: list[Any], kills: int, seed: int) -> None:
    """Ranks are killed at each of the first `kills` starts; what the last start ends with is what the unbroken run did."""
    environment = {"KILLS": str(kills), "SEED": str(seed)}
    printed = torchrun(JOB, "killed", model, out, restarts=kills, timeout=200 * (kills + 1), env=environment)
    assert printed.count("is killed") == told(out, "killed", 0)["starts"] - 1, printed
    for rank, unbroken in enumerate(whole):
        ended = told(out, "killed", rank)
        assert ended["digest"] == unbroken["digest"], printed
        whole_ones = [name for name in ended["left"] if NAME.fullmatch(name)]
        assert len(whole_ones) <= 3, "two are kept; a kill in the last save may leave one that would have gone"
        steps = [json.loads(line) for line in (out / f"killed-{rank}.jsonl").read_text().splitlines()]
        assert {seen["step"] for seen in steps} == set(range(STEPS))
        assert all(seen == unbroken["seen"][seen["step"]] for seen in steps), "a batch that came again was the same"


def test_a_run_whose_ranks_are_killed_ends_where_an_unbroken_one_does(model: Path, tmp_path: Path, whole: list[Any]) -> None:
    kill(model, tmp_path, whole, KILLS, seed=IN_SAVES_AND_A_BATCH)
    assert told(tmp_path, "killed", 0)["starts"] == KILLS + 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 7))
def test_twenty_more_kills(model: Path, tmp_path: Path, whole: list[Any], seed: int) -> None:
    kill(model, tmp_path, whole, 4, seed)


# ---- on another number of ranks, and as an ordinary folder ----


def test_two_ranks_go_on_from_one_and_say_which_random_states_are_missing(printed: tuple[Path, str], alone: tuple[Path, str]) -> None:
    out, said = printed
    for rank in range(2):
        assert told(out, "carried", rank)["before"] == alone[1]
        assert told(out, "carried", rank)["seen"]["step"] == 1
    assert "was saved by 1 ranks: the random states of rank 1 are not in it" in said


def test_one_rank_goes_on_from_two(model: Path, out: Path, whole: list[Any]) -> None:
    data = tokenise(QUESTIONS, find_model(str(model)).tokenizer, max_tokens=64)
    with rft.launch(spec_of(str(model), "transformers")) as begun:
        state, progress = restore(begun, out / "whole", Progress())
        assert digest(state) == whole[0]["digest"]
        assert repr(progress) == whole[0]["seen"][-1]["run"]
        _, progress, seen = one_batch(state, progress, data)
        assert (seen["epoch"], progress.step) == (1, STEPS + 1)


def test_what_is_exported_is_what_a_launch_begins_with(out: Path, tmp_path: Path) -> None:
    half = tiny_model(tmp_path / "half", dtype=torch.bfloat16)
    with rft.launch(spec_of(str(half), "transformers")) as begun:
        state, _ = restore(begun, out / "whole", Progress())
        _ = rft.export(state, tmp_path / "exported")
        trained = weights(state)
    with rft.launch(spec_of(str(tmp_path / "exported"), "transformers")) as again:
        imported = weights(again)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    plain = loaded.state_dict()
    assert imported.keys() == trained.keys() <= plain.keys()
    for name, tensor in trained.items():
        rounded = tensor.bfloat16()
        assert torch.equal(imported[name], rounded.float()), name
        assert torch.equal(plain[name], rounded), name


def weights(state: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.devices.trainer.stream_weights()}
