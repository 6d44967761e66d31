from collections.abc import Mapping

from torch import Tensor

class MultiModalFieldConfig:
    @staticmethod
    def flat_from_sizes(modality: str, size_per_item: Tensor) -> MultiModalFieldConfig: ...
    @staticmethod
    def batched(modality: str, *, keep_on_cpu: bool = ...) -> MultiModalFieldConfig: ...

class MultiModalKwargsItems:
    @staticmethod
    def from_hf_inputs(hf_inputs: Mapping[str, Tensor], config_by_key: Mapping[str, MultiModalFieldConfig]) -> MultiModalKwargsItems: ...

class PlaceholderRange:
    def __init__(self, offset: int, length: int) -> None: ...
