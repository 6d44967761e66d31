"""What must be the same on all ranks, since that of one is what counts."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rft.checkpoint import values
from rft.effects.runtime import Runtime
from rft.errors import BadInput
from rft.parallel.lockstep import Lockstep

WEIGHTS = ("*.safetensors", "*.bin")
"""Files of a model's weights: those of the first kind that there are any of."""
READING = ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.*")
"""Files that texts are read by."""
SAID = ("config.json", "generation_config.json", "adapter_config.json")
"""Files that are compared entry by entry."""
BOOKKEEPING = re.compile(r"transformers_version|_.*")
"""Entries of a configuration that say nothing of the model."""
LOOKS, LOOK = 16, 1 << 16
"""Places of a file of weights that are looked at, and the bytes of each."""


def require_alike(call: str, everywhere: Sequence[Mapping[str, Any]]) -> None:
    """Raises `BadInput`, on all ranks, where an argument of theirs differs. `everywhere` has those of each rank, by name."""
    first = everywhere[0]
    for rank, own in enumerate(everywhere):
        for name in (name for name in first if own[name] != first[name]):
            both = f"{name} is {first[name]!r} on rank 0 and {own[name]!r} on rank {rank}"
            raise BadInput(f"{call}: {both}; all ranks write or read one and the same: give every rank the same {name}")


def require_one_tree(call: str, runtime: Runtime, plain: values.Plain) -> None:
    """Raises `BadInput`, on all ranks, where they bring different trees: only one of them is kept. Collective."""
    if len(set(runtime.lockstep.gather(plain.digest()))) == 1:
        return
    first, *others = runtime.lockstep.gather(plain.marks)
    ranks = enumerate(others, start=1)
    rank, path = next((rank, path) for rank, marks in ranks for path in sorted(first | marks) if first.get(path) != marks.get(path))
    raise BadInput(
        f"{call}: {path} is {first.get(path)} on rank 0 and {others[rank - 1].get(path)} on rank {rank}; a run is one tree, alike on all "
        "ranks: bring what each rank has of its own together first (all_rows, average)"
    )


def require_same_models(folders: Mapping[str, Path], lockstep: Lockstep) -> None:
    """Raises `BadInput`, on all ranks, where their folders hold different models, of which rank 0's would count. Collective.

    `folders` are those of each rank by the field that names the model; they may have other names on other nodes. Of large files the size
    and some of the bytes are compared, which tell apart what was trained differently.
    """
    with lockstep.agreement() as exchange:
        exchange.own = {name: marks(folder) for name, folder in folders.items()}
    first: Mapping[str, Mapping[str, str]] = exchange.everywhere[0]
    for rank, own in enumerate(exchange.everywhere):
        for name, ours in first.items():
            theirs = own[name]
            for what in (what for what in sorted(ours.keys() | theirs.keys()) if ours.get(what) != theirs.get(what)):
                both = f"{what} is {ours.get(what, 'missing')} on rank 0 and {theirs.get(what, 'missing')} on rank {rank}"
                raise BadInput(f"LaunchSpec.{name} is not the same model on all ranks: {both}; give every rank a copy of the same folder")


def marks(folder: Path) -> dict[str, str]:
    """What tells one model, or adapter, from another: what its configurations say, and size and digest of its files. Raises `BadInput`."""
    weights: list[Path] = next(filter(None, (sorted(folder.glob(kind)) for kind in WEIGHTS)), [])
    files = [*weights, *(file for kind in READING for file in sorted(folder.glob(kind)))]
    try:
        said = {name: json.loads((folder / name).read_text(encoding="utf-8")) for name in SAID if (folder / name).is_file()}
        entries = {
            f"{key} in {name}": repr(config[key]) for name, config in said.items() for key in config if not BOOKKEEPING.fullmatch(key)
        }
        return entries | {file.name: f"{file.stat().st_size} bytes with digest {_digest(file)}" for file in files}
    except (OSError, ValueError) as error:
        raise BadInput(f"the model in {folder} cannot be read: {error}; copy or download its files anew") from error


def _digest(file: Path) -> str:
    """Of all of a small file, and of places all over a large one."""
    size, found = file.stat().st_size, hashlib.blake2b(digest_size=4)
    places = range(0, size, LOOK) if size <= LOOKS * LOOK else [look * (size - LOOK) // (LOOKS - 1) for look in range(LOOKS)]
    with file.open("rb") as opened:
        for place in places:
            _ = opened.seek(place)
            found.update(opened.read(LOOK))
    return found.hexdigest()
