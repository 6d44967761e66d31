"""Hugging Face models as a trainer takes and gives them: loaded whole, named as their checkpoints are, written as folders."""

import copy
import os
import shutil
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rft.errors import BadInput
from rft.models import Kind, ModelFolder, attention_of, auto_class, reading_weights, stored_names
from rft.parallel.world import World

_names: "weakref.WeakKeyDictionary[Any, dict[str, str]]" = weakref.WeakKeyDictionary()
"""What `stored_names` has said of each model: it takes longer than to send the weights of a small one."""

WEIGHTS = "*.safetensors*"
"""The files of weights in a folder, and their index."""
PROCESSING = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json")
"""Files beside a tokenizer that say how images are processed; a folder has some of them."""


def load(folder: ModelFolder, *, checkpointing: bool, kind: Kind | None = None) -> Any:
    """The model in fp32 on the host, without dropout (it would move the ratio of the first step away from 1). Kind None: the policy.

    Raises `BadInput` where weights are missing or of another shape (they would be random), and for models whose checkpoints have
    their tensors in another form than the model does.
    """
    options: dict[str, Any] = {**_options(folder), "output_loading_info": True, "ignore_mismatched_sizes": True}
    with reading_weights(folder.path), _without_progress_bars():
        model, report = auto_class(kind or folder.kind).from_pretrained(folder.path, **options)
    lost = sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])])
    if lost:
        raise BadInput(f"{folder.path} lacks weights, or has them in another shape: {', '.join(lost[:5])} ({len(lost)} in all)")
    _names[model] = stored_names(model)
    return _checkpointing(model, checkpointing)


def empty(folder: ModelFolder, *, checkpointing: bool, kind: Kind | None = None) -> Any:
    """The same model, its parameters on the meta device and to be filled in; its buffers are real."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model: Any = auto_class(kind or folder.kind).from_config(**_options(folder))
    model.tie_weights()
    return _checkpointing(model, checkpointing)


def _options(folder: ModelFolder) -> dict[str, Any]:
    config = _without_dropout(copy.deepcopy(folder.config))
    return {"config": config, "dtype": torch.float32, "attn_implementation": attention_of(config)}


def _checkpointing(model: Any, wanted: bool) -> Any:
    if wanted:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def blocks(model: Any) -> list[nn.Module]:
    """The transformer blocks, in order: what the model itself says is not to be split. Raises `BadInput` where it does not say."""
    kinds: set[str] = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in kinds]
    if not found:
        raise BadInput(f"{type(model).__name__} does not say what its blocks are (_no_split_modules is {kinds or 'empty'})")
    return found


def named_tensors(model: Any) -> dict[str, Tensor]:
    """What `save_pretrained` writes, by name, parameters before buffers: tied tensors once, no buffers that are not persistent."""
    kept: dict[str, Tensor] = model.state_dict(keep_vars=True)
    aliases: set[str] = set(model.all_tied_weights_keys)
    first: dict[int, str] = {}
    for name, tensor in sorted(kept.items(), key=lambda item: item[0] in aliases):
        _ = first.setdefault(id(tensor), name)
    names = set(first.values())
    stored = _names[model] if model in _names else _names.setdefault(model, stored_names(model))
    listed = ((stored.get(n, n), t) for n, t in kept.items() if n in names)
    return dict(sorted(listed, key=lambda pair: not isinstance(pair[1], nn.Parameter)))


def export(path: Path, weights: Iterable[tuple[str, Tensor]], model: Any, folder: ModelFolder, world: World) -> None:
    """Writes whole tensors as an ordinary Hugging Face folder, in the dtype that the model came in. Collective; rank 0 writes.

    Raises `BadInput` on all ranks where it cannot be written.
    """
    dtype = folder.config.dtype or torch.float32
    kept = {n: t.to("cpu", dtype, copy=True) for n, t in weights if world.rank == 0}
    on_rank_0(path, world, lambda: write(path, kept, model, folder))


def on_rank_0(path: Path, world: World, write: Callable[[], None]) -> None:
    """Rank 0 writes, the others wait. Collective.

    Raises `BadInput` on all ranks where it cannot be written.
    """
    problem: list[str | None] = [None]
    if world.rank == 0:
        try:
            write()
        except Exception as error:  # noqa: BLE001 (every rank raises it; a full disk is a SafetensorError, and the others wait)
            problem = [f"nothing could be written to {path}: {error}"]
    dist.broadcast_object_list(problem, group=world.host, group_src=0)
    if problem[0] is not None:
        raise BadInput(problem[0])


def write(path: Path, weights: Mapping[str, Tensor], model: Any, folder: ModelFolder) -> None:
    """Writes a folder that `from_pretrained` loads, aside and then renamed. Raises `BadInput` as `replaced` does."""
    from huggingface_hub import save_torch_state_dict

    with replaced(path) as aside:
        save_torch_state_dict(dict(weights), aside)
        folder.config.save_pretrained(aside)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(aside)
        folder.tokenizer.save_pretrained(aside)
        for file in (folder.path / name for name in PROCESSING if folder.images is not None):
            if file.is_file():
                _ = shutil.copy(file, aside)


@contextmanager
def replaced(path: Path) -> Generator[Path]:
    """A new folder aside, which takes the place of an earlier one at `path` in the end.

    Raises `BadInput` where anything lies there that the new one does not have, but for files of weights, which are cut in other ways.
    """
    path = path.resolve()  # a link goes on leading there
    aside, before = (path.with_name(f".{path.name}.{word}") for word in ("writing", "before"))
    for rest in (aside, before):
        shutil.rmtree(rest, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    if path.exists():
        written = {file.name for file in aside.iterdir()}
        others = sorted(f.name for f in path.iterdir() if f.name not in written and not f.match(WEIGHTS))
        if others:
            shutil.rmtree(aside)
            raise BadInput(f"other things lie there, and would be lost: {', '.join(others[:5])}; name a new folder, or move them away")
        os.rename(path, before)
    os.rename(aside, path)
    shutil.rmtree(before, ignore_errors=True)


@contextmanager
def _without_progress_bars() -> Generator[None]:
    """Every rank would draw one."""
    from transformers.utils import logging

    drawing = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawing:
            logging.enable_progress_bar()


def _without_dropout(config: Any) -> Any:
    from transformers import PreTrainedConfig

    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif isinstance(value, PreTrainedConfig):
            _without_dropout(value)
    return config
