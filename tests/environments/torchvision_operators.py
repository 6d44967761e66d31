"""Makes PyPI's torchvision importable beside a torch without CUDA; `make.py` puts this into environments, where a `.pth` file loads it.

That torchvision is built for CUDA's torch. Beside another one its compiled operators cannot be loaded, and its import fails as it adds
to operators that nothing has declared. Declared here, they are still missing, and everything else works: what processes images does.
"""

import importlib.abc
import sys
from typing import Any

OPERATORS = ("nms", "qnms")


class Declare(importlib.abc.MetaPathFinder):
    """Finds nothing; and declares the operators just before torchvision is imported, so that torch is imported by nobody else's wish."""

    kept: Any = None

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """See `importlib.abc.MetaPathFinder`."""
        del path, target
        if fullname == "torchvision" and self.kept is None:
            import torch

            if not torch.backends.cuda.is_built():
                self.kept = torch.library.Library("torchvision", "FRAGMENT")
                for name in OPERATORS:
                    _ = self.kept.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, Declare())
