import json
import logging
from pathlib import Path

import pytest

from rft.checkpoint import folder, manifest
from rft.errors import BadInput


def written(parent: Path, version: int, *, content: str = "x") -> Path:
    """A whole checkpoint with one file."""
    partial = folder.begin(parent, version)
    (partial / "inside").mkdir()
    _ = (partial / "inside" / "file").write_text(content)
    manifest.write(partial, manifest.describe(partial, ["inside/file"]))
    return folder.finish(partial)


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_checkpoints_are_numbered_and_the_newest_is_the_one_written_last(tmp_path: Path) -> None:
    for version in (5, 9, 9, 2):
        _ = written(tmp_path, version)
    assert [(c.number, c.version) for c in folder.checkpoints(tmp_path)] == [(4, 2), (3, 9), (2, 9), (1, 5)]
    assert folder.newest_checkpoint(tmp_path) == tmp_path / "checkpoint-000004-version-2"


@pytest.mark.parametrize("there", [True, False])
def test_there_may_be_none(tmp_path: Path, there: bool) -> None:
    parent = tmp_path if there else tmp_path / "nowhere"
    assert folder.checkpoints(parent) == folder.interrupted(parent) == []
    assert folder.newest_checkpoint(parent) is None


def test_as_many_as_are_wanted_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-mine").mkdir()
    _ = (tmp_path / "notes.old").write_text("")
    for version in range(4):
        _ = written(tmp_path, version)
    folder.keep_newest(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-000003-version-2", "checkpoint-000004-version-3", "checkpoint-mine", "notes.old"]


def test_what_is_known_to_be_damaged_does_not_count(tmp_path: Path) -> None:
    for version in range(4):
        _ = written(tmp_path, version)
    folder.keep_newest(tmp_path, 2, {tmp_path / "checkpoint-000002-version-1", tmp_path / "checkpoint-000003-version-2"})
    assert names(tmp_path) == [f"checkpoint-00000{n + 1}-version-{n}" for n in range(4)], "four, of which two are whole"
    folder.keep_newest(tmp_path, 1, {tmp_path / "checkpoint-000002-version-1", tmp_path / "checkpoint-000003-version-2"})
    assert names(tmp_path) == [f"checkpoint-00000{n + 1}-version-{n}" for n in (1, 2, 3)], "what is damaged stays, to be looked at"


def test_what_an_interrupted_save_has_left_is_no_checkpoint_and_goes_with_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = written(tmp_path, 1)
    _ = folder.begin(tmp_path, 2)
    _ = written(tmp_path / "elsewhere", 1).rename(tmp_path / "checkpoint-000009-version-4.old")
    assert folder.newest_checkpoint(tmp_path) == whole
    assert [path.name for path in folder.interrupted(tmp_path)] == [
        "checkpoint-000002-version-2.partial",
        "checkpoint-000009-version-4.old",
    ]
    with caplog.at_level(logging.WARNING, "rft"):
        partial = folder.begin(tmp_path, 3)
    assert names(tmp_path) == [whole.name, "checkpoint-000002-version-3.partial", "elsewhere"]
    assert partial.name == "checkpoint-000002-version-3.partial"
    assert "which an interrupted save has left behind" in caplog.text


def test_a_checkpoint_that_lost_something_is_not_whole_and_does_not_count(tmp_path: Path) -> None:
    first, second, third = (written(tmp_path, version) for version in (1, 2, 3))
    (second / "inside" / "file").unlink()
    _ = (third / "inside" / "file").write_text("xy")
    assert manifest.problem(first) is None
    assert manifest.problem(second) == "inside/file is missing"
    assert manifest.problem(third) == "inside/file has 2 bytes, and 1 were written"
    assert folder.newest_checkpoint(tmp_path) == first
    folder.keep_newest(tmp_path, 1)
    assert first.is_dir()


def test_a_checkpoint_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    for call in (folder.newest_checkpoint, folder.checkpoints, lambda path: folder.begin(path, 2)):
        with pytest.raises(BadInput, match=f"is a checkpoint itself; give the folder that it lies in, '{tmp_path}'"):
            _ = call(path)
    assert names(path) == ["inside", "manifest.json"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"files": 3}', '{"files": {}}', '{"files": {"a": 1}}', '{"files": {"a": {"bytes": 1}}}']
)
def test_a_manifest_that_is_none_makes_no_whole_checkpoint(tmp_path: Path, content: str) -> None:
    path = written(tmp_path, 1)
    _ = (path / "manifest.json").write_text(content)
    assert (manifest.problem(path) or "").startswith("manifest.json cannot be read")
    (path / "manifest.json").unlink()
    assert (manifest.problem(path) or "").startswith("manifest.json cannot be read")


def test_contents_are_known_by_their_checksums(tmp_path: Path) -> None:
    path = written(tmp_path, 1, content="abc")
    files = manifest.read(path)
    assert files == {"inside/file": {"bytes": 3, "blake2b": "cf4ab791c62b8d2b2109c90275287816"}}
    assert manifest.damaged(path, files) == []
    _ = (path / "inside" / "file").write_text("abd")
    assert manifest.problem(path) is None
    assert manifest.damaged(path, files) == ["the checksum of inside/file differs"]
    (path / "inside" / "file").unlink()
    assert manifest.damaged(path, files) == [f"{path}/inside/file cannot be read (No such file or directory)"]


def test_numbers_that_json_does_not_know_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        manifest.write_json(tmp_path / "x", {"a": float("nan")})
    manifest.write_json(tmp_path / "x", {"a": 1.5})
    assert json.loads((tmp_path / "x").read_text()) == {"a": 1.5}
