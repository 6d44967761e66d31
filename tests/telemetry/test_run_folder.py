import contextlib
import dataclasses as dc
import html.parser
import json
import logging
import math
import re
import resource
import subprocess
import sys

import pytest

from rft.errors import BadInput
from rft.spec import LaunchSpec
from rft.telemetry import report
from rft.telemetry.live import PlainLines
from rft.telemetry.memory import Peak
from rft.telemetry.records import ShownSample, flat, read_lines, read_run
from rft.telemetry.run_folder import RunFolder, versions

# TensorBoard's own imports warn of what they will change.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard.*")


@dc.dataclass(frozen=True)
class Config:
    lr: float = 1e-5
    launch: LaunchSpec = dc.field(default_factory=lambda: LaunchSpec(model="m"))
    names: tuple[str, ...] = ("a", "b")


def opened(folder, steps=3, done=None):
    return RunFolder(folder, title="A <run>", config=Config(), steps=steps, ranks=2, done=done, display=PlainLines(steps, done or 0))


def a_run(folder, steps=3):
    with opened(folder, steps) as run:
        run.note(0, {"accuracy": 0.11})
        for step in range(steps):
            with run.phase("generate"):
                pass
            run.begin("train_step")
            run.end("train_step", Peak(used=(3 + step) << 30, kept=(4 + step) << 30) if step else None)
            run.samples(step, [ShownSample(question="1 + 1?", response="<b>2</b>", answer="2", reward=1.0)])
            run.log(step, {"reward": step / steps, "tokens": 64.0, "kl": math.nan})
        run.note(steps, {"accuracy": 0.71})
    return folder


def test_metrics_are_lines_that_anybody_can_read(tmp_path):
    lines = read_lines(a_run(tmp_path / "run") / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 0, 1, 2, 3]
    assert [line.get("accuracy") for line in lines] == [0.11, None, None, None, 0.71]
    assert [line.get("reward") for line in lines[1:4]] == [0, 1 / 3, 2 / 3]
    assert lines[1]["kl"] is None
    assert lines[1]["tokens_per_second"] == pytest.approx(2 * 64 / lines[1]["seconds"])
    assert lines[1]["seconds/generate"] >= 0
    assert [line["time_s"] for line in lines] == sorted(line["time_s"] for line in lines)


def test_phases_belong_to_steps_and_lie_in_order(tmp_path):
    phases = read_lines(a_run(tmp_path / "run") / "phases.jsonl")
    assert [(p["name"], p["step"]) for p in phases] == [(n, s) for s in range(3) for n in ("generate", "train_step")]
    times = [t for p in phases for t in (p["start_s"], p["end_s"])]
    assert times == sorted(times)


def test_a_phases_peak_is_written_where_it_was_measured(tmp_path):
    phases = read_lines(a_run(tmp_path / "run") / "phases.jsonl")
    assert [p["used_bytes"] for p in phases] == [None, None, None, 4 << 30, None, 5 << 30]
    assert [p["kept_bytes"] for p in phases] == [None, None, None, 5 << 30, None, 6 << 30]


def test_the_report_puts_planned_and_measured_peaks_side_by_side(tmp_path):
    folder = a_run(tmp_path / "run")
    assert "Memory of the device" in Page((folder / "report.html").read_text()).text
    with opened(tmp_path / "planned") as run:
        run.plan({"generate": (6 << 30, 7 << 30), "train": (4 << 30, int(5.25 * 2**30))})
        run.begin("train_step")
        run.end("train_step", Peak(used=5 << 30, kept=6 << 30))
    text = "".join(Page((tmp_path / "planned" / "report.html").read_text()).text.split())
    assert "generate6.00–7.00–" in text
    assert "train4.005.005.256.00" in text


def test_a_report_of_a_run_without_either_says_nothing_of_memory(tmp_path):
    with opened(tmp_path / "run") as run:
        run.begin("wake")
        run.end("wake", None)
    assert "Memory of the device" not in (tmp_path / "run" / "report.html").read_text()


def test_tensorboard_reads_its_files(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(a_run(tmp_path / "run") / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("accuracy")] == [(0, pytest.approx(0.11)), (3, pytest.approx(0.71))]
    assert [e.step for e in board.Scalars("reward")] == [0, 1, 2]


class Page(html.parser.HTMLParser):
    """Collects the tags, their addresses, and the text outside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.text, self._inside = [], [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._inside = tag if tag in ("script", "style") else ""
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, _):
        self._inside = ""

    def handle_data(self, data):
        self.text += "" if self._inside else data


def test_the_report_is_one_page_that_fetches_nothing(tmp_path):
    page = Page((a_run(tmp_path / "run") / "report.html").read_text())
    assert page.addresses == []
    assert "link" not in page.tags
    for said in ("A <run>", "3 of 3", "11% → 71%", "0.00 → 0.67", "accuracy", "generate", "train_step", "launch.trainer.lr", "torch"):
        assert said in page.text


def test_what_was_sampled_is_shown_and_never_run(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"
    with opened(tmp_path / "run") as run:
        run.samples(0, [ShownSample(question=evil, response=evil, answer=evil, reward=None, note=f"raised {evil}")])
        with run.phase(evil):
            pass
        run.log(0, {evil: 1.0})
    page = Page((tmp_path / "run" / "report.html").read_text())
    assert page.text.count(evil) >= 4
    assert "img" not in page.tags
    assert not any("alert" in tag for tag in page.tags)


def test_a_run_that_ends_by_an_error_leaves_everything(tmp_path):
    def interrupted():
        with opened(tmp_path / "run") as run:
            run.log(0, {"reward": 0.5})
            run.begin("generate")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    text = Page((tmp_path / "run" / "report.html").read_text()).text
    assert "1 of 3" in text
    assert "0.50" in text
    assert "→" not in text, "what was measured once has not changed"
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[0]["reward"] == 0.5


@contextlib.contextmanager
def full_disk(size=1000):
    """No file of this process grows beyond `size` bytes: the system takes a part of what is written, and refuses the rest."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def warnings_of(caplog):
    return [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]


# TensorBoard's writing thread ends by what it has met.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_is_full_for_a_while_leaves_a_gap_and_is_said_once(tmp_path, caplog):
    folder, sample = tmp_path / "run", ShownSample(question="1 + 1?", response="2" * 80, answer="2", reward=1.0)
    with opened(folder, steps=100) as run:
        run.log(0, {"reward": 0.0})
        with full_disk():
            for step in range(1, 99):
                run.samples(step, [sample])
                with run.phase("generate"):
                    run.plan({f"generate{place}": (1, 2) for place in range(100)})
                run.log(step, {"reward": 0.5})
        run.log(99, {"reward": 1.0})
    said = warnings_of(caplog)
    assert len(said) == 1
    assert re.search(rf"{folder}/\S+ cannot be written \(.*too large\); training goes on", said[0])
    for name in ("metrics.jsonl", "phases.jsonl", "samples.jsonl"):
        steps = [line["step"] for line in read_lines(folder / name)]
        assert steps == sorted(set(steps)), "every line is whole"
        assert 3 < len(steps) < 98
    assert [line["reward"] for line in read_lines(folder / "metrics.jsonl")][-1] == 1.0
    assert (folder / "report.html").is_file()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_is_closed_on_a_full_disk_too(tmp_path, caplog):
    run = opened(tmp_path / "run")
    run.log(0, {"reward": 0.5})
    with full_disk(size=10):
        run.log(1, {"reward": 0.6})
        run.close()
    assert len(warnings_of(caplog)) == 1
    assert not (tmp_path / "run" / "report.html").exists()
    run.close()
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_run_of_no_step_has_a_report_too(tmp_path):
    with opened(tmp_path / "run"):
        pass
    text = Page((tmp_path / "run" / "report.html").read_text()).text
    assert "No step was closed." in text
    assert "None were kept." in text


def test_lines_are_there_before_the_run_ends_and_a_torn_one_is_left_out(tmp_path):
    run = opened(tmp_path / "run")
    run.log(0, {"reward": 0.5})
    path = tmp_path / "run" / "metrics.jsonl"
    assert json.loads(path.read_text())["reward"] == 0.5
    run.close()
    path.write_text(path.read_text() + '{"step": 1, "rew')
    assert [line["step"] for line in read_lines(path)] == [0]
    assert read_lines(tmp_path / "nowhere") == []


def test_the_report_is_made_again_by_its_command(tmp_path):
    folder = a_run(tmp_path / "run")
    (folder / "report.html").unlink()
    command = [sys.executable, "-m", "rft.telemetry.report"]
    assert subprocess.run([*command, str(folder)], capture_output=True, text=True).stdout == f"{folder / 'report.html'}\n"
    assert (folder / "report.html").is_file()
    with pytest.raises(BadInput, match="is no run folder"):
        report.write_report(tmp_path)


def test_long_runs_are_cut_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "TIMELINE_STEPS", 2)
    monkeypatch.setattr(report, "SHOWN_SAMPLES", 2)
    text = Page((a_run(tmp_path / "run", steps=14) / "report.html").read_text()).text
    assert "the last 2 steps" in text
    assert re.search(r"12\s+older ones are in samples.jsonl", text)


def test_another_run_is_not_overwritten(tmp_path):
    a_run(tmp_path / "run")
    with pytest.raises(BadInput, match="holds another run already"):
        opened(tmp_path / "run")


def test_a_run_that_goes_on_keeps_what_was_done_and_drops_what_comes_again(tmp_path):
    folder = a_run(tmp_path / "run")
    began = read_run(folder)["began"]
    took = [line["time_s"] for line in read_lines(folder / "metrics.jsonl")][1]
    with (folder / "phases.jsonl").open("a") as torn:
        torn.write('{"name": "tra')
    with opened(folder, steps=3, done=1) as run:
        with run.phase("generate"):
            pass
        run.log(1, {"reward": 0.9})
    lines = read_lines(folder / "metrics.jsonl")
    assert [(line["step"], line.get("accuracy"), line.get("reward")) for line in lines] == [(0, 0.11, None), (0, None, 0.0), (1, None, 0.9)]
    assert lines[-1]["time_s"] >= took, "time goes on too"
    assert [line["step"] for line in read_lines(folder / "phases.jsonl")] == [0, 0, 1]
    assert [line["step"] for line in read_lines(folder / "samples.jsonl")] == [0]
    assert read_run(folder)["began"] == began
    assert "2 of 3" in (folder / "report.html").read_text()


def test_a_run_may_go_on_in_a_folder_of_its_own(tmp_path):
    with opened(tmp_path / "new", steps=3, done=2) as run:
        run.log(2, {"reward": 0.9})
    assert [line["step"] for line in read_lines(tmp_path / "new" / "metrics.jsonl")] == [2]


def test_a_run_may_go_on_from_its_very_beginning(tmp_path):
    folder = a_run(tmp_path / "run")
    with opened(folder, steps=3, done=0) as run:
        run.log(0, {"reward": 0.9})
    assert [(line["step"], line["reward"]) for line in read_lines(folder / "metrics.jsonl")] == [(0, 0.9)]


def test_configuration_is_flat_and_names_its_parts():
    found = flat(Config())
    assert found["lr"] == 1e-5
    assert found["launch"] == "LaunchSpec"
    assert found["launch.engine"] == "TransformersEngine"
    assert found["launch.trainer.lr"] == 1e-6
    assert found["names"] == "('a', 'b')"


def test_versions_name_what_is_installed():
    found = versions()
    assert {"python", "machine", "torch", "transformers"} <= set(found)
    assert "deepspeed" not in found
