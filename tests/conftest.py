"""What needs vLLM lies in files or folders named after it: those tests get the mark `vllm`, and are not collected where there is none."""

import importlib.util
import sys
from collections.abc import Generator
from pathlib import Path

import pytest


def needs_vllm(path: Path) -> bool:
    """Whether a path below `tests/` is named after vLLM."""
    return any("vllm" in part for part in path.relative_to(Path(__file__).parent).parts)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out what could not even be imported."""
    return True if needs_vllm(collection_path) and importlib.util.find_spec("vllm") is None else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks by path."""
    for item in items:
        if needs_vllm(item.path):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="module", autouse=True)
def no_world_is_left() -> Generator[None]:
    """Closes the process group that a module's fixtures have opened: the next module's launches are to open, and close, their own."""
    yield
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
