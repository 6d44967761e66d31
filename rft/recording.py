"""Records a runtime while it is used: its steps as phases, and whatever a loop logs."""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

from rft.effects.runtime import runtime_of
from rft.experience import Rollouts
from rft.rewards.scoring import Rewards
from rft.state import RuntimeState
from rft.telemetry.records import ShownSample
from rft.telemetry.run_folder import Elsewhere, RunFolder, Telemetry


@contextlib.contextmanager
def record(
    state: RuntimeState[Any, Any, Any, Any], folder: Path, /, *, title: str, config: Any, steps: int, done: int | None = None
) -> Generator[Telemetry]:
    """Opens the folder of a run on rank 0, and nothing on the other ranks. Collective: `with record(state, …) as run:`.

    Every step taken inside is a phase of the run. `config` is a dataclass, shown in the report; `steps` is how many times `log` will be
    called, from the first launch on. A run that goes on says how many are `done`, 0 included: what the folder has of those stays, and
    what it has of later ones goes, since they come again. At the end, however it comes, the report is written. Raises `BadInput` where
    the folder holds a run and this one is new, and `PeerFailed` on the other ranks then. What cannot be written later, to a full disk
    say, is left out and said once: it ends no training.
    """
    runtime = runtime_of(state)
    with contextlib.ExitStack() as stack:
        with runtime.lockstep.agreement():
            run = None
            if runtime.world.rank == 0:
                ranks = runtime.world.size
                run = stack.enter_context(RunFolder(folder, title=title, config=config, steps=steps, ranks=ranks, done=done))
        if run is None:
            yield Elsewhere()
        else:
            runtime.trace.followers.append(run)
            _ = stack.callback(runtime.trace.followers.remove, run)
            yield run


def shown(rollouts: Rollouts, rewards: Rewards, /, *, count: int = 4) -> list[ShownSample]:
    """The first `count` rows as a report shows them, with what became of their rewards."""
    notes = {failure.row: f"{failure.kind}: {failure.message}" for failure in rewards.failures}
    return [
        ShownSample(
            question=rollouts.questions[row],
            response=rollouts.responses[row],
            answer=rollouts.answers[row],
            reward=None if row in notes else float(rewards.values[row]),
            note=notes.get(row, ""),
        )
        for row in range(min(count, len(rollouts)))
    ]
