"""Tiny models with real tokenizers, written as ordinary model folders: of text, and one that takes images. Nothing is downloaded."""

from pathlib import Path
from typing import Any, Literal

import torch

from rft.images import Images

HEAD = 32
"""The smallest head size that vLLM's CPU attention takes."""
SPECIAL = ("<|pad|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
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


def tiny_model(
    folder: Path,
    family: Literal["qwen2", "llama"] = "qwen2",
    *,
    tied: bool = True,
    vocab: int = 320,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Saves a causal LM with random weights and a byte-level tokenizer to `folder`, and returns it.

    `vocab` is at least 258: all bytes, `<|pad|>` (256) and `<|end|>` (257); rows beyond them have no text. Biases (qwen2) and norms
    are random too, so that losing one shows.
    """
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, tied=tied, vocab=vocab, heads=heads, kv_heads=kv_heads, layers=layers)
    with torch.random.fork_rng(devices=[]):
        _ = torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_config(
    family: Literal["qwen2", "llama"], *, tied: bool, vocab: int = 320, heads: int = 4, kv_heads: int = 2, layers: int = 2
) -> Any:
    """The configuration of `tiny_model`."""
    from transformers import LlamaConfig, Qwen2Config

    return {"qwen2": Qwen2Config, "llama": LlamaConfig}[family](
        vocab_size=vocab,
        hidden_size=HEAD * heads,
        intermediate_size=2 * HEAD * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        pad_token_id=256,
        eos_token_id=257,
        bos_token_id=None,
    )


def tiny_tokenizer() -> Any:
    """Bytes as tokens 0 to 255, `<|pad|>` and `<|end|>`, and a minimal chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*alphabet, *SPECIAL))}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
    wrapped.chat_template = TEMPLATE
    return wrapped


def tiny_vision_model(folder: Path, *, tied: bool = True, layers: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Saves a Qwen2.5-VL with random weights, a byte-level tokenizer and an image processor to `folder`, and returns it.

    Tokens 258 to 261 are `IMAGE_SPECIAL`. An image has 16 to 256 patches of 8 × 8 pixels, four to a placeholder; of its two vision
    blocks one looks into windows of 32 × 32 pixels.
    """
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    with torch.random.fork_rng(devices=[]):
        _ = torch.manual_seed(seed)
        model: Any = AutoModelForImageTextToText.from_config(tiny_vision_config(tied=tied, layers=layers), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.to(dtype).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_SPECIAL)})
    tokenizer.chat_template = IMAGE_TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes: dict[str, Any] = {
        "patch_size": PATCH,
        "merge_size": MERGED,
        "temporal_patch_size": 2,
        "min_pixels": 32 * 32,
        "max_pixels": 128 * 128,
    }
    _ = Qwen2VLImageProcessorPil(**sizes).save_pretrained(folder)
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
    config: Any = Qwen2_5_VLConfig
    return config(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=258,
        vision_end_token_id=259,
        image_token_id=260,
        video_token_id=261,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )


def some_images(draw: torch.Generator, *grids: tuple[int, int, int]) -> Images:
    """Random pixels for grids of patches of 8 × 8 pixels, three colours, two points in time."""
    return Images(pixels=torch.randn(sum(t * h * w for t, h, w in grids), 3 * 2 * 8 * 8, generator=draw), grids=torch.tensor(grids))


def prompt_of(draw: torch.Generator, images: Images | None) -> list[int]:
    """Three tokens of text, the placeholders of each image between the tokens that frame them, and two more."""
    first, last = (torch.randint(0, 250, (count,), generator=draw).tolist() for count in (3, 2))
    counts = [] if images is None else (images.grids.prod(dim=1) // 4).tolist()
    return [*first, *(token for count in counts for token in (258, *[260] * count, 259)), *last]
