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
from rft.errors import BadInput, NonFiniteGradient, RoleError, RuntimePoisoned, ShapeError
from rft.experience import Minibatch
from rft.models import ModelFolder
from rft.objectives import LossTerms, MicroBatch, Objective, TokenScores, Totals, check_terms
from rft.ops.metrics import Metric, host, merged, read
from rft.ops.packing import unpack
from rft.parallel.batches import Batches
from rft.parallel.world import World
from rft.spec import FSDP2Trainer
from rft.trainers import hugging_face
from rft.trainers.gathering import gathered
from rft.trainers.gloo import GlooReduceScatter
from rft.trainers.inputs import inputs
from rft.trainers.microbatches import Share, agree, cut, gather, share_of, some_rows, to_width
from rft.trainers.protocol import Part, TensorSpec, Trainer
from rft.trainers.schedule import learning_rate
from rft.trainers.scorer import Scorer, scorer
from rft.trainers.shelf import Shelf


def build(spec: FSDP2Trainer, model: ModelFolder, world: World) -> Trainer:
    """Loads the model on every rank's host, and shards it over the whole world. Collective. Raises `BadInput` for what cannot work."""
    return _FSDP2(spec, model, world)


class _FSDP2:
    name = "fsdp2"

    def __init__(self, spec: FSDP2Trainer, folder: ModelFolder, world: World) -> None:
        self._spec, self._folder, self._world = spec, folder, world
        self._model: Any = hugging_face.load(folder, checkpointing=spec.gradient_checkpointing)
        self._scorer: Any = scorer(self._model)
        _shard(self._scorer, spec, world)
        self._sharded = [module for module in self._scorer.modules() if isinstance(module, FSDPModule)]
        self._parameters: list[Any] = list(self._model.parameters())
        self._optimizer: Any = _adamw(self._parameters, spec)
        moments = [self._optimizer.state[p][name] for p in self._parameters for name in ("exp_avg", "exp_avg_sq")]
        self._shelves = {"model": Shelf(_local(self._parameters)), "optimizer": Shelf(_local(moments))}
        self._vocab: int = self._model.get_input_embeddings().num_embeddings
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
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: float,
    ) -> Float32[Tensor, "batch seq"]:
        self._require("model")
        plan, _ = self._agree(share_of(tokens, mask, wanted, vocab=self._vocab))
        result, heat = torch.zeros(tokens.shape), torch.full((len(tokens),), temperature)
        self._scorer.eval()
        with torch.no_grad(), self._attention():
            for rows in plan:
                asked = some_rows(tokens, mask, wanted, heat, rows)
                result[list(rows)] = to_width(self._scores(*asked).logprobs.cpu(), result.shape[1])[: len(rows)]
        self._reshard()
        return result

    def step(self, batch: Minibatch, old: Float32[Tensor, "batch seq"] | None, objective: Objective) -> dict[str, float]:
        self._require("model", "optimizer")
        if old is not None and old.shape != batch.tokens.shape:
            raise ShapeError(f"old log-probs of shape {tuple(old.shape)} for a mini-batch of {tuple(batch.tokens.shape)}")
        plan, totals = self._agree(share_of(batch.tokens, batch.mask, batch.sampled, batch.demonstrated, vocab=self._vocab))
        if totals.tokens + totals.demonstrated == 0:
            raise BadInput("no rank brought a sampled or demonstrated token to this step, so there is nothing to learn from")
        self._scorer.train()
        try:
            cuts = enumerate((cut(batch, old, rows) for rows in plan), start=1)
            with self._attention():
                parts = [self._accumulate(micro, totals, objective, number == 1, number == len(plan)) for number, micro in cuts]
            metrics = self._together(parts)
            if not math.isfinite(metrics["loss"]):
                raise NonFiniteGradient(f"the loss is {metrics['loss']} at step {self._steps}; the optimizer was not touched")
            return {**metrics, **self._update()}
        finally:
            self._reshard()
            self._optimizer.zero_grad()

    def _accumulate(self, micro: MicroBatch, totals: Totals, objective: Objective, first: bool, last: bool) -> dict[str, Tensor | Metric]:
        """Adds one micro-batch's gradient to the step's; returns its shares of the metrics and the loss."""
        if self._spec.keep_gathered:
            self._scorer.set_reshard_after_backward(last)
            self._scorer.set_requires_gradient_sync(last)
        rows = micro.rows
        new = self._scores(rows.tokens, rows.mask, rows.sampled, rows.temperature)
        terms = self._asked(objective, new, tree.tree_map(self._here, micro), totals, first)
        # FSDP averages over the ranks, and the objective has divided by the global batch already. A loss that does not look at the
        # log-probs (a filler's, say) has a gradient too, of 0: every rank runs every backward pass.
        torch.autograd.backward(terms.loss * self._world.size + 0 * new.logprobs.sum())
        shares = {**terms.metrics, "loss": terms.loss}
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in shares.items()}

    def _asked(self, objective: Objective, new: TokenScores, micro: MicroBatch, totals: Totals, first: bool) -> LossTerms:
        """The objective's answer. On the first micro-batch ranks agree on it, since nothing has been written yet and no rank waits."""
        terms, failure = None, None
        try:
            terms = check_terms(objective(new, micro, totals))
        except Exception as error:  # noqa: BLE001 (it is raised again below, with what it means for the runtime)
            failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        if first and (all_told := [f"rank {rank}: {what}" for rank, what in enumerate(gather(self._world, told)) if what]):
            raise BadInput(f"the objective failed, and nothing was changed; {'; '.join(all_told)}") from failure
        if terms is None:
            raise RuntimePoisoned(f"the objective failed in the middle of a step, after earlier micro-batches; {told}") from failure
        return terms

    def _scores(self, tokens: Tensor, mask: Tensor, wanted: Tensor, temperature: Tensor) -> TokenScores:
        """Of the wanted tokens of rows that lie on the host: `[batch, seq]` on the device, 0 elsewhere."""
        asked = tree.tree_map(self._here, inputs(tokens, mask, wanted, temperature, self._scorer.layout))
        logprobs, entropy = (unpack(values, self._here(wanted)) for values in self._scorer(asked))
        return TokenScores(logprobs=logprobs, entropy=entropy)

    def _agree(self, own: Share) -> tuple[Batches, Totals]:
        width: int = self._model.config.get_text_config().hidden_size
        return agree(self._world, own, self._spec.micro_batch_tokens, width=width, layout=self._scorer.layout)

    def _update(self) -> dict[str, float]:
        """One global norm over all parameters, the clip, and AdamW."""
        gradients = _local([p.grad for p in self._parameters if p.grad is not None])
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            raise NonFiniteGradient(f"the gradient's norm is {norm} at step {self._steps}; the optimizer was not touched")
        if norm > self._spec.max_grad_norm:
            for gradient in gradients:
                _ = gradient.mul_(self._spec.max_grad_norm / norm)
        lr = learning_rate(self._spec, self._steps)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._steps += 1
        return {"grad_norm": norm, "lr": lr}

    def _norm(self, gradients: list[Tensor]) -> float:
        square = get_total_norm(gradients).double().square().cpu()
        _ = dist.all_reduce(square, group=self._world.host)
        return float(square.sqrt())

    def _together(self, parts: list[dict[str, Tensor | Metric]]) -> dict[str, float]:
        """The metrics of all micro-batches of all ranks."""
        return read(merged(gather(self._world, host(merged(parts)))))

    def _attention(self) -> AbstractContextManager[object]:
        """On a CPU in bf16, the plain attention: the fused one's backward pass is far off.

        (The gradient of a model of 135M differed from that in fp32 by half, and by a tenth with the plain one, which is not slower
        on short rows.) Gradient checkpointing computes the forward pass again in the backward pass, so that belongs inside too.
        """
        rough = self._world.device.type == "cpu" and self._spec.dtype != "float32"
        return sdpa_kernel(SDPBackend.MATH) if rough else nullcontext()

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
        self._model = self._scorer = self._optimizer = None
        self._parameters, self._sharded = [], []
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _require(self, *parts: Part) -> None:
        for part in parts:
            if self._shelves[part].away:
                raise RoleError(f"the trainer's {part} lies on the host; reload it first")


def _shard(root: Scorer, spec: FSDP2Trainer, world: World) -> None:
    mesh = init_device_mesh(world.device.type, (world.size,))
    for module in [*hugging_face.blocks(root.model), root]:
        # What the scorer itself is given is to keep its dtype: temperatures are fp32.
        dtypes: dict[str, Any] = {"param_dtype": getattr(torch, spec.dtype), "reduce_dtype": torch.float32}
        policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=module is not root)
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not spec.keep_gathered)
        if world.device.type == "cpu" and world.size > 1:
            sharded.set_custom_reduce_scatter(GlooReduceScatter())


def _adamw(parameters: list[Any], spec: FSDP2Trainer) -> Any:
    """AdamW with its moments there from the start, so that what it takes is known before the first step."""
    optimizer = torch.optim.AdamW(parameters, spec.lr, spec.betas, spec.eps, spec.weight_decay, fused=True)
    for p in parameters:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def _local(tensors: list[Any]) -> list[Tensor]:
    return [tensor.detach().to_local() for tensor in tensors]
