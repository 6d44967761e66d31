"""Inside each TP rank of SGLang: it is connected with the rank of the job that has the same place in the TP group, and answers it.

SGLang's own interface says when: `take_weights` is called by it as new weights are due, and a message is answered when it is asked to.
What is done then lies here, next to the weights: the plan of loading, the loading, the checksums of what lies there.
"""

import inspect
import json
import logging
import os
import re
import socket
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from rft.engines import sglang_sampler
from rft.engines.delivery import Names
from rft.engines.pages import give_back_pages
from rft.engines.plan import NoPlan, Plan, record
from rft.engines.protocol import WHOLE
from rft.engines.sglang_bucket import accept, unpacked
from rft.narrow import UNCUT
from rft.ops.checksum import checksum
from rft.ops.transfer import standing

ADDRESSES = "RFT_SGLANG_ADDRESSES"
"""In the environment: where each TP rank finds its rank of the job."""
METHOD, LOADER = "answer_rank", "rft.engines.sglang_worker.take_weights"
"""What SGLang is asked to call."""
PATIENCE_S = 600.0
"""For the next message of a rank, while it sends weights."""
NAP_MS = 10
"""For which an idle scheduler waits, unless a message comes; in SGLang it is a second, and what waits for it to be idle waits so long."""
PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType"})
"""SGLang's classes that compute with weights as they were loaded."""
SHARED = re.compile(r"/dev/shm/sgl\S+$", re.MULTILINE)
"""Files of SGLang's own in shared memory, among what a process has mapped."""
log = logging.getLogger("rft")
Sums = tuple[Mapping[str, int], Mapping[str, int]]
"""Checksums by name: of what came, cast as it was sent, and of what is held of it, as far as that is known by name."""


def run(*arguments: Any, **named: Any) -> None:
    """One TP rank of SGLang, connected with its rank of the job."""
    from sglang.srt.managers import scheduler

    bound = inspect.signature(scheduler.run_scheduler_process).bind(*arguments, **named)
    sglang_sampler.register()
    sglang_sampler.carry_seeds()
    _nap_shortly()
    _Seat.taken = _Seat(_connected(json.loads(os.environ[ADDRESSES])[bound.arguments["tp_rank"]]))

    def answer_rank(self: Any) -> None:
        _Seat.taken.answer(self.tp_worker.model_runner)

    setattr(scheduler.Scheduler, METHOD, answer_rank)
    scheduler.run_scheduler_process(*arguments, **named)


def _nap_shortly() -> None:
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

    def nap(sleeper: Any) -> None:
        sleeper.poller.poll(NAP_MS)

    setattr(IdleSleeper, "maybe_sleep", nap)  # noqa: B010 (SGLang's)


def _unlink_shared() -> None:
    """Takes the names from the memory that SGLang's processes share: it goes with the last of them then, however they end."""
    for path in SHARED.findall(Path("/proc/self/maps").read_text()):
        Path(path).unlink(missing_ok=True)


def take_weights(model: object, tensors: object) -> None:
    """Takes a whole set of weights from the rank; SGLang calls it in place of its own loading, with no tensors."""
    del model, tensors
    _Seat.taken.take()


def _connected(address: str) -> "connection.Connection[Any, Any]":
    door = socket.socket(socket.AF_UNIX)
    door.connect(address)
    link = connection.Connection(door.detach())
    link.send(os.getppid())  # which engine this is a part of
    return link


class _Seat:
    """The place of one TP rank, and what it knows of its model."""

    taken: "_Seat"

    def __init__(self, link: "connection.Connection[Any, Any]") -> None:
        self._link = link
        self._sync: _ByPlan | _ByLoading | None = None

    def answer(self, runner: Any) -> None:
        """Answers one message."""
        try:
            verb, *arguments = self._next()
            told = getattr(self, f"_{verb}")(runner, *arguments)
        except Exception as error:
            self._link.send(("failed", f"{type(error).__name__}: {error}"))
            raise
        self._link.send(("ok", told))

    def take(self) -> None:
        """Takes weights, part by part, until they end. It never raises: SGLang would end, and the rank is told."""
        try:
            self._take()
        except Exception as error:  # the border of a process: the rank is told, and raises it
            log.exception("weights were not taken")
            self._link.send(("failed", f"{type(error).__name__}: {error}"))
            while self._next() != ("stop",):
                continue
            self._link.send(("stopped", None))

    def _take(self) -> None:
        dtype = getattr(torch, self._next()[1])
        assert self._sync is not None, "a plan comes first"
        memory, arrived, received = accept(self._link), dict[str, int](), dict[str, int]()
        begun = deque[Callable[[], Sums]]()
        self._link.send(("ok", None))
        self._sync.begin()
        while True:
            # What is there already is begun before what was begun is waited for.
            while begun and not self._link.poll(0):
                self._acknowledge(begun.popleft(), arrived, received)
            message = self._next()
            if message[0] != "part":
                break
            begun.append(self._sync.install(unpacked(memory, message[1], dtype)))
        while begun:
            self._acknowledge(begun.popleft(), arrived, received)
        del memory
        self._link.send(("ok", (arrived, received)) if message == ("end",) else ("stopped", None))

    def _acknowledge(self, ended: Callable[[], Sums], arrived: dict[str, int], received: dict[str, int]) -> None:
        """Waits for a part, and tells the rank that it has been read."""
        came, held = ended()
        arrived |= came
        received |= held
        self._link.send(("ok", None))

    def _next(self) -> Any:
        if not self._link.poll(PATIENCE_S):
            raise TimeoutError("the rank has sent nothing for too long")
        return self._link.recv()

    # ---- messages ----

    def _plan(self, runner: Any, shapes: Mapping[Names, torch.Size], dtype: str) -> dict[str, Any]:
        """Learns how this model is loaded; tells how, and what it takes on the device."""
        _unlink_shared()  # all TP ranks are there by now
        model: torch.nn.Module = runner.model
        path, why = "plan", ""
        try:
            self._sync = _ByPlan(_planned(model, shapes, getattr(torch, dtype)), shapes)
        except NoPlan as reason:
            self._sync, path, why = _ByLoading(model), "load", str(reason)
        weights, cache = (sum(tensor.nbytes for tensor in part) for part in (model.parameters(), _cache(runner)))
        return {"path": path, "why": why, "narrows": dict(self._sync.narrows), "weights": weights, "cache": cache}

    def _checksums(self, runner: Any) -> dict[str, int]:
        """Of what lies in this rank's memory."""
        del runner
        assert self._sync is not None, "a plan comes first"
        return self._sync.checksums()

    def _give_back(self, runner: Any, what: Literal["weights", "cache"]) -> None:
        """On a CPU: lets memory go. Parameters only, since nobody sends buffers again."""
        give_back_pages([parameter.data for parameter in runner.model.parameters()] if what == "weights" else _cache(runner))


def _cache(runner: Any) -> list[Tensor]:
    pool = runner.token_to_kv_pool
    return [*pool.k_buffer, *pool.v_buffer]


class _ByPlan:
    """Writes every tensor straight to where it belongs."""

    def __init__(self, plan: Plan, shapes: Mapping[Names, torch.Size]) -> None:
        self._plan, self.narrows = plan, plan.narrows
        self._tensors = {name: names for names in shapes for name in names}
        self._names = {names: names[0] for names in shapes}

    def begin(self) -> None:
        """A whole set of weights is to come."""
        self._plan.fill()

    @torch.inference_mode()
    def install(self, tensors: list[tuple[str, Tensor]]) -> Callable[[], Sums]:
        """Begins to write a part; see `Sums`. Most of what comes is not read once more to know that it arrived as it was sent."""
        self._names |= {self._tensors[name]: name for name, _ in tensors}
        unread = {name: tensor for name, tensor in tensors if not self._plan.sums_up(name)}
        sums, written, done = standing(list(unread.values())), self._plan.write(iter(tensors)), _mark(tensors)

        def ended() -> Sums:
            done()
            held = written()
            return {name: held[name] for name, _ in tensors if name not in unread} | dict(zip(unread, sums.tolist(), strict=True)), held

        return ended

    @torch.inference_mode()
    def checksums(self) -> dict[str, int]:
        """Read from the places that the plan wrote to, by the names that came last."""
        return self._plan.checksums(tuple(self._names.values()))


class _ByLoading:
    """Goes through SGLang's own loading, for layouts that are no copies. One checksum is over all of the memory then."""

    narrows = UNCUT

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def begin(self) -> None:
        """Nothing is to be done before the first part."""

    def install(self, tensors: list[tuple[str, Tensor]]) -> Callable[[], Sums]:
        """Loads a part; see `Sums`. What the layout makes of a tensor is not known by its name."""
        sums, load = standing([tensor for _, tensor in tensors]), cast(Any, self._model).load_weights
        load(iter(tensors))
        done = _mark(tensors)

        def ended() -> Sums:
            done()
            return dict(zip((name for name, _ in tensors), sums.tolist(), strict=True)), {}

        return ended

    def checksums(self) -> dict[str, int]:
        """The sum over all parameters, modulo 2^63."""
        return {WHOLE: int(torch.stack([checksum(parameter) for parameter in self._model.parameters()]).sum())}


def _mark(tensors: list[tuple[str, Tensor]]) -> Callable[[], None]:
    """What waits for all that the device has been given to do with them."""
    event = torch.cuda.Event() if tensors[0][1].is_cuda else None
    if event is not None:
        event.record()

    def wait() -> None:
        if event is not None:
            event.synchronize()

    return wait


def _planned(model: torch.nn.Module, shapes: Mapping[Names, torch.Size], dtype: torch.dtype) -> Plan:
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method not in PLAIN_METHODS:
            raise NoPlan(f"{name} holds its weights in the layout of {method}")
        if getattr(module, "use_intel_amx_backend", False):
            raise NoPlan(f"{name} packs its weights for the CPU")
    try:
        load: Any = model.load_weights
        return record(load, shapes, dict(model.named_parameters()), dtype)
    except (AssertionError, AttributeError, KeyError, RuntimeError, ValueError) as error:
        # Whatever the engine's own loading raises when it is called once more: it differs by engine version and by model.
        raise NoPlan(f"its loading cannot be called again: {type(error).__name__}: {error}") from error
