import contextlib
import io
import logging

import pytest
from rich.console import Console

from rft.telemetry.live import Eta, LiveView, PlainLines, Shown, clock, headline, number, open_display, spark
from rft.telemetry.logging import set_up_logging

STEP = Shown(
    done=3,
    metrics={"lr": 1e-5, "kl": 0.00123, "reward": 0.53125, "length": 17.25, "tokens_per_second": 1234.6, "held_out/accuracy": 0.5},
    phases={"generate": 3.14159, "train_step": 0.5},
)


def test_a_line_for_each_step_where_there_is_no_terminal(caplog):
    display = PlainLines(40)
    with caplog.at_level(logging.INFO, logger="rft"):
        display.enter("generate")
        display.leave()
        display.show(STEP)
        display.note({"accuracy": 0.71})
        display.close()
    step, note = caplog.messages
    assert step.startswith("step 3/40  reward 0.5312  length 17.25  KL 0.00123  tokens/s 1235  held out/accuracy 0.5")
    assert "(generate 3.1 s, train_step 0.5 s)" in step
    assert step.endswith(" left")
    assert note == "accuracy 0.71"


def test_the_panel_has_everything():
    console = Console(file=io.StringIO(), force_terminal=True, width=110)
    view = LiveView("GRPO on [sums]", 40, console)
    view.enter("generate")
    view.show(STEP)
    view.note({"accuracy": 0.11})
    view.enter("train_step")
    with console.capture() as captured:
        console.print(view._render())
    view.leave()
    view.close()
    text = captured.get()
    for said in (
        "GRPO on [sums]",
        "step 3/40",
        "train_step 0 s",
        "reward",
        "0.5312",
        "KL",
        "tokens/s",
        "accuracy",
        "0.11",
        "3.14 s",
        "left",
    ):
        assert said in text


def test_what_is_left_is_told_from_the_steps_that_this_run_took(monkeypatch):
    clock_s = iter([100.0, 130.0, 100.0, 130.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock_s))
    assert Eta(10).left_s(3) == 70.0
    assert Eta(10, before=2).left_s(5) == 50.0


def test_the_display_fits_the_place(monkeypatch):
    assert isinstance(open_display("t", 1), PlainLines)
    monkeypatch.setenv("FORCE_COLOR", "1")
    view = open_display("t", 1)
    assert isinstance(view, LiveView)
    view.close()
    view.close()


def test_the_headline_comes_in_order():
    assert list(headline(STEP.metrics)) == ["reward", "length", "kl", "tokens_per_second", "held_out/accuracy"]


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (400, "6:40"), (3725, "1:02:05")])
def test_clock(seconds, shown):
    assert clock(seconds) == shown


@pytest.mark.parametrize(("value", "shown"), [(0.5, "0.5"), (1e-5, "1e-05"), (123.456, "123.5"), (12345.6, "12346"), (float("nan"), "nan")])
def test_number(value, shown):
    assert number(value) == shown


@pytest.mark.parametrize(
    ("values", "shown"), [([], ""), ([1, 1], "▄▄"), ([0, 7], "▁█"), ([0, float("nan"), 1], "▁█"), ([0, float("inf"), 1], "▁█")]
)
def test_spark(values, shown):
    assert spark(values) == shown


class FullDisk(io.StringIO):
    def write(self, _):
        raise OSError(28, "No space left on device")


def test_log_lines_say_their_rank(monkeypatch, capsys):
    logger = logging.getLogger("rft")
    before = (logger.handlers[:], logger.level, logger.propagate)
    monkeypatch.setenv("RANK", "3")
    try:
        set_up_logging()
        set_up_logging()
        with contextlib.redirect_stderr(FullDisk()):
            logger.info("what cannot be written ends nothing")
        logger.info("hello")
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    line = capsys.readouterr().err
    assert line.endswith(" rank 3 | hello\n")
    assert line.count("hello") == 1
