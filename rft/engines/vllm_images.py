"""Images for vLLM: given as they were processed for the trainer too, with token ids that have their placeholders already.

So vLLM neither processes an image nor expands a prompt, and what it computes with is what is trained on. Its own processor is only made
because it starts no model that takes images without one.
"""

import hashlib
import importlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rft.engines.protocol import Request
from rft.errors import MissingEngine
from rft.images import Images, Placeholder, runs_of
from rft.models import ModelFolder

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.outputs import RequestOutput


def options(model: ModelFolder) -> dict[str, Any]:
    """How vLLM is started for this model. Raises `MissingEngine` for one that takes images where torchvision cannot be imported."""
    if model.images is None:
        return {}
    try:
        _ = importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:  # the second where it is built for another torch
        raise MissingEngine(
            f"vLLM runs models that take images with torchvision alone, which cannot be imported here ({error}): install the build of it "
            "that belongs to this torch"
        ) from error
    # Its cache of processed images knows nothing of ours; memory is not to be measured with the largest images that there may be; and
    # newer ones would take pixels that are not normalised, and do that themselves.
    given: dict[str, Any] = {"limit_mm_per_prompt": {"video": 0}, "mm_processor_cache_gb": 0}
    given |= {"skip_mm_profiling": True, "mm_device_do_normalize": False}
    from vllm.engine.arg_utils import EngineArgs

    known = inspect.signature(EngineArgs).parameters
    return {name: value for name, value in given.items() if name in known}


def require_images(llm: "LLM") -> None:
    """Raises `MissingEngine` for a vLLM that cannot be given what is processed already."""
    if not hasattr(llm, "wait_for_completion"):
        raise MissingEngine("this vLLM is too old for models that take images: pip install 'vllm>=0.26'")


def run(
    llm: "LLM", requests: Sequence[Request], parameters: "Sequence[SamplingParams]", placeholder: Placeholder, name: str
) -> "list[RequestOutput]":
    """Samples requests of which some have images. `name` is another one for other weights: features are kept under it."""
    from vllm.sampling_params import RequestOutputKind

    marks = {id(each): f"{name} {_digest(each)}" for each in {id(r.images): r.images for r in requests}.values() if each is not None}
    for request, each in zip(requests, parameters, strict=True):
        each.output_kind = RequestOutputKind.FINAL_ONLY
        given = _given(request, placeholder, marks)
        _ = llm.llm_engine.add_request(str(next(llm.request_counter)), given, each)
    return llm.wait_for_completion(use_tqdm=False)


def _given(request: Request, placeholder: Placeholder, marks: dict[int, str]) -> dict[str, Any]:
    """A prompt in the form that vLLM has when its own processing is over."""
    images = request.images
    if images is None:
        return {"type": "token", "prompt_token_ids": list(request.tokens)}
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", images.grids.prod(dim=1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    count = len(images.grids)
    runs = runs_of(list(request.tokens), placeholder.token)[:count]
    return {
        "type": "multimodal",
        "prompt_token_ids": list(request.tokens),
        "mm_kwargs": MultiModalKwargsItems.from_hf_inputs({"pixel_values": images.pixels, "image_grid_thw": images.grids}, fields),
        "mm_hashes": {"image": [f"{marks[id(images)]} {number}" for number in range(count)]},
        "mm_placeholders": {"image": [PlaceholderRange(offset=place, length=length) for place, length in runs]},
    }


def _digest(images: Images) -> str:
    """Tells images apart, and knows the same ones again."""
    made = hashlib.blake2b(repr(images.grids.tolist()).encode(), digest_size=16)
    made.update(images.pixels.contiguous().numpy().data)
    return made.hexdigest()
