"""The list of a checkpoint's files with their sizes and checksums: what says that it is whole."""

import concurrent.futures
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

MANIFEST = "manifest.json"
THREADS = min(8, os.cpu_count() or 1)


class File(TypedDict):
    """What is known of a file."""

    bytes: int
    blake2b: str


def describe(checkpoint: Path, names: Iterable[str]) -> dict[str, File]:
    """Sizes and checksums of files, by their names below the checkpoint's folder. Reads all of them. Raises `OSError`."""
    paths = {name: checkpoint / name for name in sorted(names)}
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:  # hashing lets other threads run
        return dict(zip(paths, pool.map(_describe, paths.values()), strict=True))


def files_below(checkpoint: Path) -> set[str]:
    """Names of all files in a checkpoint but the manifest."""
    return {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()} - {MANIFEST}


def write(checkpoint: Path, files: Mapping[str, File]) -> None:
    """Writes the manifest. Raises `OSError`."""
    write_json(checkpoint / MANIFEST, {"files": dict(files)})


def read(checkpoint: Path) -> dict[str, File]:
    """The files that the manifest lists. Raises `OSError` or `ValueError` where it cannot be read."""
    listed: Any = json.loads((checkpoint / MANIFEST).read_bytes())
    try:
        files = {str(name): File(bytes=int(of["bytes"]), blake2b=str(of["blake2b"])) for name, of in listed["files"].items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it is no list of files: {error!r}") from error
    if not files:
        raise ValueError("it lists no files")
    return files


def problem(checkpoint: Path) -> str | None:
    """Why a checkpoint is not whole, by its manifest and the sizes of its files; None if it is."""
    try:
        files = read(checkpoint)
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, of in files.items():
        path = checkpoint / name
        size = path.stat().st_size if path.is_file() else None
        if size != of["bytes"]:
            return f"{name} is missing" if size is None else f"{name} has {size} bytes, and {of['bytes']} were written"
    return None


def damaged(checkpoint: Path, files: Mapping[str, File]) -> list[str]:
    """Of these files, those whose contents are not what was written. Reads all of them."""
    try:
        now = describe(checkpoint, files)
    except OSError as error:
        return [f"{error.filename} cannot be read ({error.strerror})"]
    return [f"the checksum of {name} differs" for name in sorted(files) if now[name] != files[name]]


def write_json(path: Path, value: object) -> None:
    """Writes a file of JSON, and waits until it is on the disk. Raises `OSError`."""
    write_bytes(path, json.dumps(value, allow_nan=False, indent=1).encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file, and waits until it is on the disk. Raises `OSError`."""
    with path.open("wb") as opened:
        _ = opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _describe(path: Path) -> File:
    with path.open("rb") as opened:
        digest = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16))
        return File(bytes=opened.tell(), blake2b=digest.hexdigest())
