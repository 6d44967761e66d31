"""What a checkpoint holds, and what goes wrong with one, on the scripted runtime: nothing is touched, and nothing is lost."""

import dataclasses as dc
import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rft
from rft.checkpoint import folder, manifest, tensors
from rft.data.prompts import Cursor
from rft.effects.runtime import runtime_of
from rft.errors import BadInput, CheckpointFailed, RoleError, WrongBatch
from rft.ledger import joint_of
from rft.steps import restore, save
from rft.testing import scripted_devices, scripted_launch
from tests.refusals import State, refused, sampled, trained, with_old

RUN = {"cursor": Cursor(epoch=1, position=4), "step": 3}
FRESH = {"cursor": Cursor(), "step": 0}


def stepped(state: State) -> State:
    """One batch further, asleep."""
    return rft.sleep(rft.finish_batch(trained(*with_old(state))))


@pytest.fixture
def begun() -> Iterator[State]:
    with scripted_launch() as state:
        yield state


@pytest.fixture
def saved(begun: State, tmp_path: Path) -> State:
    """Of version 1, with a checkpoint in `tmp_path`."""
    state = stepped(begun)
    _ = save(state, tmp_path, RUN)
    return state


def only(parent: Path) -> Path:
    (path,) = parent.iterdir()
    return path


# ---- what it holds ----


def test_a_fresh_launch_goes_on_where_another_was(saved: State, tmp_path: Path) -> None:
    with scripted_launch() as begun:
        state, run = restore(begun, tmp_path, FRESH)
        assert run == RUN
        assert joint_of(state) == joint_of(begun)
        assert (state.version, state.generation) == (1, saved.generation + 1)
        assert scripted_devices(state).trainer.weights["body"].tolist() == [1.0, 1.0]
        assert scripted_devices(state).trainer.moments.tolist() == [1.0, 1.0, 1.0]
        assert sampled(rft.refresh(state)).version == 1


def test_batches_are_numbered_on_and_the_watch_goes_on_watching(saved: State, tmp_path: Path) -> None:
    with scripted_launch() as begun:
        state, _ = restore(begun, tmp_path, FRESH)
        remembered = {"wakes": 1, "recent": {"probe": [0.0], "rollouts": [0.0]}}
        assert runtime_of(state).watch.memory() == runtime_of(saved).watch.memory() == remembered
        assert sampled(rft.refresh(state)).batch.startswith("2@")


@pytest.mark.parametrize("as_they_are", [True, False], ids=["as sampled", "assembled"])
def test_what_a_restore_took_back_is_of_another_actor(begun: State, tmp_path: Path, as_they_are: bool) -> None:
    def in_hand(state: State) -> tuple[State, rft.Rollouts]:
        rollouts = sampled(state := rft.refresh(state))
        return rft.sleep(state), rollouts if as_they_are else rft.assemble((rollouts, torch.arange(len(rollouts))))

    state, before = in_hand(begun)
    _ = save(state, tmp_path, RUN)
    state, taken_back = in_hand(stepped(state))
    state, _ = restore(state, tmp_path, FRESH)
    assert state.version < taken_back.version
    for again in range(2):  # the second time there is an Actor of that version again, with other weights
        with refused(state, WrongBatch, "compute_old_logprobs", f"sampled from version {taken_back.version} of other weights"):
            _ = rft.compute_old_logprobs(state, taken_back)
        with refused(state, WrongBatch, "adopt_logprobs", "of what a restore has taken back"):
            _ = rft.adopt_logprobs(state, taken_back, source="engine")
        if not again:
            state = stepped(state)
    state, after = in_hand(state)
    assert after.version == taken_back.version
    _ = rft.compute_old_logprobs(state, before, after, max_lag=1)


def test_a_checkpoint_has_the_batches_that_led_to_it_whatever_was_restored_before(begun: State, tmp_path: Path) -> None:
    def in_hand(state: State) -> tuple[State, rft.Rollouts]:
        rollouts = sampled(state := rft.refresh(state))
        return rft.sleep(state), rollouts

    state, first = in_hand(begun)
    _ = save(state, tmp_path / "early", RUN)
    state, to_late = in_hand(stepped(state))
    _ = save(state := stepped(state), tmp_path / "late", RUN)
    state, _ = restore(state, tmp_path / "early", FRESH)
    state, aside = in_hand(stepped(state))
    with scripted_launch() as anew:
        state, _ = restore(anew, tmp_path / "late", FRESH)
        with refused(state, WrongBatch, "compute_old_logprobs", "sampled from version 1 of other weights"):
            _ = rft.compute_old_logprobs(state, aside, max_lag=9)
        state = rft.finish_batch(rft.compute_old_logprobs(state, first, to_late, max_lag=9))
        state, _ = restore(state, tmp_path / "early", FRESH)
        state = stepped(stepped(stepped(state)))
        with refused(state, WrongBatch, "compute_old_logprobs", "what a restore has taken back"):
            _ = rft.compute_old_logprobs(state, to_late, max_lag=9)
        _ = rft.compute_old_logprobs(state, first, max_lag=9)
    with scripted_launch() as other, refused(other, WrongBatch, "compute_old_logprobs", "of another run"):
        _ = rft.compute_old_logprobs(other, first, max_lag=9)


def test_saving_changes_nothing_and_the_state_lives_on(begun: State, tmp_path: Path) -> None:
    state = rft.refresh(begun)
    random_before = random.getstate(), torch.get_rng_state()
    path = save(state, tmp_path, None)
    assert path == tmp_path / "checkpoint-000001-version-0"
    assert random.getstate() == random_before[0]
    assert torch.equal(torch.get_rng_state(), random_before[1])
    assert len(sampled(state)) == 4


def test_random_numbers_go_on_where_they_were(begun: State, tmp_path: Path) -> None:
    def numbers() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(())), float(torch.randn(()))]

    _ = numbers()
    _ = save(begun, tmp_path, None)
    expected = numbers()
    _ = numbers()
    _ = restore(begun, tmp_path, None)
    assert numbers() == expected


def test_the_same_version_can_be_saved_again_and_the_newest_two_are_kept(saved: State, tmp_path: Path) -> None:
    for step in (4, 5):
        _ = save(saved, tmp_path, {**RUN, "step": step})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000002-version-1", "checkpoint-000003-version-1"]
    assert restore(saved, tmp_path, FRESH)[1]["step"] == 5


@pytest.mark.usefixtures("saved")
def test_no_pickle_is_written(tmp_path: Path) -> None:
    names = {str(path.relative_to(only(tmp_path))) for path in tmp_path.rglob("*") if path.is_file()}
    assert {Path(name).suffix for name in names} == {".json", ".safetensors"}
    assert names == set(manifest.read(only(tmp_path))) | {"manifest.json"}


def test_files_are_cut_where_they_grow_too_large(begun: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "FILE_BYTES", 8)
    _ = save(stepped(begun), tmp_path, None)
    assert len(list((only(tmp_path) / "tensors").iterdir())) == 3
    with scripted_launch() as again:
        state, _ = restore(again, tmp_path, None)
        assert scripted_devices(state).trainer.moments.tolist() == [1.0] * 3


# ---- what is refused ----


def test_what_cannot_be_saved_is_refused_before_anything_is_written(begun: State, tmp_path: Path) -> None:
    with refused(begun, BadInput, "run['objective'] is a builtins.function", "leave this out and make it anew"):
        _ = save(begun, tmp_path / "new", {"objective": rft.grpo()})
    with refused(begun, BadInput, "keep must be an int of at least 1, got 0"):
        _ = save(begun, tmp_path / "new", None, keep=0)
    half: Any = 1.5
    with refused(begun, BadInput, "keep must be an int of at least 1, got 1.5"):
        _ = save(begun, tmp_path / "new", None, keep=half)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("nowhere", "says"), [(None, "must be Path | str, got None"), ("", "must not be empty; the current folder is '.'")]
)
def test_what_names_no_folder_is_refused(nowhere: Any, says: str, begun: State) -> None:
    calls: dict[str, Callable[[], object]] = {
        "save(state, folder, run): folder": lambda: save(begun, nowhere, 1),
        "restore(state, folder, run): folder": lambda: restore(begun, nowhere, 1),
        "export(state, path): path": lambda: rft.export(begun, nowhere),
        "export_adapter(state, path): path": lambda: rft.export_adapter(begun, nowhere),
        "newest_checkpoint(folder): folder": lambda: rft.newest_checkpoint(nowhere),
    }
    for named, call in calls.items():
        with refused(begun, BadInput, f"{named} {says}"):
            _ = call()


def test_a_part_that_must_be_there_is_asked_for_and_nothing_is_left(begun: State, tmp_path: Path) -> None:
    state = rft.offload(begun, rft.ACTOR_OPTIMIZER)
    with refused(state, RoleError, "optimizer"):
        _ = save(state, tmp_path, None)
    assert list(tmp_path.iterdir()) == []


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
WRONG: dict[str, tuple[Change, str]] = {
    "missing": (
        lambda t: {n: v for n, v in t.items() if n != "model.head"},
        "actor.model.head is not in the checkpoint",
    ),
    "surplus": (lambda t: {**t, "model.tail": torch.zeros(2)}, "actor.model.tail of the checkpoint is not here"),
    "shape": (lambda t: {**t, "model.body": torch.zeros(3)}, "actor.model.body is (3,) float32 in the checkpoint, and (2,) float32 here"),
    "dtype": (
        lambda t: {**t, "optimizer.moments": t["optimizer.moments"].half()},
        "actor.optimizer.moments is (3,) float16 in the checkpoint, and (3,) float32 here",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_other_tensors_are_refused_by_name(begun: State, tmp_path: Path, wrong: str) -> None:
    change, says = WRONG[wrong]
    trainer: Any = scripted_devices(begun).trainer
    right = trainer.saved()
    trainer.saved = lambda: change(right)
    _ = save(begun, tmp_path, None)
    with scripted_launch() as other, refused(other, BadInput, says, "nothing was installed"):
        _ = restore(other, tmp_path, None)


@pytest.mark.usefixtures("saved")
def test_a_checkpoint_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    with scripted_launch() as other:
        runtime: Any = runtime_of(other)
        runtime.model = type(runtime.model)(Path(), type("Config", (), {"model_type": "llama"})(), None)
        with refused(other, BadInput, "is of a None model, and this launch has a llama one"):
            _ = restore(other, tmp_path, FRESH)


@pytest.mark.usefixtures("saved")
def test_another_structure_of_the_run_is_refused(tmp_path: Path) -> None:
    with scripted_launch() as other, refused(other, BadInput, "run is a dict in the checkpoint, and Cursor(seed, epoch, position)"):
        _ = restore(other, tmp_path, Cursor())


@pytest.mark.usefixtures("saved")
def test_another_seed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with scripted_launch(seed=5) as other:
        _ = restore(other, tmp_path, FRESH)
    assert "was saved by a run of seed 0, and this one has 5" in caplog.text


def test_an_adapter_over_another_model_is_said(begun: State, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def adapter(state: State, model: str) -> State:
        devices, trainer = runtime_of(state), scripted_devices(state).trainer
        devices.spec = dc.replace(devices.spec, model=model)
        trainer.saved = lambda: {"model.adapter": torch.zeros(2)}
        trainer.install = lambda _: None
        return state

    _ = save(adapter(begun, "base"), tmp_path, None)
    for model, said in (("base", False), ("another", True)):
        caplog.clear()
        with scripted_launch() as other:
            _ = restore(adapter(other, model), tmp_path, None)
        assert ("is what was trained on top of base, and this launch has another" in caplog.text) is said


def test_another_format_is_refused(saved: State, tmp_path: Path) -> None:
    path = only(tmp_path)
    facts = json.loads((path / "facts.json").read_text())
    manifest.write_json(path / "facts.json", {**facts, "format": 99})
    manifest.write(path, manifest.describe(path, manifest.files_below(path)))
    with refused(saved, BadInput, "has format 99, and this version of rft reads 2"):
        _ = restore(saved, tmp_path, FRESH)


# ---- damage ----


def spoil(path: Path) -> None:
    """The same size, another content."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    _ = path.write_bytes(content)


@pytest.mark.parametrize("name", ["facts.json", "run.json", "run.safetensors", "random/00000.json", "tensors/*.safetensors"])
def test_a_damaged_checkpoint_is_passed_over_and_said(saved: State, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    newest = save(saved, tmp_path, {**RUN, "step": 99})
    spoil(next(newest.glob(name)))
    state, run = restore(saved, tmp_path, FRESH)
    assert run["step"] == 3
    assert f"{newest} is not whole: the checksum of {name[:8]}" in caplog.text
    assert "remove it, or bring its files back" in caplog.text
    spoil(next(folder.checkpoints(tmp_path)[1].path.glob(name)))
    with refused(state, BadInput, "there is no whole checkpoint in", f"{newest} is not whole", "checkpoint-000001-version-1 is not whole"):
        _ = restore(state, tmp_path, FRESH)


def test_damaged_checkpoints_do_not_push_a_whole_one_out(saved: State, tmp_path: Path) -> None:
    good = only(tmp_path)
    for step in (98, 99):
        spoil(save(saved, tmp_path, {**RUN, "step": step}, keep=3) / "run.json")
    state, run = restore(saved, tmp_path, FRESH)
    assert run["step"] == 3
    newest = save(state, tmp_path, {**RUN, "step": 4}, keep=2)
    assert good.is_dir()
    spoil(newest / "run.json")
    assert restore(state, tmp_path, FRESH)[1]["step"] == 3, "the newest is damaged, too, and the good one is still there"


def test_a_checkpoint_that_lost_a_file_is_passed_over_and_said(saved: State, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = save(saved, tmp_path, {**RUN, "step": 99})
    (newest / "run.json").unlink()
    assert restore(saved, tmp_path, FRESH)[1]["step"] == 3
    assert f"{newest} is not whole: run.json is missing; passing over it" in caplog.text


def test_what_was_cut_off_is_ignored_and_said(saved: State, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cut = tmp_path / "checkpoint-000002-version-2.partial"
    _ = shutil.copytree(only(tmp_path), cut)
    state, run = restore(saved, tmp_path, FRESH)
    assert run == RUN
    assert f"ignoring {cut}, which an interrupted save has left behind; the next save removes it" in caplog.text
    _ = save(state, tmp_path, RUN)
    assert not cut.exists()


# ---- failures while saving ----


def full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["fsync", "rename", "first fsync", "mkdir"])
def test_a_disk_that_fails_loses_nothing_and_leaves_nothing(
    saved: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    kept = only(tmp_path)
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    with monkeypatch.context() as broken:
        if where == "fsync":
            calls = iter([os.fsync] * 3)
            broken.setattr(os, "fsync", lambda fd, calls=calls: next(calls, full_disk)(fd))
        else:
            broken.setattr(os, where.split()[-1], full_disk)
        with refused(saved, CheckpointFailed, "No space left on device"):
            _ = save(saved, tmp_path, RUN, keep=1)
    assert only(tmp_path) == kept
    assert {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before
    assert save(saved, tmp_path, RUN, keep=1) == only(tmp_path)


def test_a_checkpoint_where_its_folder_is_wanted_is_said(begun: State, tmp_path: Path) -> None:
    path = save(begun, tmp_path, None)
    for call in (lambda: restore(begun, path, None), lambda: save(begun, path, None)):
        with refused(begun, BadInput, "is a checkpoint itself; give the folder that it lies in", str(tmp_path)):
            _ = call()
    assert only(tmp_path) == path


def test_a_file_in_the_way_is_said(begun: State, tmp_path: Path) -> None:
    _ = (tmp_path / "file").write_text("")
    with refused(begun, CheckpointFailed, "File exists", "file"):
        _ = save(begun, tmp_path / "file", None)
    with refused(begun, BadInput, "there is no whole checkpoint"):
        _ = restore(begun, tmp_path / "file", None)


def test_an_old_checkpoint_that_cannot_be_removed_stays_and_is_said(
    saved: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = only(tmp_path)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", refuse)
        newest = save(saved, tmp_path, RUN, keep=1)
    assert newest.is_dir()
    assert f"the old checkpoint {old} cannot be removed" in caplog.text
    _ = save(saved, tmp_path, RUN, keep=1)
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_folder_does_not_show_makes_no_checkpoint(begun: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "files_below", lambda _: {"facts.json"})
    with refused(begun, CheckpointFailed, "a file system that all nodes share", "random/00000.json"):
        _ = save(begun, tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_warnings_are_for_those_who_listen(saved: State, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rft"):
        _ = restore(saved, tmp_path, FRESH)
    assert [record.message for record in caplog.records if record.name == "rft"] == [
        f"restored {only(tmp_path)}: version 1, saved by 1 ranks"
    ]
