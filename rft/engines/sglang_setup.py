"""What is set right in each of SGLang's processes before SGLang is imported there."""

import functools
import os
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

CPU_PLATFORM = "rft_cpu"
"""The name of the entry point by which SGLang finds `sglang_cpu`."""


class Unfit(Exception):
    """SGLang cannot be started, or not like this, and the message says why: `missing` or too old, or `bad` settings."""

    def __init__(self, kind: Literal["missing", "bad"], why: str) -> None:
        super().__init__(why)
        self.kind = kind


def prepare() -> None:
    """Takes what it mends as it finds it."""
    _let_configurations_be_registered_twice()
    if os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM and "torchvision" not in sys.modules:
        _stand_in_for_torchvision()


def _let_configurations_be_registered_twice() -> None:
    """SGLang registers configurations of models that a newer transformers knows itself, and would fail at that."""
    from transformers import AutoConfig

    original: Any = AutoConfig.register
    if not isinstance(original, functools.partial):
        setattr(AutoConfig, "register", functools.partial(original, exist_ok=True))  # noqa: B010 (a static method, for any caller)


def _stand_in_for_torchvision() -> None:
    """SGLang's import of all its configurations needs names of torchvision's, which few models use; PyPI has no build of it for CPU torch.

    Transformers is to go on knowing that it is not there. A model of images that needs it fails as it starts.
    """
    if find_spec("torchvision") is None:
        from transformers.utils.import_utils import is_torchvision_available

        assert not is_torchvision_available()  # it keeps the answer
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
            sys.modules[name] = _Absent(name)


class _Absent(ModuleType):
    """A module, and everything in it, of which only the names are there."""

    def __getattr__(self, name: str) -> "_Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *arguments: object, **named: object) -> None:
        del arguments, named
        raise ImportError(f"{self.__name__} is needed, and torchvision is not installed")


def cpu_platform() -> str | None:
    """What SGLang asks an entry point for: the class of its platform, where that was chosen."""
    return "rft.engines.sglang_cpu:TorchPlatform" if os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM else None
