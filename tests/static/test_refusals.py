"""What the type checker refuses: pyright over programs that are never executed, and that say themselves where it must fail."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PROGRAMS = sorted((HERE / "programs").glob("*.py"))
Finding = tuple[int, str]
"""A line, counted from 1, and the rule that it breaks."""


@pytest.fixture(scope="module")
def findings() -> dict[str, set[Finding]]:
    """By program: what pyright says about it."""
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(HERE / "pyrightconfig.json")]
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    report: dict[str, Any] = json.loads(ended.stdout)
    assert report["summary"]["filesAnalyzed"] == len(PROGRAMS), ended.stdout
    found: dict[str, set[Finding]] = {path.name: set() for path in PROGRAMS}
    for one in report["generalDiagnostics"]:
        found[Path(one["file"]).name].add((one["range"]["start"]["line"] + 1, one.get("rule", one["message"])))
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_each_mistake_fails_on_its_own_line_and_nothing_else_does(program: Path, findings: dict[str, set[Finding]]) -> None:
    expected = set(_expected(program.read_text()))
    assert findings[program.name] - expected == set(), "pyright refuses what it should accept"
    assert expected - findings[program.name] == set(), "pyright accepts what it should refuse"


def test_the_programs_hold_mistakes_and_correct_loops() -> None:
    counts = {path.stem: len(list(_expected(path.read_text()))) for path in PROGRAMS}
    assert counts["refused"] >= 40
    assert counts["accepted"] == 0


def _expected(source: str) -> list[Finding]:
    marks = ((number, re.search(r"# expect: (.+)$", line)) for number, line in enumerate(source.splitlines(), start=1))
    return [(number, rule.strip()) for number, mark in marks if mark for rule in mark[1].split(",")]
