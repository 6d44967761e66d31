"""One rank with the embedded engine, for itself: holds to the contract on ranks, and writes what its prompts were answered."""

import faulthandler
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from rft.engines.transformers import build
from rft.models import find_model
from rft.parallel.world import open_world
from rft.spec import TransformersEngine
from rft.testing.engines import MAX_MODEL_LEN, check_ranks


def main(out: Path, folder: str) -> None:
    world, model = open_world(1, timeout_s=60), find_model(folder)
    engine = build(TransformersEngine(dtype="float32", max_model_len=MAX_MODEL_LEN), model, world)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    told = check_ranks(engine, module, model.tokenizer, world)
    _ = (out / f"{world.rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # a rank that hangs says where
    main(Path(sys.argv[1]), sys.argv[2])
