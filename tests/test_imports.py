"""Every module can be the first that is imported: no import goes round in a circle."""

import pkgutil
import subprocess
import sys

import pytest

import rft
from tests.launching import ROOT

EACH_FIRST = """
import importlib, sys
for name in sys.argv[1:]:
    for loaded in [module for module in sys.modules if module.split(".")[0] == "rft"]:
        del sys.modules[loaded]
    try:
        _ = importlib.import_module(name)
    except ImportError as error:
        if (error.name or "rft").startswith("rft"):  # others are packages that are not installed here
            print(f"import {name}: {error}")
"""


def modules() -> list[str]:
    """All modules but those that need an engine that may not be installed, and those that run when they are imported."""
    names = [module.name for module in pkgutil.walk_packages(rft.__path__, "rft.")]
    return [name for name in names if "vllm" not in name and "__main__" not in name]


@pytest.mark.slow
def test_any_module_may_be_imported_first() -> None:
    assert len(modules()) > 50
    run = [sys.executable, "-c", EACH_FIRST, *modules()]
    ended = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert ended.stdout == ""
