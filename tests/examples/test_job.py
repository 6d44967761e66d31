"""The example scripts as a user starts them, on a tiny model."""

import json
import logging
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rft.telemetry.records import read_lines
from rft.testing.models import tiny_model
from tests.launching import ROOT, torchrun

SMALL = ("--steps", 2, "--prompts", 2, "--samples", 2, "--max-new-tokens", 4, "--held-out", 3, "--dtype", "float32")
SUMS, GSM8K = ROOT / "examples" / "grpo_arithmetic.py", ROOT / "examples" / "grpo_gsm8k.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """(output, run folder) of a run of two steps on two ranks."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    return torchrun(SUMS, "--model", model, "--folder", folder, *SMALL, timeout=300), folder


def test_accuracy_is_told_before_and_after_and_only_once(finished):
    output, folder = finished
    assert len(re.findall(r"accuracy on 3 held-out questions: [\d.]+% before, [\d.]+% after", output)) == 1
    assert output.count("step 2/2") == 1
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl") if "accuracy" in line] == [0, 2]


def test_the_run_folder_has_everything(finished):
    _, folder = finished
    made = {path.name for path in folder.iterdir()}
    assert made == {"run.json", "metrics.jsonl", "phases.jsonl", "samples.jsonl", "tensorboard", "report.html", "model"}
    steps = [line for line in read_lines(folder / "metrics.jsonl") if "seconds" in line]
    assert [line["step"] for line in steps] == [0, 1]
    for name in ("reward", "length", "kl", "loss", "grad_norm", "tokens_per_second", "seconds/generate", "seconds/train_step"):
        assert all(isinstance(line[name], float) for line in steps), name
    names = [line["name"] for line in read_lines(folder / "phases.jsonl")]
    for name in ("broadcast", "wake", "generate", "sleep", "train_step", "export"):
        assert name in names
    assert {line["reward"] for line in read_lines(folder / "samples.jsonl")} <= {0.0, 1.0}
    assert json.loads((folder / "run.json").read_text())["config"]["lr"] == 1e-5


def test_the_trained_model_is_an_ordinary_folder(finished, model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(finished[1] / "model")
    before = AutoModelForCausalLM.from_pretrained(model)
    assert AutoTokenizer.from_pretrained(finished[1] / "model").chat_template
    assert [p.shape for p in trained.parameters()] == [p.shape for p in before.parameters()]


@pytest.fixture
def alone(monkeypatch):
    """Runs a script in this process, on one rank, and leaves logging and environment as they were."""

    def run(script, *args):
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, args)])
        monkeypatch.syspath_prepend(script.parent)
        runpy.run_path(str(script), run_name="__main__")

    logger, environment = logging.getLogger("rft"), dict(os.environ)
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield run
    logger.handlers[:], logger.level, logger.propagate = before
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--max-prompt-tokens", 20), r"BadInput: question \d+ is \d+ tokens long as a prompt, more than max_tokens=20"),
        (("--steps", 0), "--steps must be at least 1, got 0"),
        (("--save-every", -1), "--save-every must be at least 0, got -1"),
        (("--model", "/nowhere/at/all"), "BadInput: '/nowhere/at/all' is neither a folder nor a model"),
        (("--held-out", -1), "BadInput: sums needs"),
    ],
)
def test_bad_input_ends_with_the_reason_alone(model, tmp_path, alone, monkeypatch, args, says):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as ended:
        alone(SUMS, "--model", model, "--folder", tmp_path / "run", *args)
    assert re.search(says, ended.value.code)
    assert not (tmp_path / "run").exists()


def test_a_job_that_was_stopped_goes_on_as_if_it_had_not(model, tmp_path, alone, capsys):
    def ran(folder, *more):
        alone(SUMS, "--model", model, "--folder", tmp_path / folder, *SMALL, *more)
        return [line for line in read_lines(tmp_path / folder / "metrics.jsonl") if "loss" in line]

    whole = ran("whole", "--steps", 3)
    assert len(ran("stopped", "--steps", 1, "--save-every", 1)) == 1
    resumed = ran("stopped", "--steps", 3, "--save-every", 1, "--keep", 3)
    assert [line["step"] for line in resumed] == [0, 1, 2]
    for name in ("loss", "reward", "length", "grad_norm"):
        assert [line[name] for line in resumed] == [line[name] for line in whole], name
    exported = [(tmp_path / folder / "model" / "model.safetensors").read_bytes() for folder in ("whole", "stopped")]
    assert exported[0] == exported[1]
    assert len(list((tmp_path / "stopped" / "checkpoints").iterdir())) == 3
    assert capsys.readouterr().err.count("accuracy on 3 held-out questions") == 3


def test_a_job_that_ended_before_its_first_checkpoint_begins_anew_by_the_same_line(model, tmp_path, alone):
    alone(SUMS, "--model", model, "--folder", tmp_path / "run", *SMALL, "--steps", 1, "--save-every", 1)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    alone(SUMS, "--model", model, "--folder", tmp_path / "run", *SMALL, "--steps", 2, "--save-every", 1)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [0, 1]
    assert [line["step"] for line in lines if "accuracy" in line] == [0, 2]
    with pytest.raises(SystemExit, match="has gone 2 steps already; ask for as many, or for more"):
        alone(SUMS, "--model", model, "--folder", tmp_path / "run", *SMALL, "--steps", 1, "--save-every", 1)


def test_another_job_in_the_same_folder_is_refused(model, tmp_path, alone):
    alone(SUMS, "--model", model, "--folder", tmp_path / "run", *SMALL, "--steps", 1)
    with pytest.raises(SystemExit, match="holds another run already"):
        alone(SUMS, "--model", model, "--folder", tmp_path / "run", *SMALL, "--save-every", 1)


def test_a_job_knows_what_memory_it_takes(model, monkeypatch):
    monkeypatch.syspath_prepend(SUMS.parent)
    from ppo import PPO

    job = PPO(model=str(model), engine="vllm", kl=0.1, prompts=3, samples=3, minibatch=4)
    planned = job.planned(2, 8 << 30)
    assert {"broadcast", "generate", "old log-probs", "reference", "critic", "train"} <= set(planned.peaks())
    assert planned.device_bytes == 8 << 30
    assert job.minibatches() == 3


def test_gsm8k_runs_from_files(model, tmp_path, alone, capsys):
    rows = [{"question": f"What is {n} times 2?", "answer": f"<<{n}*2={2 * n}>>\n#### {2 * n}"} for n in range(6)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, rows)))
    alone(GSM8K, "--model", model, "--folder", tmp_path / "run", "--train", questions, "--test", questions, *SMALL)
    assert "accuracy on 3 held-out questions" in capsys.readouterr().err


def test_ctrl_c_ends_all_ranks_and_leaves_readable_files(model, tmp_path):
    """torchrun in a session of its own, interrupted as a terminal does it: the whole foreground group gets the signal."""
    folder = tmp_path / "run"
    small = [*map(str, SMALL)]
    small[1] = "1000"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SUMS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(
            [*command, "--model", str(model), "--folder", str(folder), *small],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    family = [psutil.Process(job.pid)]
    try:
        wait_until(lambda: len(read_lines(folder / "metrics.jsonl")) > 3, 240)
        family += family[0].children(recursive=True)
        os.killpg(job.pid, signal.SIGINT)
        began = time.monotonic()
        wait_until(lambda: job.poll() is not None and not any(map(alive, family)), 30)
        assert time.monotonic() - began < 15
    finally:
        for process in filter(alive, [*(family[0].children(recursive=True) if alive(family[0]) else []), *family]):
            process.kill()
        job.wait()
    assert len(family) >= 3
    assert job.returncode != 0
    assert len(read_lines(folder / "metrics.jsonl")) > 3
    assert "interrupted" in (tmp_path / "output").read_text()
    assert "of 1000" in (folder / "report.html").read_text()


def wait_until(condition, seconds):
    """Returns when `condition` holds; raises when it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not after {seconds} s"
        time.sleep(0.1)


def alive(process):
    """Whether a process is there, and is no zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
