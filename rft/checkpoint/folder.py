"""The folder of a run's checkpoints: their names, the newest, and how many are kept.

A checkpoint is written under a name that ends in `.partial`, and gets its own name by a rename when all of it is on the disk. One that
goes is renamed to `.old` first. So whatever has a checkpoint's name has been whole once, and what was interrupted is known by its name.
Numbers grow with every save, whatever the version: the highest is the newest. A folder belongs to one run at a time.
"""

import dataclasses as dc
import logging
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from rft.checkpoint import manifest
from rft.errors import BadInput
from rft.shapes import require_path

log = logging.getLogger("rft")

NAME = re.compile(r"checkpoint-(\d+)-version-(\d+)")
PARTIAL, OLD = ".partial", ".old"


@dc.dataclass(frozen=True, order=True)
class Checkpoint:
    """A folder that has a checkpoint's name."""

    number: int
    version: int
    path: Path


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Those in `folder` by their names, the newest first; none where there is no such folder. Raises `BadInput` for one of them."""
    if not folder.is_dir():
        return []
    if NAME.fullmatch(folder.absolute().name):
        raise BadInput(f"{folder} is a checkpoint itself; give the folder that it lies in, {str(folder.absolute().parent)!r}")
    matches = [(NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return sorted((Checkpoint(int(m[1]), int(m[2]), path) for m, path in matches if m), reverse=True)


def newest_checkpoint(folder: Path | str) -> Path | None:
    """The newest checkpoint in `folder` whose files are all there, in full; None where there is none. Reads no checksums.

    Those that are passed over are said. Raises `BadInput` where `folder` is a checkpoint itself.
    """
    for found in checkpoints(require_path("newest_checkpoint(folder): folder", folder)):
        problem = manifest.problem(found.path)
        if problem is None:
            return found.path
        log.warning("%s is not whole (%s); passing over it", found.path, problem)
    return None


def interrupted(folder: Path) -> list[Path]:
    """What a save has left behind that did not come to its end."""
    if not folder.is_dir():
        return []
    names = [(path, path.name.removesuffix(path.suffix)) for path in folder.iterdir() if path.suffix in (PARTIAL, OLD)]
    return sorted(path for path, name in names if NAME.fullmatch(name))


def begin(folder: Path, version: int) -> Path:
    """Removes what an earlier save has left behind, and makes the folder that the next checkpoint is written in. Raises `OSError`, and
    `BadInput` where `folder` is a checkpoint itself."""
    number = max((found.number for found in checkpoints(folder)), default=0) + 1
    folder.mkdir(parents=True, exist_ok=True)
    for path in interrupted(folder):
        log.warning("removing %s, which an interrupted save has left behind", path)
        shutil.rmtree(path)
    partial = folder / f"checkpoint-{number:06}-version-{version}{PARTIAL}"
    partial.mkdir()
    return partial


def finish(partial: Path) -> Path:
    """Gives a checkpoint its name: from now on it is the newest one. Its files must be on the disk. Raises `OSError`."""
    path = partial.with_name(partial.name.removesuffix(PARTIAL))
    for written in (*filter(Path.is_dir, partial.rglob("*")), partial):
        sync(written)
    _ = partial.rename(path)
    sync(path.parent)
    return path


def keep_newest(folder: Path, count: int, damaged: Collection[Path] = ()) -> None:
    """Removes all whole checkpoints but the newest `count`. One that cannot be removed is said, and stays.

    Whole is one whose files are all there, in full: their content is read when it is restored alone. What was found `damaged` then is not.
    """
    whole = [found.path for found in checkpoints(folder) if found.path not in damaged and manifest.problem(found.path) is None]
    for path in whole[count:]:
        old = path.with_name(path.name + OLD)
        try:
            _ = path.rename(old)
            shutil.rmtree(old)
        except OSError as error:
            log.warning("the old checkpoint %s cannot be removed (%s); remove it by hand", path, error)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
