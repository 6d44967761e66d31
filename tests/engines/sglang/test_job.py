"""The main job with SGLang, as a user starts it."""

from pathlib import Path

import pytest

from rft.telemetry.records import read_lines
from rft.testing.models import tiny_model
from tests.examples.test_job import SMALL, SUMS
from tests.launching import torchrun


@pytest.mark.slow
def test_a_job_samples_with_sglang(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    output = torchrun(SUMS, "--model", model, "--folder", tmp_path / "run", "--engine", "sglang", *SMALL, ranks=2, timeout=600)
    assert "accuracy on 3 held-out questions" in output
    steps = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "seconds" in line]
    assert [line["step"] for line in steps] == [0, 1]
    assert all(abs(line["kl"]) < 1e-4 for line in steps), "of the first step of a batch, and in fp32"
