"""Run by test_scores.py on two ranks: `head_scores` in the forward of an FSDP2 root module, against the naive form on one process."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rft.ops.scores import head_scores

VOCAB, WIDTH = 37, 8


class Model(nn.Module):
    """Embedding, one layer, head."""

    def __init__(self, *, tied: bool, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.table, self.layer, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.table(ids)))
        if self.fused:
            logprob, entropy = head_scores(hidden, self.head.weight, targets, temperature)
            return logprob - 0.3 * entropy
        table = (self.head(hidden) / temperature[:, None]).log_softmax(dim=1)
        return table.gather(1, targets[:, None]).squeeze(1) + 0.3 * (table.exp() * table).sum(dim=1)


def gradients(model: Model, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
    model(ids, targets, torch.linspace(0.5, 1.5, len(ids))).mean().backward()
    whole = dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        whole[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    return whole


def compare(*, tied: bool, reshard: bool) -> None:
    """`reshard`: the gathered head is let go after forward, and gathered again in the same place for backward."""
    rank, draw = dist.get_rank(), torch.Generator().manual_seed(1)
    ids, targets = torch.randint(0, VOCAB, (2, 2, 6), generator=draw)
    sharded, plain = Model(tied=tied, fused=True), Model(tied=tied, fused=False)
    for parameter in plain.parameters():
        dist.broadcast(parameter.data, src=0)
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded.layer, reshard_after_forward=True)
    fully_shard(sharded, reshard_after_forward=reshard)
    ours = gradients(sharded, ids[rank], targets[rank])
    expected = gradients(plain, ids[rank], targets[rank])
    for name, gradient in expected.items():
        dist.all_reduce(gradient)
        torch.testing.assert_close(ours[name], gradient / dist.get_world_size(), atol=1e-6, rtol=1e-5)
    if rank == 0:
        print("the sharded head agrees", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for tied in (False, True):
        for reshard in (False, True):
            compare(tied=tied, reshard=reshard)
    dist.destroy_process_group()
