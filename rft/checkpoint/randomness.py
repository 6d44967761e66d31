"""The random states of one rank as plain data: Python's, NumPy's (its global one, where it has been imported), PyTorch's on CPU and GPU."""

import base64
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.checkpoint import manifest


def file_of(rank: int) -> str:
    """Where a rank's random states are, below a checkpoint's folder."""
    return f"random/{rank:05}.json"


def write(checkpoint: Path, rank: int, device: torch.device) -> None:
    """Writes this rank's states. Raises `OSError`."""
    path = checkpoint / file_of(rank)
    path.parent.mkdir(exist_ok=True)
    manifest.write_bytes(path, json.dumps(states(device)).encode())


def read(checkpoint: Path, rank: int) -> dict[str, Any]:
    """What `write` wrote."""
    read: dict[str, Any] = json.loads((checkpoint / file_of(rank)).read_bytes())
    return read


def states(device: torch.device) -> dict[str, Any]:
    """All of them; reading a state does not move it."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {"python": [version, list(words), gauss], "torch": _text(torch.get_rng_state())}
    if "numpy" in sys.modules:
        import numpy as np

        state: Any = np.random.get_state(legacy=True)
        kind, keys, position, has_gauss, cached = state
        found["numpy"] = [kind, keys.tolist(), position, has_gauss, cached]
    if device.type == "cuda":
        found["cuda"] = _text(torch.cuda.get_rng_state(device))
    return found


def install(found: dict[str, Any], device: torch.device) -> None:
    """Takes states back. Those of a GPU are left out on a rank that has none."""
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_tensor(found["torch"]))
    if "numpy" in found:
        import numpy as np

        kind, keys, position, has_gauss, cached = found["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in found and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(found["cuda"]), device)


def _text(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
