from rft.telemetry import trace
from rft.telemetry.trace import Trace


def taken(steps: Trace) -> list[str]:
    spans = steps.take()
    times = [time for span in spans for time in (span.start_s, span.end_s)]
    assert times == sorted(times)
    return [span.name for span in spans]


def test_spans_come_in_order_and_once():
    steps = Trace()
    for name in ("broadcast", "wake"):
        steps.begin(name)
        steps.end(name)
    assert taken(steps) == ["broadcast", "wake"]
    assert taken(steps) == []


def test_old_spans_are_let_go(monkeypatch):
    monkeypatch.setattr(trace, "KEPT", 2)
    steps = Trace()
    for name in ("a", "b", "c"):
        steps.begin(name)
        steps.end(name)
    assert taken(steps) == ["b", "c"]


def test_followers_hear_of_every_step_while_they_follow():
    heard = []

    class Follower:
        def begin(self, name):
            heard.append(("begin", name))

        def end(self, name, peak):
            heard.append(("end", name, peak))

    steps, follower = Trace(), Follower()
    steps.followers.append(follower)
    steps.begin("wake")
    steps.end("wake")
    steps.followers.remove(follower)
    steps.begin("sleep")
    steps.end("sleep")
    assert heard == [("begin", "wake"), ("end", "wake", None)]  # nothing is measured without CUDA
