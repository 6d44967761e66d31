"""Wherever a save is cut off, the run before it or the one after it is there, and the next save removes what is left."""

import json
import subprocess
import sys
from pathlib import Path

from tests.launching import ROOT


def test_a_save_may_be_cut_off_anywhere(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "tests.checkpoint.every_point", str(tmp_path)]
    ended = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert len(found) >= 20, "as many places as there are"
    whole = [each["after"] == each["before"] + 1 for each in found]
    assert whole == sorted(whole), "from some place on it is the new one"
    assert whole[0] is False
    assert whole[-1] is True
    for each in found:
        assert each["run"] == each["after"]
        assert each["weights"] == [each["after"]]
    assert {suffix for each in found for suffix in each["left"]} == {".partial", ".old"}
