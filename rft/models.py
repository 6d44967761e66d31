"""A causal language model as it lies on disk: found, checked, and its tokenizer, before anything is put on a device."""

import dataclasses as dc
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rft.data.images import ImageReader
from rft.errors import BadInput
from rft.images import placeholder_of
from rft.shapes import require_hint

Kind = Literal["CausalLM", "ImageTextToText", "SequenceClassification", "TokenClassification"]
"""Of models, as transformers names them."""
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""What a hub id looks like."""
REWARDS: tuple[Kind, ...] = ("SequenceClassification", "TokenClassification")
"""Those that reward models are of."""


@dc.dataclass(frozen=True)
class ModelFolder:
    """A model that `from_pretrained` loads: its folder, configuration and tokenizer."""

    path: Path
    config: Any
    tokenizer: Any
    images: ImageReader | None = None
    """How prompts with images are made for it; None: it is a model of text alone."""

    @property
    def kind(self) -> Kind:
        """Of the policy that it is."""
        return "CausalLM" if self.images is None else "ImageTextToText"


def find_model(model: str) -> ModelFolder:
    """Finds a model folder or hub id, with a causal LM in it, which may take images. Raises `BadInput` that says what is missing."""
    from transformers import AutoConfig, AutoTokenizer

    folder = find_folder(model)
    try:
        config: Any = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"the configuration in {folder} cannot be read: {error}") from error
    kind = kind_of(config)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{folder} has no tokenizer that can be loaded: {error}") from error
    if not tokenizer("1", add_special_tokens=False)["input_ids"]:
        raise BadInput(f"{folder} has no tokenizer: what transformers makes up in its place knows no text")
    return ModelFolder(folder, config, tokenizer, _image_reader(folder, config) if kind == "ImageTextToText" else None)


def find_folder(model: str) -> Path:
    """The folder of a model that is named by it, or by a hub id. Raises `BadInput` where there is none."""
    require_hint("a model", model, str)
    folder = Path(model).expanduser()
    if model and not folder.is_dir():
        folder = _from_hub(model)
    if not model or not (folder / "config.json").is_file():
        raise BadInput(f"{model!r} is no model folder: it has no config.json")
    return folder


def kind_of(config: Any) -> Kind:
    """What kind of policy a configuration is of. Raises `BadInput` for one that is of none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "CausalLM"
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return "ImageTextToText"
    raise BadInput(f"a {type(config).__name__} is the configuration of no causal language model, with or without images")


def reward_kind(config: Any, named: str) -> Kind:
    """What kind of reward model a configuration is of. Raises `BadInput` for one that does not give one number."""
    kinds: list[str] = config.architectures or []
    found: list[Kind] = [kind for kind in REWARDS if len(kinds) == 1 and kinds[0].endswith(kind)]
    if not found:
        is_one, wanted = ", ".join(kinds) or "model of no named class", " or ".join(f"…For{kind}" for kind in REWARDS)
        raise BadInput(f"RewardModel.model {named} is a {is_one}, and must be a {wanted} with one label")
    if config.num_labels != 1:
        raise BadInput(f"RewardModel.model {named} has {config.num_labels} labels, and must have 1: its score")
    return found[0]


def auto_class(kind: Kind) -> Any:
    """That of transformers for models of a kind."""
    import transformers

    return getattr(transformers, f"AutoModelFor{kind}")


def stored_names(model: Any) -> dict[str, str]:
    """What a checkpoint calls the tensors of a Hugging Face model: some are stored under other names than they have in memory.

    They depend on the model's class alone, not on how its files had them. Raises `BadInput` where tensors are also stored in another
    form, as experts that are held together.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # What loading has noted of the files is forgotten: a model that another rank has made without files must be named alike.
    model._weight_conversions = None
    marks: dict[str, Tensor] = {name: torch.empty(0) for name in model.state_dict(keep_vars=True)}
    stored: dict[str, Tensor] = revert_weight_conversion(model, dict(marks))
    back = {id(mark): name for name, mark in stored.items()}
    if any(id(mark) not in back for mark in marks.values()):
        raise BadInput(f"{type(model).__name__} is stored in another form than it has in memory; its weights cannot be streamed yet")
    return {name: back[id(mark)] for name, mark in marks.items()}


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


def _image_reader(folder: Path, config: Any) -> ImageReader:
    from transformers import AutoImageProcessor

    placeholder = placeholder_of(config)
    if placeholder is None:
        raise BadInput(
            f"{folder}: a {type(config).__name__} takes images in a way that is not known here; Qwen2-VL and Qwen2.5-VL can be used"
        )
    try:
        processor: Any = AutoImageProcessor.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise BadInput(
            f"{folder} takes images, and has no image processor that can be loaded (preprocessor_config.json, with the package pillow "
            f"installed): {error}"
        ) from error
    return ImageReader(processor=processor, placeholder=placeholder)


def _from_hub(model: str) -> Path:
    if not HUB_ID.fullmatch(model):
        raise BadInput(f"{model!r} is neither a folder nor a model that the hub gives, whose ids have the form owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise BadInput(f"{model!r} is neither a folder nor a model that the hub gives: {error}") from error
