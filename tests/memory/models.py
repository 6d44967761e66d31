"""A model small enough for sums by hand.

Two blocks of width 128 with 4 heads of 32 (2 of keys and values), an MLP of 256, 320 tokens, tied:

    q 128·128 + 128, k and v 128·64 + 64 each, o 128·128, MLP 3·128·256, norms 2·128      147,968 a block
    embedding 320·128, last norm 128                                                       41,088 outside
"""

from pathlib import Path
from typing import Any

from rft.memory.outline import Blueprint, Head, blueprint
from rft.spec import LoRA
from rft.testing.models import tiny_config

BLOCK, OUTSIDE = 147_968, 41_088
PARAMETERS = 2 * BLOCK + OUTSIDE


def tiny(head: Head = "language", lora: LoRA | None = None, **options: Any) -> Blueprint:
    return blueprint(tiny_config("qwen2", **{"tied": True, **options}), head, lora)


def folder(path: Path, **options: Any) -> str:
    """A folder with a configuration, and nothing else."""
    tiny_config("qwen2", **{"tied": True, **options}).save_pretrained(path)
    return str(path)


def judge(path: Path, *, architecture: str = "Qwen2ForSequenceClassification", labels: int = 1, **options: Any) -> str:
    """The same of a reward model."""
    config = tiny_config("qwen2", **{"tied": True, **options})
    config.architectures, config.num_labels = [architecture], labels
    config.save_pretrained(path)
    return str(path)
