from typing import Any

from torch import nn
from torch.optim import Optimizer

from deepspeed import accelerator as accelerator
from deepspeed import ops as ops
from deepspeed import utils as utils
from deepspeed import zero as zero

__version__: str

def initialize(*, model: nn.Module, optimizer: Optimizer, config: dict[str, Any]) -> tuple[Any, Any, Any, Any]: ...
