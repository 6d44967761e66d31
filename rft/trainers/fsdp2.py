"""The Actor under PyTorch's `fully_shard`: fp32 masters and moments in shards, computing in the dtype asked for.

Every rank holds a slice of every parameter, of its gradient and of its moments. In a step with `keep_gathered` the blocks are
gathered once and stay so over all micro-batches; gradients add up in fp32 on each rank and are reduced once, with the last
micro-batch. Without it every block is sharded again after use, and every micro-batch's gradient is reduced at once: less memory for
more traffic. Objectives divide by the global batch, so gradients are summed over ranks.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float32, Int64
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import get_total_norm

from rft import tree
from rft.errors import BadInput, NonFiniteGradient, RftError, RoleError, RuntimePoisoned, ShapeError
from rft.experience import Minibatch
from rft.models import ModelFolder
from rft.objectives import LossTerms, MicroBatch, Objective, TokenScores, Totals
from rft.ops.logprobs import predictors
from rft.parallel.world import World
from rft.spec import FSDP2Trainer
from rft.trainers import hugging_face
from rft.trainers.gathering import gathered
from rft.trainers.gloo import GlooReduceScatter
from rft.trainers.microbatches import agree, cut, gather, share_of, to_width
from rft.trainers.protocol import Part, TensorSpec, Trainer
from rft.trainers.schedule import learning_rate
from rft.trainers.shelf import Shelf


def build(spec: FSDP2Trainer, model: ModelFolder, world: World) -> Trainer:
    """Loads the model on every rank's host, and shards it over the whole world. Collective. Raises `BadInput` for what cannot work."""
    return _FSDP2(spec, model, world)


class _FSDP2:
    name = "fsdp2"

    def __init__(self, spec: FSDP2Trainer, folder: ModelFolder, world: World) -> None:
        self._spec, self._folder, self._world = spec, folder, world
        self._model: Any = hugging_face.load(folder, checkpointing=spec.gradient_checkpointing)
        _shard(self._model, spec, world)
        self._sharded = [module for module in self._model.modules() if isinstance(module, FSDPModule)]
        self._parameters: list[Any] = list(self._model.parameters())
        self._optimizer: Any = _adamw(self._parameters, spec)
        moments = [self._optimizer.state[p][name] for p in self._parameters for name in ("exp_avg", "exp_avg_sq")]
        self._shelves = {"model": Shelf(_local(self._parameters)), "optimizer": Shelf(_local(moments))}
        self._steps = 0

    # ---- weights ----

    def manifest(self) -> tuple[TensorSpec, ...]:
        tensors = self._model.state_dict(keep_vars=True)
        names = hugging_face.checkpoint_names(self._model)
        return tuple(TensorSpec(name=n, shape=tuple(tensors[n].shape), dtype=tensors[n].dtype) for n in names)

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        tensors = self._model.state_dict(keep_vars=True)
        here = dict(zip(map(id, self._parameters), self._shelves["model"].readable(), strict=True))
        names = hugging_face.checkpoint_names(self._model)
        split = sum(id(tensors[n]) in here for n in names)
        yield from gathered([(n, tuple(tensors[n].shape), here[id(tensors[n])]) for n in names[:split]], self._world)
        yield from ((n, tensors[n]) for n in names[split:])

    def export(self, path: Path) -> None:
        dtype = self._folder.config.dtype or torch.float32
        weights = {n: t.to("cpu", dtype, copy=True) for n, t in self.stream_weights() if self._world.rank == 0}
        problem: list[str | None] = [None]
        if self._world.rank == 0:
            try:
                hugging_face.write(path, weights, self._model, self._folder)
            except OSError as error:
                problem = [f"the model could not be written to {path}: {error}"]
        dist.broadcast_object_list(problem, group=self._world.host, group_src=0)
        if problem[0] is not None:
            raise BadInput(problem[0])

    # ---- computing ----

    def logprobs(
        self, tokens: Int64[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], temperature: float
    ) -> Float32[Tensor, "batch seq"]:
        self._require("model")
        plan, _ = agree(self._world, share_of(mask), self._spec.micro_batch_tokens)
        result = torch.zeros(tokens.shape)
        self._model.eval()
        with torch.no_grad():
            for rows in plan:
                index = torch.tensor(rows, dtype=torch.int64)
                own, wanted = _some_rows(tokens[index], mask[index])
                with _attention(self._spec, own):
                    heat = torch.full((len(own),), temperature, device=self._world.device)
                    values = self._forward(self._here(own), self._here(wanted), heat).logprobs.cpu()
                result[index] = to_width(values, result.shape[1])[: len(rows)]
        self._reshard()
        return result

    def step(self, batch: Minibatch, old: Float32[Tensor, "batch seq"] | None, objective: Objective) -> dict[str, float]:
        self._require("model", "optimizer")
        if old is not None and old.shape != batch.tokens.shape:
            raise ShapeError(f"old log-probs of shape {tuple(old.shape)} for a mini-batch of {tuple(batch.tokens.shape)}")
        plan, totals = agree(self._world, share_of(batch.mask, batch.sampled), self._spec.micro_batch_tokens)
        if totals.tokens == 0:
            raise BadInput("no rank brought a sampled token to this step, so there is nothing to learn from")
        self._model.train()
        metrics: dict[str, Tensor] = {}
        for number, rows in enumerate(plan, start=1):
            micro = tree.tree_map(self._here, cut(batch, old, rows))
            for name, value in self._accumulate(micro, totals, objective, last=number == len(plan)).items():
                metrics[name] = metrics[name] + value if name in metrics else value
        self._reshard()
        return {**self._summed(metrics), **self._update()}

    def _accumulate(self, micro: MicroBatch, totals: Totals, objective: Objective, *, last: bool) -> dict[str, Tensor]:
        """Adds one micro-batch's gradient to the step's; returns its shares of the metrics and the loss."""
        if self._spec.keep_gathered:
            self._model.set_reshard_after_backward(last)
            self._model.set_requires_gradient_sync(last)
        with _attention(self._spec, micro.rows.tokens):
            new = self._forward(micro.rows.tokens, micro.rows.sampled, micro.rows.temperature)
            terms = _asked(objective, new, micro, totals)
            # FSDP averages over the ranks, and the objective has divided by the global batch already. A loss that does not look at
            # the log-probs (a filler's, say) has a gradient too, of 0: every rank runs every backward pass.
            torch.autograd.backward(terms.loss * self._world.size + 0 * new.logprobs.sum())
        return {name: value.detach() for name, value in {**terms.metrics, "loss": terms.loss}.items()}

    def _forward(self, tokens: Tensor, wanted: Tensor, temperature: Tensor) -> TokenScores:
        """Scores [batch, seq] of the wanted tokens, 0 elsewhere.

        Rows are padded on the right, where causal attention never looks, so there is no attention mask; and columns that predict
        nothing that is wanted (prompts) do not reach the head.
        """
        columns = predictors(wanted)
        logits = self._model(input_ids=tokens, use_cache=False, logits_to_keep=columns).logits.float()
        table = (logits / torch.where(temperature == 0, 1.0, temperature)[:, None, None]).log_softmax(dim=-1)
        picked = table.gather(2, tokens[:, columns + 1, None]).squeeze(2)
        empty = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        both = (empty.index_copy(1, columns + 1, part) for part in (picked, -(table.exp() * table).sum(dim=-1)))
        logprobs, entropy = (torch.where(wanted, part, 0.0) for part in both)
        return TokenScores(logprobs=logprobs, entropy=entropy)

    def _update(self) -> dict[str, float]:
        """One global norm over all parameters, the clip, and AdamW."""
        gradients = _local([p.grad for p in self._parameters if p.grad is not None])
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            self._optimizer.zero_grad()
            raise NonFiniteGradient(f"the gradient's norm is {norm} at step {self._steps}; the optimizer was not touched")
        if norm > self._spec.max_grad_norm:
            for gradient in gradients:
                _ = gradient.mul_(self._spec.max_grad_norm / norm)
        lr = learning_rate(self._spec, self._steps)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        return {"grad_norm": norm, "lr": lr}

    def _norm(self, gradients: list[Tensor]) -> float:
        square = get_total_norm(gradients).double().square().cpu()
        _ = dist.all_reduce(square, group=self._world.host)
        return float(square.sqrt())

    def _summed(self, metrics: dict[str, Tensor]) -> dict[str, float]:
        own = {name: float(value) for name, value in metrics.items()}
        told = gather(self._world, own)
        if any(theirs.keys() != own.keys() for theirs in told):
            self._optimizer.zero_grad()
            raise BadInput(f"the objective gives other metrics on other ranks: {[sorted(theirs) for theirs in told]}")
        return {name: sum(theirs[name] for theirs in told) for name in own}

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._world.device)

    def _reshard(self) -> None:
        # What a forward without gradient gathered stays gathered, as does the root, until somebody says otherwise.
        for module in self._sharded:
            module.reshard()

    # ---- placement ----

    def offload(self, part: Part) -> None:
        self._shelves[part].put()

    def reload(self, part: Part) -> None:
        self._shelves[part].take()

    def bytes(self, part: Part) -> int:
        return self._shelves[part].bytes

    def close(self) -> None:
        for shelf in self._shelves.values():
            shelf.close()
        self._model = self._optimizer = None
        self._parameters, self._sharded = [], []
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _require(self, *parts: Part) -> None:
        for part in parts:
            if self._shelves[part].away:
                raise RoleError(f"the trainer's {part} lies on the host; reload it first")


def _shard(model: Any, spec: FSDP2Trainer, world: World) -> None:
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, spec.dtype), reduce_dtype=torch.float32)
    for module in [*hugging_face.blocks(model), model]:
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not spec.keep_gathered)
        if world.device.type == "cpu" and world.size > 1:
            sharded.set_custom_reduce_scatter(GlooReduceScatter())


def _asked(objective: Objective, new: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
    """The objective's answer. Its own refusals come too late to be taken for ours: earlier micro-batches have left gradients."""
    try:
        return objective(new, micro, totals)
    except RftError as error:
        raise RuntimePoisoned(f"the objective failed in the middle of a step: {type(error).__name__}: {error}") from error


def _attention(spec: FSDP2Trainer, tokens: Tensor) -> AbstractContextManager[object]:
    """On a CPU, the backward pass of PyTorch's fused attention in bf16 takes thrice as long as the plain one on short rows.

    The backward pass belongs inside too: gradient checkpointing computes the forward pass again there, and wants the same kernels.
    """
    short = tokens.device.type == "cpu" and spec.dtype == "bfloat16" and tokens.shape[1] <= 128
    return sdpa_kernel(SDPBackend.MATH) if short else nullcontext()


def _adamw(parameters: list[Any], spec: FSDP2Trainer) -> Any:
    """AdamW with its moments there from the start, so that what it takes is known before the first step."""
    optimizer = torch.optim.AdamW(parameters, spec.lr, spec.betas, spec.eps, spec.weight_decay, fused=True)
    for p in parameters:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def _local(tensors: list[Any]) -> list[Tensor]:
    return [tensor.detach().to_local() for tensor in tensors]


def _some_rows(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Cut to the longest row, at least two columns and one row; and what is wanted of them: all but the first token."""
    width = max(2, int(mask.sum(dim=1).max()) if len(mask) else 0)
    tokens, wanted = to_width(tokens.masked_fill(~mask, 0), width), to_width(mask, width).clone()
    wanted[:, :1] = False
    return (tokens, wanted) if len(mask) else (tokens.new_zeros(1, width), wanted.new_zeros(1, width))
