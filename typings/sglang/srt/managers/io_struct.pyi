from collections.abc import Sequence

class UpdateWeightsFromTensorReqInput:
    def __init__(
        self, *, serialized_named_tensors: Sequence[bytes], load_format: str, flush_cache: bool, weight_version: str
    ) -> None: ...
