"""A Qwen2.5-VL of random weights, prompts with images and without: engine and Actor side by side, and the seconds of every step.

    torchrun --nproc-per-node N -m tests.benchmarks.vision FOLDER-TO-MAKE [SIZE] [vllm | transformers]

SIZE is 3B, of Qwen2.5-VL-3B's shape, or tiny, for a CPU. Three of four prompts have an image, or two. A line is appended to
results/vision.jsonl.
"""

import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import rft
from rft.data.prompts import Cursor, Share, next_prompts, tokenise
from rft.data.questions import Question
from rft.effects.runtime import runtime_of
from rft.models import find_model
from rft.testing.models import tiny_vision_config, tiny_vision_model
from tests.benchmarks.record import append
from tests.benchmarks.turns import my_turn

RANK = int(os.environ.get("RANK", "0"))
CUDA = torch.cuda.is_available()
BATCHES, PROMPTS = 3, 8
SAMPLING = rft.Sampling(samples=4, max_new_tokens=128 if CUDA else 8)


def main(folder: str, size: str = "3B", engine: str = "vllm") -> None:
    """Three batches of everything, at a learning rate that moves the weights."""
    model = Path(folder) / "model"
    if RANK == 0:
        made(model, size)
        drawn(Path(folder))
    while not (Path(folder) / "drawn").is_file():
        time.sleep(0.2)
    spec = rft.LaunchSpec(model=str(model), engine=engine_of(engine), trainer=trainer_of(size), deadline_s=600, probe_every=1)
    seen: dict[str, list[float]] = defaultdict(list)
    with rft.launch(spec) as state:
        world = runtime_of(state).world
        my_turn(world)
        found, cursor = find_model(str(model)), Cursor()
        data = tokenise(questions(Path(folder)), found.tokenizer, max_tokens=1536, images=found.images)
        for _ in range(BATCHES):
            prompts, cursor = next_prompts(data, cursor, PROMPTS, Share(index=world.rank, count=world.size))
            state = one_batch(state, prompts, seen)
    row: dict[str, Any] = {"model": size, "engine": engine, "ranks": world.size, **seen}
    if CUDA:
        row["peak_allocated_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    if RANK == 0:
        for name, values in row.items():
            print(f"{name:28} {values}")
        append("vision", row)


def one_batch(state: Any, prompts: rft.Prompts, seen: dict[str, list[float]]) -> Any:
    """Every phase once; what was seen of it is appended to `seen`."""
    state = rft.refresh(state)
    rollouts = rft.generate(state, prompts, SAMPLING)
    state = rft.compute_old_logprobs(rft.sleep(state), rollouts)
    gaps = (state.old.batches[0].values - rollouts.logprobs)[rollouts.sampled].abs()
    images = [grid for each in (rollouts.images or ()) if each is not None for grid in each.grids]
    experience = rft.experience(rollouts, torch.ones(len(rollouts)), torch.ones(rollouts.tokens.shape) * rollouts.sampled)
    state, metrics = rft.train_step(state, rft.take(experience, torch.arange(len(experience))), rft.grpo())
    state = rft.finish_batch(state)
    seen["gap_mean"].append(float(gaps.mean()))
    seen["gap_max"].append(float(gaps.max()))
    seen["grad_norm"].append(float(metrics["grad_norm"]))
    seen["images_of_rows"].append(len(images))
    seen["new_tokens"].append(int(rollouts.sampled.sum()))
    for span in rft.health(state).spans[-6:]:
        seen[f"{span.name}_s"].append(round(span.end_s - span.start_s, 3))
    return state


def made(folder: Path, size: str) -> None:
    """The model, in bfloat16; of a large one the tiny one's tokenizer and image processor, for patches of 14 × 14 pixels."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    _ = tiny_vision_model(folder, dtype=torch.bfloat16)
    if size == "tiny":
        return
    config: Any = tiny_vision_config()
    text = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text |= {"num_key_value_heads": 2, "max_position_embeddings": 4096, "rope_parameters": rope, "initializer_range": 0.02}
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048, "patch_size": 14}
    vision |= {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "initializer_range": 0.02}
    config = type(config)(
        text_config=config.text_config.to_dict() | text | {"layer_types": None, "head_dim": None},
        vision_config=config.vision_config.to_dict() | vision,
        **{name: getattr(config, name) for name in ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")},
        tie_word_embeddings=True,
    )
    with torch.device("cuda" if CUDA else "cpu"):
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    processor: Any = Qwen2VLImageProcessorPil
    processor(patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=56 * 56, max_pixels=448 * 448).save_pretrained(folder)


def drawn(folder: Path) -> None:
    """Two figures of different sizes."""
    for number, size in enumerate(((448, 336), (224, 224))):
        pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    (folder / "drawn").touch()


def questions(folder: Path) -> list[Question]:
    """One without an image, one with each of the two, one with both, and again."""
    images = [(), ("0.png",), ("1.png",), ("0.png", "1.png")]
    return [
        Question(id=i, text=f"What is {i} + 7?", answer="0", images=tuple(str(folder / name) for name in images[i % 4])) for i in range(64)
    ]


def engine_of(name: str) -> rft.EngineSpec:
    """In bfloat16."""
    if name == "transformers":
        return rft.TransformersEngine(max_model_len=2048, dtype="bfloat16")
    return rft.VLLMEngine(max_model_len=2048, cache_bytes=4 << 30 if CUDA else 1 << 26)


def trainer_of(size: str) -> rft.FSDP2Trainer:
    """Of a large one little is kept at a time."""
    large = size != "tiny"
    return rft.FSDP2Trainer(lr=1e-6, keep_gathered=not large, gradient_checkpointing=large, micro_batch_tokens=8192)


if __name__ == "__main__":
    main(*sys.argv[1:])
