"""Tiny models with real tokenizers, written as ordinary model folders: those of `rft.testing.models`, and one that takes images."""

from pathlib import Path
from typing import Any

import torch

from rft.testing.models import HEAD, SPECIAL, tiny_config, tiny_model, tiny_tokenizer

__all__ = ["SPECIAL", "tiny_config", "tiny_model", "tiny_tokenizer", "tiny_vision_config", "tiny_vision_model"]

IMAGE_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH, MERGED = 8, 2
"""Pixels of a patch, and patches that one placeholder stands for, along one side."""
IMAGE_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_vision_model(folder: Path, *, tied: bool = True, layers: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Saves a Qwen2.5-VL with random weights, a byte-level tokenizer and an image processor to `folder`, and returns it.

    Tokens 258 to 261 are `IMAGE_SPECIAL`. An image has 16 to 256 patches of 8 × 8 pixels, four to a placeholder; of its two vision
    blocks one looks into windows of 32 × 32 pixels.
    """
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForImageTextToText.from_config(tiny_vision_config(tied=tied, layers=layers), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.to(dtype).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_SPECIAL)})
    tokenizer.chat_template = IMAGE_TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes = {"patch_size": PATCH, "merge_size": MERGED, "temporal_patch_size": 2, "min_pixels": 32 * 32, "max_pixels": 128 * 128}
    Qwen2VLImageProcessorPil(**sizes).save_pretrained(folder)
    return folder


def tiny_vision_config(*, tied: bool = True, layers: int = 2) -> Any:
    """The configuration of `tiny_vision_model`."""
    from transformers import Qwen2_5_VLConfig

    text = {
        "vocab_size": 320,
        "hidden_size": 4 * HEAD,
        "intermediate_size": 8 * HEAD,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "pad_token_id": 256,
        "eos_token_id": 257,
        "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 2 * HEAD,
        "intermediate_size": 4 * HEAD,
        "num_heads": 2,
        "out_hidden_size": 4 * HEAD,
        "patch_size": PATCH,
        "spatial_merge_size": MERGED,
        "temporal_patch_size": 2,
        "window_size": 32,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.1,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=258,
        vision_end_token_id=259,
        image_token_id=260,
        video_token_id=261,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
