"""What needs vLLM, SGLang or DeepSpeed lies in files or folders named after it, gets its mark, and is not collected without it."""

import importlib.util
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("rft.testing.engines")

OPTIONAL = ("vllm", "sglang", "deepspeed")


def needs(path: Path) -> list[str]:
    """What a path below `tests/` is named after."""
    return [name for name in OPTIONAL if any(name in part for part in path.relative_to(Path(__file__).parent).parts)]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out what could not even be imported."""
    return True if any(importlib.util.find_spec(name) is None for name in needs(collection_path)) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks by path."""
    for item in items:
        for name in needs(item.path):
            item.add_marker(getattr(pytest.mark, name))


@pytest.fixture(scope="module", autouse=True)
def no_world_is_left() -> Generator[None]:
    """Closes the process group that a module's fixtures have opened: the next module's launches are to open, and close, their own."""
    yield
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
