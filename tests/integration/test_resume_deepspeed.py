"""A run goes on under another backend: weights and moments of FSDP2 under DeepSpeed, and back, at other numbers of ranks."""

import json
from pathlib import Path

import rft
from rft.data.prompts import tokenise
from rft.models import find_model
from rft.steps import restore, save
from rft.testing.models import tiny_model
from tests.integration.job import QUESTIONS, spec_of
from tests.integration.resume_job import Progress, digest, one_batch
from tests.launching import torchrun

JOB = Path(__file__).with_name("resume_job.py")


def test_deepspeed_goes_on_from_fsdp2_and_fsdp2_from_deepspeed(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    data = tokenise(QUESTIONS, find_model(str(model)).tokenizer, max_tokens=64)
    with rft.launch(spec_of(str(model), "transformers")) as begun:
        state, progress, _ = one_batch(begun, Progress(), data)
        _ = save(state, tmp_path / "fsdp2", progress)
        before = digest(state)
    _ = torchrun(JOB, "carried", model, tmp_path, tmp_path / "fsdp2", "deepspeed", timeout=600)
    told = json.loads((tmp_path / "carried-0.json").read_text())
    assert told["before"] == before
    assert told["after"] != before
    with rft.launch(spec_of(str(model), "transformers")) as begun:
        state, progress = restore(begun, tmp_path / "carried", Progress())
        assert digest(state) == told["after"]
        assert (state.version, progress.step) == (2, 2)
