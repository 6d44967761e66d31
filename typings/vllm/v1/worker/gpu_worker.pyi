from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module

class ModelRunner:
    kv_caches: list[Tensor]
    lora_manager: Any

class Worker:
    model_runner: ModelRunner
    def get_model(self) -> Module: ...
    def reload_weights(self, *, weights_iterator: Iterator[tuple[str, Tensor]]) -> None: ...
