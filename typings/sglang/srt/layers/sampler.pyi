from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

class Sampler(torch.nn.Module):
    output_logprob_processor: Any

    def _preprocess_logits(self, logits: Tensor, sampling_info: Any) -> Tensor: ...

def register_sampler_backend(backend: str, factory: Callable[[], Sampler]) -> None: ...
