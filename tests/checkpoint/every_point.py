"""A save that is cut off before each thing that it does to the disk, one after the other: every_point.py FOLDER. Prints what it found.

Every time a child of this process is ended as a kill ends it, with nothing cleaned up.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rft
from rft.checkpoint.folder import interrupted
from rft.steps import restore, save
from rft.testing import scripted_devices, scripted_launch
from tests.refusals import trained, with_old

WRITING = ("fsync", "rename", "rmdir", "unlink", "mkdir")
KILLED = 9


def cut_off(act: Callable[[], object], place: int) -> bool:
    """Whether the child that does `act` was ended before the `place`-th time that it touched the disk."""
    child = os.fork()
    if child == 0:
        counted = itertools.count()
        for name in WRITING:
            setattr(os, name, ending(getattr(os, name), counted, place))
        _ = act()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == KILLED


def ending(function: Callable[..., Any], counted: "itertools.count[int]", place: int) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(counted) == place:
            os._exit(KILLED)
        return function(*args, **kwargs)

    return wrapped


def main(folder: Path) -> list[dict[str, Any]]:
    """Between the cuts the run goes on by a batch, from whichever checkpoint is the newest."""
    found = list[dict[str, Any]]()
    with scripted_launch() as state:
        for place in itertools.count():
            before = state.version
            _ = save(state, folder, {"version": before}, keep=1)
            state = rft.sleep(rft.finish_batch(trained(*with_old(state))))
            ready = state
            if not cut_off(lambda ready=ready: save(ready, folder, {"version": ready.version}, keep=1), place):
                return found
            left = [path.suffix for path in interrupted(folder)]
            state, run = restore(state, folder, {"version": 0})
            weights = scripted_devices(state).trainer.weights["head"].tolist()
            found.append({"before": before, "after": state.version, "run": run["version"], "weights": weights, "left": left})
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
