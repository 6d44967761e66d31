"""Writes, on each rank and of each trainer, what the trainer says that it holds beside what was planned.

torchrun sharding_ranks.py MODELS fsdp2|deepspeed RESULTS
"""

import json
import sys
from pathlib import Path

from rft.memory.outline import blueprint, outline
from rft.memory.sharding import held
from rft.models import find_model
from rft.parallel.world import open_world
from rft.spec import DeepSpeedTrainer, FSDP2Trainer, LoRA
from rft.spec.training import Training

ZERO = [
    DeepSpeedTrainer(stage=stage, dtype=dtype, offload_optimizer=offload)
    for stage in (1, 2, 3)
    for dtype in ("bfloat16", "float32")
    for offload in (False, True)
]
SPECS: dict[str, list[Training]] = {
    "fsdp2": [FSDP2Trainer(), FSDP2Trainer(shards=1), FSDP2Trainer(offload=True), FSDP2Trainer(lora=LoRA(rank=3))],
    "deepspeed": [*ZERO],
}

if __name__ == "__main__":
    world, seen = open_world(1, timeout_s=60), []
    for model in ("tied", "uneven"):
        folder = find_model(str(Path(sys.argv[1]) / model))
        for spec in SPECS[sys.argv[2]]:
            trainer = spec.build(folder, world)
            told = [trainer.bytes("model"), trainer.bytes("optimizer")]
            trainer.close()
            parts = held(outline(blueprint(folder.config, lora=spec.lora)), spec, world.size, world.rank)
            seen.append({"model": model, "spec": repr(spec), "told": told, "planned": [parts.weights, parts.optimizer]})
    _ = (Path(sys.argv[3]) / f"{world.rank}.json").write_text(json.dumps(seen))
