import dataclasses as dc
import math

import pytest

import rft
from rft.recording import record, shown
from rft.rewards.scoring import score
from rft.telemetry.records import read_lines
from rft.telemetry.run_folder import Elsewhere, next_folder
from rft.testing import SAMPLING, scripted_launch, scripted_prompts
from tests.rollouts import rollouts

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard.*")


@dc.dataclass(frozen=True)
class Config:
    lr: float = 1e-5


def test_every_step_inside_is_a_phase_and_none_outside(tmp_path):
    folder = tmp_path / "run"
    with scripted_launch() as state:
        state = rft.broadcast(state)
        with record(state, folder, title="t", config=Config(), steps=1) as run:
            state = rft.wake(state)
            _ = rft.generate(state, scripted_prompts(), SAMPLING)
            run.log(0, {"reward": 1.0})
            state = rft.sleep(state)
        _ = rft.refresh(state)
    phases = [(line["name"], line["step"]) for line in read_lines(folder / "phases.jsonl")]
    assert phases == [("wake", 0), ("generate", 0), ("sleep", 1)]
    assert (folder / "report.html").is_file()


def test_a_refused_step_is_no_phase(tmp_path):
    with scripted_launch() as state, record(state, tmp_path / "run", title="t", config=Config(), steps=1):
        with pytest.raises(rft.IllegalStep):
            rft.wake(state)
        _ = rft.broadcast(state)
    assert [line["name"] for line in read_lines(tmp_path / "run" / "phases.jsonl")] == ["broadcast"]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    with scripted_launch() as state:
        monkeypatch.setattr(state.devices, "world", dc.replace(state.devices.world, rank=1))
        with record(state, tmp_path / "run", title="t", config=Config(), steps=1) as run:
            assert isinstance(run, Elsewhere)
            with run.phase("mine"):
                run.log(0, {"reward": 1.0})
                run.note(1, {"accuracy": 1.0})
                run.samples(0, [])
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_taken_is_refused_and_the_state_lives_on(tmp_path):
    with scripted_launch() as state:
        with record(state, tmp_path, title="t", config=Config(), steps=1):
            pass
        with pytest.raises(rft.BadInput, match="holds another run already"), record(state, tmp_path, title="t", config=Config(), steps=1):
            pass
        _ = rft.broadcast(state)


def test_folders_are_numbered(tmp_path):
    assert next_folder(tmp_path, "sums") == tmp_path / "sums-001"
    for name in ("sums-001", "sums-009", "sums-mine", "other-020"):
        (tmp_path / name).mkdir()
    assert next_folder(tmp_path, "sums") == tmp_path / "sums-010"
    assert next_folder(tmp_path / "nowhere", "sums").name == "sums-001"


def test_the_first_rows_are_shown_with_what_failed():
    rows = rollouts(*"abcdefghij")
    scored = score(rows, lambda s: math.nan if s.response == "b" else 1.0)
    samples = shown(rows, scored, count=3)
    assert [(s.question, s.response, s.answer, s.reward) for s in samples] == [("q", r, "3", None if r == "b" else 1.0) for r in "abc"]
    assert [bool(s.note) for s in samples] == [False, True, False]
    assert len(shown(rows, scored, count=99)) == 10
