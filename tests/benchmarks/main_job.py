"""The main job from start to end, as a user runs it, with what came of it in one line of results/main_job.jsonl.

python -m tests.benchmarks.main_job MODEL-FOLDER RUN-FOLDER RANKS [OPTIONS OF examples/grpo_arithmetic.py …]
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.record import append

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo_arithmetic.py"


def main(model: str, folder: str, ranks: str, *options: str) -> None:
    """Runs it, and appends accuracy before and after, seconds in all and of training, and tokens per second."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    began = time.monotonic()
    _ = subprocess.run([*launcher, str(SCRIPT), "--model", model, "--folder", folder, *options], check=True)
    seconds = time.monotonic() - began
    lines: list[dict[str, Any]] = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    accuracy = [line["accuracy"] for line in lines if "accuracy" in line]
    steps = [line for line in lines if "loss" in line]
    row = {
        "options": list(options),
        "ranks": int(ranks),
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[-1],
        "steps": len(steps),
        "seconds_in_all": round(seconds, 1),
        "seconds_of_training": round(sum(step["seconds"] for step in steps), 1),
        "tokens_per_second": round(sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps), 1),
    }
    print(row)
    append("main_job", row)


if __name__ == "__main__":
    main(*sys.argv[1:])
