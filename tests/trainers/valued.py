"""Rows with returns, and a plain single-process critic, written row by row on nothing but transformers and torch: what must come out."""

import dataclasses as dc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft.experience import Experience
from tests.trainers import oracle
from tests.trainers.batches import random_experience

CLIP = 0.2


def valued_experience() -> Experience:
    """`random_experience` with returns, and values around which some of the clips act."""
    source, draw = random_experience(), torch.Generator().manual_seed(3)
    returns, values = (torch.randn(source.tokens.shape, generator=draw).where(source.sampled, torch.tensor(0.0)) for _ in range(2))
    return dc.replace(source, returns=returns, values=0.3 * values)


class PlainCritic(nn.Module):
    """A backbone and a linear head. `frozen`: hidden states are read without a gradient, and the head begins at 0."""

    def __init__(self, folder: Path, *, frozen: bool = False) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForSequenceClassification

        classifier = any("Classification" in name for name in AutoConfig.from_pretrained(folder).architectures)
        whole: Any = (
            AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32) if classifier else oracle.plain_model(folder)
        )
        self.model, self.frozen = whole.model, frozen
        self.score = whole.score if classifier else nn.Linear(whole.config.hidden_size, 1, bias=False)
        if not classifier:
            nn.init.zeros_(self.score.weight)

    def forward(self, batch: Experience) -> Tensor:
        """V at every sampled token: what the head makes of the hidden state before it."""
        rows: list[Tensor] = []
        for row, length in enumerate(batch.mask.sum(dim=1).tolist()):
            hidden = self.model(input_ids=batch.tokens[row, None, :length], use_cache=False).last_hidden_state[0]
            before = self.score(hidden.detach() if self.frozen else hidden)[:-1, 0]
            rows.append(nn.functional.pad(before, (1, batch.tokens.shape[1] - length)))
        return torch.where(batch.sampled, torch.stack(rows), 0.0)

    def valued(self, batch: Experience, clip: float | None) -> tuple[Tensor, Tensor]:
        """V; and ½ (V − R)², clipped or not, averaged over all sampled tokens."""
        assert batch.returns is not None
        assert batch.values is not None
        new = self(batch)
        squares = (new - batch.returns) ** 2
        if clip is not None:
            near = torch.maximum(torch.minimum(new, batch.values + clip), batch.values - clip)
            squares = torch.maximum(squares, (near - batch.returns) ** 2)
        return new, 0.5 * squares[batch.sampled].sum() / batch.sampled.sum()

    def trained(self) -> dict[str, nn.Parameter]:
        """What an optimizer moves, by the name of a checkpoint."""
        return {name: p for name, p in self.named_parameters() if not self.frozen or name.startswith("score")}
