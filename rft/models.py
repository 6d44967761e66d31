"""A causal language model as it lies on disk: found, checked, and its tokenizer, before anything is put on a device."""

import dataclasses as dc
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rft.errors import BadInput


@dc.dataclass(frozen=True)
class ModelFolder:
    """A model that `from_pretrained` loads: its folder, configuration and tokenizer."""

    path: Path
    config: Any
    tokenizer: Any


def find_model(model: str) -> ModelFolder:
    """Finds a model folder or hub id, with a causal LM in it. Raises `BadInput` that says what is missing."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer

    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _from_hub(model)
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} is no model folder: it has no config.json")
    try:
        config: Any = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"the configuration in {folder} cannot be read: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BadInput(f"{folder} is no causal language model: its configuration is {type(config).__name__}")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{folder} has no tokenizer that can be loaded: {error}") from error
    if not tokenizer("1", add_special_tokens=False)["input_ids"]:
        raise BadInput(f"{folder} has no tokenizer: what transformers makes up in its place knows no text")
    return ModelFolder(folder, config, tokenizer)


@contextmanager
def reading_weights(folder: Path) -> Generator[None]:
    """Says as `BadInput` what is wrong with the files that weights are read from, such as a download that was cut off."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise BadInput(f"the weights in {folder} cannot be loaded: {error}; copy or download the model's files anew") from error


def attention_of(config: Any) -> str | None:
    """The attention to ask transformers for: the plain one where it caps its scores, which the default one leaves out; None: any."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise BadInput(f"{model!r} is neither a folder nor a model that the hub gives: {error}") from error
