"""The embedded default: plain transformers, with its own copy of the weights, so that staleness means what it means elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rft.engines.decoding import decode, score
from rft.engines.delivery import Names, common_dtype, delivery, named
from rft.engines.protocol import Completion, EngineMemory, Keeping, Request
from rft.engines.requests import check_requests, check_sequences, end_tokens
from rft.engines.stopping import StopStrings
from rft.errors import EngineFailed, MissingEngine
from rft.models import ModelFolder, attention_of, auto_class, reading_weights
from rft.narrow import UNCUT
from rft.ops.transfer import standing, transfer
from rft.parallel.world import World
from rft.sampling import Sampling
from rft.seeing import eyes
from rft.spec import TransformersEngine


def build(spec: TransformersEngine, model: ModelFolder, world: World) -> "Transformers":
    """The engine on this rank's device, awake, with the folder's weights. Raises `BadInput` for TP above 1, and for broken files."""
    module = module_of(spec, model, world).to(world.device)
    return Transformers(module, model, max_model_len=spec.max_model_len, max_rows=spec.max_rows)


def module_of(spec: TransformersEngine, model: ModelFolder, world: World) -> Any:
    """The model on the host, with the folder's weights. Raises as `build` does."""
    spec.check(model.config.get_text_config(), world.tp_size)
    options: dict[str, Any] = {"dtype": getattr(torch, spec.dtype), "attn_implementation": attention_of(model.config)}
    try:
        with reading_weights(model.path):
            return auto_class(model.kind).from_pretrained(model.path, **options)
    except ImportError as error:
        raise MissingEngine("the transformers engine needs transformers: pip install 'transformers>=5.17'") from error


class Transformers:
    """One model on one device. The cache lives within `generate` alone, so that waking and sleeping map nothing for it."""

    name = "transformers"
    keeps: Literal["device", "host"] | None = "device"

    def __init__(self, module: Any, model: ModelFolder, *, max_model_len: int, max_rows: int) -> None:
        self._module = module.eval().requires_grad_(False)
        self._device: torch.device = module.device
        self._ends, self._tokenizer = end_tokens(model), model.tokenizer
        self.dtype: torch.dtype = module.dtype
        self.max_model_len, self._max_rows = max_model_len, max_rows
        self._places = [(tensor, tensor.shape) for tensor in named(module).values()]
        self._bytes = sum(tensor.nbytes for tensor, _ in self._places)
        self._slots = self._taken(module)
        self._shapes = {names: tensor.shape for names, tensor in self._slots.items()}
        self.casts_to = common_dtype(self._slots.values())
        self.narrows = UNCUT
        self._by_name = {name: tensor for names, tensor in self._slots.items() for name in names}
        self._names = tuple(names[0] for names in self._slots)
        self._vocab, self._eyes = int(module.get_input_embeddings().weight.shape[0]), eyes(module)
        self.takes_images = self._eyes is not None
        self._weights: Literal["loaded", "undefined", "released"] = "loaded"
        self._cache_mapped = True

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Samples `max_rows` requests at a time. Raises `BadInput` for one that cannot be served, `EngineFailed` when asleep."""
        self._need("generate", cache=True)
        placeholder = None if self._eyes is None else self._eyes.placeholder
        check_requests(requests, sampling, max_model_len=self.max_model_len, vocab=self._vocab, placeholder=placeholder)
        ends = torch.tensor([*self._ends, *sampling.stop_tokens], dtype=torch.int64, device=self._device)
        stops = StopStrings(self._tokenizer, sampling.stop)
        parts = (requests[i : i + self._max_rows] for i in range(0, len(requests), self._max_rows))
        return [completion for part in parts for completion in decode(self._module, part, sampling, ends, stops, self._eyes)]

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """log p of every token but the first, at temperature 1. Raises as `generate` does."""
        self._need("score", cache=False)
        check_sequences(sequences, max_model_len=self.max_model_len, vocab=self._vocab)
        parts = (sequences[i : i + self._max_rows] for i in range(0, len(sequences), self._max_rows))
        return [row for part in parts for row in score(self._module, part, self._device)]

    def sleep(self, weights: Keeping) -> None:
        """`release` frees the weights' memory, so that using them fails; `keep` leaves them on the device."""
        self._cache_mapped = False
        if weights == "release" and self._weights != "released":
            self._weights = "released"
            self._release()

    def wake_weights(self) -> None:
        """Takes memory for the weights again; after a release it holds nothing of meaning until `load`."""
        if self._weights == "released":
            for tensor, shape in self._places:
                tensor.data = tensor.new_empty(shape)
            self._weights = "undefined"

    @torch.inference_mode()
    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> Mapping[str, int]:
        """Copies every tensor into its place. Raises `SyncFailed` that names what is missing, unknown or of a wrong shape."""
        with delivery(tensors, self._shapes, self.name) as stream:
            self._need_weights("load")
            self._weights = "undefined"
            names = list[str]()
            sums = transfer(self._to_slots(stream, names))
        self._weights = "loaded"
        self._names = tuple(names)
        return dict(zip(names, sums.tolist(), strict=True))

    @torch.inference_mode()
    def checksums(self) -> Mapping[str, int]:
        """Read from the weights where they lie, by the names that `load` took (before it: by the checkpoint's)."""
        self._need_weights("checksums")
        sums = standing([self._by_name[name] for name in self._names])
        return dict(zip(self._names, sums.tolist(), strict=True))

    def wake_cache(self) -> None:
        """Lets it generate again; there is nothing to map."""
        self._cache_mapped = True

    def flush(self) -> None:
        """Nothing outlives `generate` that was computed with older weights: there is nothing to drop."""

    def memory(self) -> EngineMemory:
        """The weights' bytes; no cache is mapped between two calls."""
        return EngineMemory(weights=self._bytes, cache=0, mapped=0 if self._weights == "released" else self._bytes)

    def close(self) -> None:
        """Frees the weights. The engine cannot be woken afterwards."""
        self.sleep("release")
        self._slots, self._by_name, self._places = {}, {}, []
        self._module = None

    # ---- conditions ----

    def _taken(self, module: Any) -> dict[Names, Tensor]:
        """What `load` takes, and where it goes."""
        return named(module)

    def _to_slots(self, tensors: Iterator[tuple[str, Tensor]], names: list[str]) -> Iterator[tuple[Tensor, Tensor]]:
        for name, tensor in tensors:
            names.append(name)
            yield self._by_name[name], tensor
            del tensor  # as `transfer` lets go of it

    def _need(self, verb: str, *, cache: bool) -> None:
        self._need_weights(verb)
        if self._weights == "undefined":
            raise EngineFailed(f"{verb}: the transformers engine's weights are undefined since it was woken or half loaded; load first")
        if cache and not self._cache_mapped:
            raise EngineFailed(f"{verb}: the transformers engine is asleep; call wake_cache first")

    def _need_weights(self, verb: str) -> None:
        if self._weights == "released":
            raise EngineFailed(f"{verb}: the transformers engine has released its weights; call wake_weights first")

    def _release(self) -> None:
        # Without shape, not without storage alone: whoever uses them gets an error, and no segmentation fault.
        for tensor, _ in self._places:
            tensor.data = tensor.new_empty(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
