"""What is set right in each of SGLang's processes before SGLang is imported there."""

import functools
import os
import sys
from typing import Any, Literal

CPU_PLATFORM = "rft_cpu"
"""The name of the entry point by which SGLang finds `sglang_cpu`."""


class Unfit(Exception):
    """SGLang cannot be started, or not like this, and the message says why: `missing` or too old, or `bad` settings."""

    def __init__(self, kind: Literal["missing", "bad"], why: str) -> None:
        super().__init__(why)
        self.kind = kind


def prepare() -> None:
    """Idempotent; takes what it mends as it finds it."""
    _let_configurations_be_registered_twice()
    if os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM:
        _know_operators_of_torchvision()


def _let_configurations_be_registered_twice() -> None:
    """SGLang registers configurations of models that a newer transformers knows itself, and would fail at that."""
    from transformers import AutoConfig

    original: Any = AutoConfig.register
    if not isinstance(original, functools.partial):
        setattr(AutoConfig, "register", functools.partial(original, exist_ok=True))  # noqa: B010 (a static method, for any caller)


def _know_operators_of_torchvision() -> None:
    """PyPI's torchvision is built against CUDA's torch: on CPU torch its operators are missing, and it fails as it registers fakes of them.

    SGLang's import needs none of them, only that torchvision can be imported.
    """
    import torch

    if "torchvision" not in sys.modules and not hasattr(_know_operators_of_torchvision, "library"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _ = library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        setattr(_know_operators_of_torchvision, "library", library)  # noqa: B010 (it lives as long as the process)


def cpu_platform() -> str | None:
    """What SGLang asks an entry point for: the class of its platform, where that was chosen."""
    return "rft.engines.sglang_cpu:TorchPlatform" if os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM else None
