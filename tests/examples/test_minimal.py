"""The smallest example, as it stands, on a tiny model."""

import runpy
from pathlib import Path

from rft.testing.models import tiny_model
from tests.launching import ROOT


def test_it_runs_as_it_stands(tmp_path: Path) -> None:
    main = runpy.run_path(str(ROOT / "examples" / "minimal.py"), run_name="minimal")["main"]
    assert main(str(tiny_model(tmp_path)), steps=2) == [0.0, 0.0]
