"""Prints, for each rank and trainer, what the trainer says that it holds beside what was planned.

torchrun sharding_ranks.py MODELS fsdp2|deepspeed
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
    world = open_world(1, timeout_s=60)
    for model in ("tied", "uneven"):
        folder = find_model(str(Path(sys.argv[1]) / model))
        config = folder.config
        for spec in SPECS[sys.argv[2]]:
            shape = outline(blueprint(config, lora=spec.lora))
            trainer = spec.build(folder, world)
            parts = held(shape, spec, world.size, world.rank)
            told = [trainer.bytes("model"), trainer.bytes("optimizer")]
            trainer.close()
            planned = [parts.weights, parts.optimizer]
            print(
                "SEEN", json.dumps({"rank": world.rank, "model": model, "spec": repr(spec), "told": told, "planned": planned}), flush=True
            )
