"""Adapters of low rank, as peft has them: which layers, under which names, put into a model, read from a folder and written to one.

In a model that is adapted, peft's layers stand around the linear ones, and so their names are longer. Here everything has the name that
it has without: `….q_proj.weight` for W, and `….q_proj.lora_A.weight`, `….q_proj.lora_B.weight` for what is added to it.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft.errors import BadInput, MissingBackend
from rft.spec import LoRA
from rft.trainers import hugging_face

NAME = "default"
"""Of the adapter among those that peft could hold."""
PREFIX = "base_model.model."
"""Of the names in a peft folder."""
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
STRANGE = (
    "use_dora", "use_rslora", "fan_in_fan_out", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication",
    "target_parameters", "trainable_token_indices",
)  # fmt: skip
"""Settings of a peft folder under which an adapter is more, or something else, than alpha / rank · B A."""
SAMPLES = 4096
"""Numbers of each tensor that tell one model from another."""

Shapes = dict[str, tuple[int, ...]]


# ---- which layers ----


def layers(model: Any, targets: tuple[str, ...] | None) -> list[str]:
    """The names of the linear layers to adapt, in the model's order. Raises `BadInput` that lists what there is."""
    head: Any = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    if targets is None:
        inside = {id(module) for block in hugging_face.blocks(model) for module in block.modules()}
        return [name for name in linear if id(model.get_submodule(name)) in inside]
    there = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    for target in targets:
        if not any(_ends_in(name, target) for name in linear):
            found = any(_ends_in(name, target) for name, _ in model.named_modules())
            what = "is no linear layer that can be adapted" if found else "matches no module"
            raise BadInput(f"LoRA.targets: {target!r} {what} of {type(model).__name__}; its linear layers are {there}")
    return [name for name in linear if any(_ends_in(name, target) for target in targets)]


def shapes(model: Any, names: Iterable[str], rank: int) -> Shapes:
    """Those of A and B of each layer, by name."""
    found: Shapes = {}
    for name in names:
        layer: Any = model.get_submodule(name)
        found |= {f"{name}.lora_A.weight": (rank, layer.in_features), f"{name}.lora_B.weight": (layer.out_features, rank)}
    return found


def _ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


# ---- in a model ----


def put_into(model: Any, names: Sequence[str], lora: LoRA, made: Callable[[str], Tensor]) -> None:
    """Adapts the layers in place, with what `made` gives for each name; only that is trained. Raises `MissingBackend` without peft."""
    peft = _import()
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, bias="none", target_modules=list(names))
    peft.inject_adapter_in_model(config, model, adapter_name=NAME, low_cpu_mem_usage=True)
    model.requires_grad_(False)
    for name in names:
        layer = model.get_submodule(name)
        for part in ("lora_A", "lora_B"):
            getattr(layer, part)[NAME].weight = nn.Parameter(made(f"{name}.{part}.weight"))


def switch(model: Any, *, on: bool) -> None:
    """Whether the adapter takes part in a forward pass; peft's own switch would also freeze it, under the feet of what shards it."""
    for module in model.modules():
        if hasattr(module, "_disable_adapters"):
            module._disable_adapters = not on


def named(model: Any) -> dict[str, Tensor]:
    """`hugging_face.named_tensors` of an adapted model, A and B directly before the weight that they are added to."""
    found = {plain(name): tensor for name, tensor in hugging_face.named_tensors(model).items()}
    ordered: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if not is_part(name):
            ordered |= {part: found[part] for part in parts_of(name) if part in found}
            ordered[name] = tensor
    return ordered


def parts_of(weight: str) -> tuple[str, str]:
    """The names of A and B of a weight."""
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def is_part(name: str) -> bool:
    """Whether this is the name of an A or a B."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def plain(name: str) -> str:
    """The name without what peft adds to it."""
    return re.sub(rf"\.(lora_[AB])\.{NAME}\.", r".\1.", name.replace(".base_layer.", "."))


def initial(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """B of zeros, and A uniform in ±1/√(its columns), as peft begins: the same for a name and a seed, whatever the rank or the order."""
    if name.endswith(".lora_B.weight"):
        return torch.zeros(shape)
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(zlib.crc32(name.encode(), seed)))


def fingerprint(model: Any) -> int:
    """A number that another model does not have, of a few thousand values of each tensor. Before anything is adapted or cast."""
    digest = hashlib.sha256()
    for name, tensor in hugging_face.named_tensors(model).items():
        flat = tensor.detach().flatten()
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(flat[:: -(-len(flat) // SAMPLES)].float().numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little", signed=True)


# ---- as a folder ----


def read(folder: Path, lora: LoRA, wanted: Shapes) -> dict[str, Tensor]:
    """A and B of a peft folder, by name, in fp32. Raises `BadInput` where it is not an adapter of this rank, alpha, and these layers."""
    from safetensors.torch import load_file

    if not (folder / CONFIG).is_file() or not (folder / TENSORS).is_file():
        raise BadInput(f"LoRA.adapter: {folder} is no peft folder: it needs {CONFIG} and {TENSORS}")
    _check_config(folder, json.loads((folder / CONFIG).read_text()), lora)
    found = {name.removeprefix(PREFIX): tensor.float() for name, tensor in load_file(folder / TENSORS).items()}
    problems = [f"{n} is not there" for n in wanted.keys() - found.keys()] + [f"{n} is surplus" for n in found.keys() - wanted.keys()]
    problems += [f"{n} is {tuple(found[n].shape)} instead of {s}" for n, s in wanted.items() if n in found and found[n].shape != s]
    if problems:
        shown = "; ".join(sorted(problems)[:4])
        raise BadInput(f"LoRA.adapter: {folder} is for other layers or another model than this one: {shown} ({len(problems)} in all)")
    return found


def _check_config(folder: Path, config: Mapping[str, Any], lora: LoRA) -> None:
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or any(config.get(name) for name in STRANGE):
        strange = [name for name in STRANGE if config.get(name)]
        why = f"with {', '.join(strange)}" if strange else f"peft_type={config.get('peft_type')}, bias={config.get('bias')}"
        raise BadInput(f"LoRA.adapter: {folder} is no plain LoRA adapter ({why})")
    own = (config.get("r"), config.get("lora_alpha"))
    if own != (lora.rank, lora.alpha):
        raise BadInput(f"LoRA.adapter: {folder} has rank {own[0]} and alpha {own[1]}; write LoRA(rank={own[0]}, alpha={own[1]}, …)")


def write(path: Path, tensors: Mapping[str, Tensor], lora: LoRA, base: str) -> None:
    """Writes a folder that `PeftModel.from_pretrained` loads over the model `base`, aside and then renamed."""
    from safetensors.torch import save_file

    names = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    peft = _import()
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM", inference_mode=True,
        target_modules=sorted(names), base_model_name_or_path=base,
    )  # fmt: skip
    with hugging_face.replaced(path) as aside:
        config.save_pretrained(aside)
        save_file({PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}, aside / TENSORS, metadata={"format": "pt"})


def _import() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingBackend(
            f"LoRA needs peft, which is not installed or cannot be imported ({error}): pip install 'rft-runtime[lora]'"
        ) from error
    return peft
