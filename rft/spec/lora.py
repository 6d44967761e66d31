"""Low-rank adaptation of the Actor, as its trainer is given it."""

import dataclasses as dc
import math
from typing import Any, Literal

from rft.errors import BadInput
from rft.shapes import check_fields
from rft.spec.checks import at_least_one


@dc.dataclass(frozen=True, kw_only=True)
class LoRA:
    """Only an adapter is trained: W x becomes W x + alpha / rank · B A x, with W frozen (https://arxiv.org/abs/2106.09685).

    A and B are fp32 masters with AdamW's moments; W is kept in the dtype of computing, without a master (a checkpoint in fp32 is rounded
    to bfloat16 once where that is the dtype). There is no dropout. The Reference of such an Actor is W alone, and takes no memory.
    """

    rank: int = 16
    """Rows of A, and columns of B."""
    alpha: float = 32.0
    """B A is multiplied by alpha / rank."""
    targets: tuple[str, ...] | None = None
    """Linear layers that are adapted, by the end of their names, such as "q_proj" or "mlp.up_proj"; None: all of the transformer blocks."""
    sync: Literal["merged", "adapter"] = "merged"
    """What a broadcast sends: `merged` all weights, W + alpha / rank · B A; `adapter` A and B alone to an engine that still holds W."""
    adapter: str | None = None
    """A peft folder to begin with, of the same rank, alpha and layers; None: A is random and B is 0, so that nothing is changed yet."""
    seed: int = 0
    """Of A's random values."""

    def __post_init__(self) -> None:
        check_fields(self, but=("targets",))
        at_least_one(self, "rank")
        if not 0 < self.alpha < math.inf:
            raise BadInput(f"LoRA.alpha must be above 0, got {self.alpha}")
        if self.adapter == "":
            raise BadInput("LoRA.adapter must be a peft folder, or None, got ''")
        names: Any = self.targets
        if names is not None and not (type(names) is tuple and names and all(type(name) is str and name for name in names)):
            raise BadInput(f"LoRA.targets must be a tuple of names such as ('q_proj', 'v_proj'), or None for all; got {self.targets!r}")

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank
