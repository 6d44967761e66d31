"""Models of the shape of Qwen2.5 with random weights, as ordinary folders: speed and memory do not depend on what they say."""

from pathlib import Path
from typing import Any, Literal

import torch

from rft.testing.models import tiny_tokenizer

Size = Literal["tiny", "0.5B", "7B"]
SHAPES: dict[Size, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
}


def config_of(size: Size) -> Any:
    """The configuration; `tiny` keeps its vocabulary small too."""
    from transformers import Qwen2Config

    vocabulary = 512 if size == "tiny" else 152064 if size == "7B" else 151936
    more = {"pad_token_id": 256, "eos_token_id": 257, "bos_token_id": None, "architectures": ["Qwen2ForCausalLM"]}
    return Qwen2Config(vocab_size=vocabulary, tie_word_embeddings=size != "7B", max_position_embeddings=4096, **SHAPES[size], **more)


def random_model(folder: Path, size: Size) -> Path:
    """Writes the model in bfloat16 with a byte tokenizer, unless it is there already."""
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16)
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder
