"""One rank of a TP or DP world: the engine loads, generates, sleeps and wakes; writes what the test compares, as JSON."""

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from rft.engines.protocol import Request
from rft.engines.vllm import build
from rft.models import find_model
from rft.narrow import narrowed
from rft.parallel.world import open_world
from rft.sampling import Sampling
from rft.spec import FSDP2Trainer, VLLMEngine
from rft.testing.engines import GREEDY, PROMPTS, check_ranks, requests, wake_with, weights


def run(folder: str, tensor_parallel: int) -> dict[str, Any]:
    world = open_world(tensor_parallel, timeout_s=60)
    spec = VLLMEngine(dtype="float32", max_model_len=256, max_rows=8, cache_bytes=1 << 26)
    engine = build(spec, find_model(folder), world)
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wake_with(engine, module)
    first = engine.generate(requests(*PROMPTS), GREEDY)
    wake_with(engine, module)
    sampled = engine.generate([Request(tokens=PROMPTS[0], seed=s) for s in range(4)], Sampling(max_new_tokens=8))
    sums = engine.load(iter(weights(module).items()))
    cut = {name: tensor.clone() for name, tensor in narrowed(iter(weights(module).items()), engine.narrows)}
    assert engine.load(iter(cut.items())) == sums
    _ = engine.load(iter({**weights(module), "model.norm.weight": torch.zeros_like(module.model.norm.weight)}.items()))
    differ = [name for name, value in engine.checksums().items() if value != sums[name]]
    trainer = FSDP2Trainer(dtype="float32").build(find_model(folder), world)
    sent = [dict(engine.narrows) for _ in range(world.size)]
    dist.all_gather_object(sent, dict(engine.narrows), group=world.host)
    assert engine.load(trainer.stream_weights(engine.casts_to, sent)) == engine.checksums() == sums
    trainer.close()
    result = {
        "told": check_ranks(engine, module, find_model(folder).tokenizer, world),
        "path": engine.sync_path,
        "greedy": [c.tokens for c in first],
        "sampled": [c.tokens for c in sampled],
        "weights": engine.memory().weights,
        "comes": sum(tensor.numel() for tensor in cut.values()) / sum(tensor.numel() for tensor in weights(module).values()),
        "differ": differ,
    }
    engine.close()
    assert dist.is_initialized(), "the world is the trainer's too"
    dist.barrier(world.host)
    return result


def main(out: Path, *cases: str) -> None:
    """Each case is `FOLDER:TP`. One process takes them all, one after the other: starting vLLM is what costs."""
    results = [run(folder, int(tensor_parallel)) for folder, tensor_parallel in (case.split(":") for case in cases)]
    _ = (out / f"{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # a rank that hangs says where
    main(Path(sys.argv[1]), *sys.argv[2:])
