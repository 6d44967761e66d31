"""The job of `job.py` as it runs on several nodes: nodes.py MODEL OUT ENGINE TP, under one torchrun a node.

Where `REFUSALS` is set, launches that several nodes must refuse come first; what each rank is told is in OUT/refused<r>.json.
"""

import dataclasses as dc
import json
import logging
import os
import sys
from functools import partial
from pathlib import Path

import rft
from tests.integration import job

RANK = int(os.environ["RANK"])


def refused(spec: rft.LaunchSpec) -> str:
    """The error of a launch."""
    try:
        with rft.launch(spec):
            return "it was launched"
    except rft.RftError as error:
        return f"{type(error).__name__}: {error}"


def refusals(model: str) -> dict[str, str]:
    """A TP group over two nodes; a model that the second node does not have."""
    spec = job.spec_of(model, "transformers")
    return {
        "a TP group over nodes": refused(dc.replace(spec, engine=rft.VLLMEngine(), tensor_parallel=2)),
        "a model that one node lacks": refused(dc.replace(spec, model=model if RANK == 0 else f"{model}/not here")),
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    model, out, engine, tensor_parallel = sys.argv[1:]
    if "REFUSALS" in os.environ:
        (Path(out) / f"refused{RANK}.json").write_text(json.dumps(refusals(model)))
    job.spec_of = partial(job.spec_of, tensor_parallel=int(tensor_parallel))
    job.main(model, out, engine, "sleeping")
