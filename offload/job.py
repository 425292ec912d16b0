"""One training job: a model, its optimizer and its budgets, driven step by step through plans.

With clipping (or fp16) gradients wait at home until their global norm is known; the update of a layer then runs just
before its next forward. So `step` leaves the weights one update behind, and `flush` brings them up to date;
`evaluate`, `named_weights` and `save_pretrained` flush by themselves. Without clipping a layer updates as soon as its
gradient is complete. Both are synchronous: no forward ever sees a stale weight.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..swap_scheduler import (
    BudgetError,
    Choice,
    Group,
    Layer,
    Machine,
    Pass,
    Plan,
    Tier,
    Trace,
    Workload,
    aligned,
    choose,
    plan_pass,
    simulate,
)
from ..swap_scheduler.plan import ALIGNMENT_BYTES
from .arena import Arena, DiskArena, MemoryArena
from .compute import LayerCompute, NonFiniteGradient
from .device import Device, hold_little_freed_memory, open_device, return_freed_memory
from .executor import Executor
from .homes import Homes
from .layers import Batch, Structure, is_rest, probe, take_apart
from .measure import Rates, measure
from .memory import GRAPH, Memory
from .optimizer import AdamW, PartLayout, cut_into_parts
from .save import save_pretrained
from .sources import WeightSource
from .strands import StrandPool

LossFunction = Callable[[nn.Module, Batch], torch.Tensor]

_MIN_LOSS_SCALE = 1.0
_GROWTH_STEPS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """`loss` is the sum over microbatches; `grad_norm` the global norm before clipping (None without clipping).
    `skipped`: loss or gradient was not finite, no weight and no state changed. `moved_bytes` by link, counted.
    """

    loss: float
    losses: tuple[float, ...]
    grad_norm: float | None
    skipped: bool
    moved_bytes: dict[str, int]
    seconds: float
    trace: Trace | None


def default_example(tokens: int) -> Batch:
    """One row of `tokens` for the probe, for causal and encoder-decoder language models alike."""
    ids = torch.zeros(1, tokens, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


class Job:
    """Build with `Job.build`, fill with `load`, then `step`; close it, or use it in a `with` statement."""

    def __init__(
        self,
        *,
        structure: Structure,
        use_cache: bool | None,
        source: WeightSource,
        optimizer: AdamW,
        memory: Memory,
        device: Device,
        rows: int,
        length: int,
        microbatches: int,
        seed: int,
        rates: Rates | None,
        part_numel: int | None,
    ) -> None:
        self.structure = structure
        self._use_cache = use_cache
        self.optimizer = optimizer
        self._source: WeightSource | None = source
        self._memory = memory
        self._device = device
        self._rows, self._length, self._microbatches = rows, length, microbatches
        self.holds_gradients = optimizer.max_grad_norm is not None or structure.dtype == torch.float16
        numel = {} if part_numel is None else {"part_numel": part_numel}
        self._parts: dict[str, tuple[PartLayout, ...]] = {
            name: cut_into_parts(group, structure.dtype, **numel)
            for name, group in structure.groups.items()
            if group.trainable and self._is_used(name)
        }
        self._find_machine(rates)
        self._plans: dict[tuple[Pass, int], Plan] = {}
        self._arenas: dict[str, Arena] = {}
        self._pending = False
        self._good_steps = 0
        self._loss_scale = 2.0**16 if structure.dtype == torch.float16 else 1.0
        modules = tuple(visit.module for visit in structure.visits)
        self._pool = StrandPool(structure.modules, modules, device.torch_device.type)
        self._compute = LayerCompute(
            structure,
            self._pool,
            self._parts,
            optimizer,
            seed=seed,
            generator=device.generator,
            between_layers=return_freed_memory if memory.disk is not None else None,
        )
        self._executor: Executor | None = None
        self.shuffle: random.Random | None = None
        """With a generator, plans run in random legal orders on one thread: same results, for tests."""

    @classmethod
    def build(
        cls,
        model: nn.Module,
        source: WeightSource,
        *,
        optimizer: AdamW,
        memory: Memory,
        max_tokens: tuple[int, int],
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        microbatches: int = 1,
        seed: int = 0,
        example: Callable[[int], Batch] = default_example,
        rates: Rates | None = None,
        part_numel: int | None = None,
    ) -> Job:
        """Plan a job; no weight is read before `load`.

        model: any Hugging Face model, on the meta device or not; its parameters are replaced. max_tokens: the largest
        microbatch (rows, length). microbatches: of a full step; shorter steps get plans of their own. rates: measured
        here unless given. Raises BudgetError when the budgets cannot hold the job.
        """
        if memory.disk is not None:
            hold_little_freed_memory()
        opened = open_device(device)
        structure = take_apart(
            model, dtype, opened.torch_device, decay_1d=optimizer.decay_1d, decay_embeddings=optimizer.decay_embeddings
        )
        use_cache = _without_cache(model)
        probe(structure, lambda tokens: _to_device(example(tokens), opened.torch_device))
        rows, length = max_tokens
        return cls(
            structure=structure, use_cache=use_cache, source=source, optimizer=optimizer, memory=memory, device=opened,
            rows=rows, length=length, microbatches=microbatches, seed=seed, rates=rates, part_numel=part_numel,
        )  # fmt: skip

    # ------------------------------------------------------------------ planning

    def _is_used(self, group: str) -> bool:
        return is_rest(group) or any(group in visit.groups for visit in self.structure.visits)

    def workload(self, microbatches: int) -> Workload:
        structure = self.structure
        size = structure.dtype.itemsize
        tokens = self._rows * self._length
        layers = tuple(
            Layer(
                name=visit.name,
                weights=tuple(g for g in visit.groups if structure.groups[g].trainable),
                frozen=tuple(g for g in visit.groups if not structure.groups[g].trainable),
                input_bytes=visit.input_bytes_per_token * tokens,
                saved_bytes=visit.graph_size_bytes(self._rows, self._length),
            )
            for visit in structure.visits
        )
        groups = tuple(
            Group(
                name=group.name,
                weight_bytes=group.numel * size,
                grad_bytes=group.numel * size if group.name in self._parts else 0,
                optim_bytes=tuple(part.size_bytes for part in self._parts.get(group.name, ())),
                resident=is_rest(group.name),
            )
            for group in structure.groups.values()
        )
        return Workload(layers=layers, groups=groups, microbatches=microbatches)

    @property
    def workspace_bytes(self) -> int:
        """What the allocator of the compute tier needs beside the arena: the graph of the largest layer, its largest
        fresh gradient, and one boundary activation and its gradient for every microbatch in flight.
        """
        visits = self.structure.visits
        graph = max(visit.graph_size_bytes(self._rows, self._length) for visit in visits)
        gradient = (
            max(s.numel for g in self.structure.groups.values() for s in g.parameters) * self.structure.dtype.itemsize
        )
        boundary = max(visit.input_bytes_per_token for visit in visits) * self._rows * self._length
        return graph + gradient + 2 * boundary * self._microbatches

    def _find_machine(self, rates: Rates | None) -> None:
        """Split the fast tier between kept graphs and arena: room for every graph where everything fits, else for
        the graphs of the last layers alone.
        """
        workload = self.workload(self._microbatches)
        every = sum(aligned(layer.saved_bytes) for layer in workload.layers) * self._microbatches
        last = sum(aligned(layer.saved_bytes) for layer in workload.layers[-2:])
        persistent = sum(
            aligned(g.weight_bytes) + aligned(g.grad_bytes) + sum(map(aligned, g.optim_bytes)) for g in workload.groups
        )
        fast = self._memory.gpu_bytes if self._memory.gpu_bytes is not None else self._memory.ram_bytes
        room = fast - self.workspace_bytes
        graph = every if persistent + every <= room else last
        arena = _whole_slots(max(0, room - graph))
        tiers = [Tier(name="ram", capacity_bytes=arena)]
        if self._memory.gpu_bytes is not None:
            ram = _whole_slots(self._memory.ram_bytes)
            tiers = [Tier(name="gpu", capacity_bytes=arena), Tier(name="ram", capacity_bytes=ram)]
        if self._memory.disk is not None:
            tiers.append(Tier(name="disk", capacity_bytes=_whole_slots(self._memory.disk.size_bytes)))
        self.machine = Machine(
            tiers=tuple(tiers),
            update_tier="ram",
            graph_tier=Tier(name=GRAPH, capacity_bytes=graph),
            shared_lane=self._device.shares_processor_with_updates,
        )
        disk = self._memory.disk.path if self._memory.disk else None
        self.rates = rates or measure(self._device, self.machine, disk, self.structure.dtype)
        self._costs = self.rates.costs(self.structure, self._parts, rows=self._rows, length=self._length)
        try:
            self.choice: Choice = choose(workload, self.machine, self._costs, clipping=self.holds_gradients)
        except BudgetError as error:
            if error.tier != self.machine.compute_tier:
                raise
            # The user's budget also covers what the allocator takes beside the arena.
            beside = self.workspace_bytes + graph
            raise BudgetError(error.tier, error.need_bytes + beside, fast, error.advice) from error

    @property
    def _passes(self) -> tuple[Pass, ...]:
        return ("first", "steady", "flush", "evaluate") if self.holds_gradients else ("fused", "evaluate")

    def plan(self, name: Pass | None = None, microbatches: int | None = None) -> Plan:
        """The plan of a pass; by default the one of an ordinary step."""
        name = name or ("steady" if self.holds_gradients else "fused")
        count = microbatches or self._microbatches
        key = (name, count)
        if key not in self._plans:
            self._plans[key] = plan_pass(self.workload(count), self.machine, self.choice, name)
        return self._plans[key]

    def simulate(self, name: Pass | None = None, microbatches: int | None = None) -> Trace:
        return simulate(self.plan(name, microbatches), self._costs)

    # ------------------------------------------------------------------ life

    def load(self) -> None:
        """Reserve every tier and read the weights into their homes. The swap file is as large as the plans need, not as
        its budget allows.
        """
        plans = [self.plan(name) for name in self._passes]
        for tier in self.machine.tiers:
            if tier.name == "disk":
                assert self._memory.disk is not None
                needed = max(plan.peak_bytes()["disk"] for plan in plans)
                self._arenas[tier.name] = DiskArena(self._memory.disk.path, needed)
                tiers = (*self.machine.tiers[:-1], replace(tier, capacity_bytes=needed))
                self.machine = replace(self.machine, tiers=tiers)
            else:
                fast = tier.name == self.machine.compute_tier
                self._arenas[tier.name] = MemoryArena(self._device, tier.capacity_bytes, fast=fast)
        self._executor = Executor(self._device, self._arenas)
        self._homes = Homes(self.structure, self._parts, self.plan(), self._arenas)
        assert self._source is not None
        self._homes.fill(self._source)
        self._source = None  # it may hold a whole model

    def close(self) -> None:
        """Stop the threads, give the model its own forward back, free the arenas, remove the swap file."""
        self._pool.close()
        if self._executor is not None:
            self._executor.close()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self._executor = None

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ work

    def step(self, batches: Sequence[Batch], loss_fn: LossFunction, learning_rate: float) -> StepResult:
        """Forward and backward of every batch, and the update at `learning_rate`: pending until the next pass with
        clipping, done on return without. The gradient is that of the sum of the losses.
        """
        start = time.perf_counter()
        before = dict(self._running.moved_bytes)
        if self.holds_gradients:
            name: Pass = "steady" if self._pending else "first"
        else:
            name = "fused"
            self._compute.learning_rate = learning_rate
        trace = None
        try:
            trace = self._pass(name, batches, loss_fn)
        except NonFiniteGradient as error:
            if self._compute.updates:
                raise NonFiniteGradient(
                    f"{error}, and {self._compute.updates} updates of this step are done; the run cannot go on from "
                    "here. Set max_grad_norm: with clipping such a step is skipped as a whole"
                ) from error
        losses = tuple(float(self._compute.losses[index]) for index in range(len(batches)))
        norm, skipped = self._finish_step(losses, learning_rate) if trace else (None, True)
        moved = {link: count - before.get(link, 0) for link, count in self._running.moved_bytes.items()}
        return StepResult(
            loss=math.fsum(losses),
            losses=losses,
            grad_norm=norm,
            skipped=skipped,
            moved_bytes=moved,
            seconds=time.perf_counter() - start,
            trace=trace,
        )

    def _finish_step(self, losses: tuple[float, ...], learning_rate: float) -> tuple[float | None, bool]:
        if not self.holds_gradients:
            return None, False
        norms = [self._compute.norms[name] for name in self.structure.order if name in self._compute.norms]
        if not norms:
            raise RuntimeError("no trainable parameter got a gradient in this step")
        total = torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms])) / self._loss_scale
        finite = bool(total.isfinite()) and all(map(math.isfinite, losses))
        self._pending = finite
        if finite:
            limit = self.optimizer.max_grad_norm
            clip = 1.0 if limit is None else float(torch.clamp(limit / (total + 1e-6), max=1.0))
            self._compute.gradient_scale = clip / self._loss_scale
            self._compute.learning_rate = learning_rate
        self._adapt_loss_scale(finite)
        return float(total), not finite

    def _adapt_loss_scale(self, finite: bool) -> None:
        """fp16 only: halve after an overflow, double after a long run without one."""
        if self.structure.dtype != torch.float16:
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self._loss_scale = max(_MIN_LOSS_SCALE, self._loss_scale / 2)
        elif self._good_steps % _GROWTH_STEPS == 0:
            self._loss_scale *= 2

    def flush(self) -> None:
        """Bring the weights up to date: run the pending update, if there is one."""
        if self._pending:
            self._pass("flush", [], None)
            self._pending = False

    def evaluate(self, batches: Sequence[Batch], loss_fn: LossFunction) -> list[float]:
        """The loss of each batch, without gradients, on up-to-date weights; weights stream once for every
        `microbatches` batches.
        """
        self.flush()
        losses: list[float] = []
        training = self.structure.model.training
        self.structure.model.eval()
        try:
            for first in range(0, len(batches), self._microbatches):
                window = batches[first : first + self._microbatches]
                self._pass("evaluate", window, loss_fn)
                losses += [float(self._compute.losses[index]) for index in range(len(window))]
        finally:
            self.structure.model.train(training)
        return losses

    @property
    def _running(self) -> Executor:
        if self._executor is None:
            raise RuntimeError("call load() before the first step")
        return self._executor

    def _pass(self, name: Pass, batches: Sequence[Batch], loss_fn: LossFunction | None) -> Trace:
        executor = self._running
        plan = self.plan(name, len(batches) or None)
        forwards = [self._forward(batch, loss_fn, grad=name != "evaluate") for batch in batches] if loss_fn else []
        self._compute.loss_scale = self._loss_scale
        self._compute.begin(name, forwards)
        state = self._device.generator.get_state()
        try:
            return executor.run(plan, self._compute, shuffle=self.shuffle)
        finally:
            self._pool.stop()
            self._device.generator.set_state(state)

    def _forward(self, batch: Batch, loss_fn: LossFunction, *, grad: bool) -> Callable[[], torch.Tensor]:
        model, device = self.structure.model, self._device.torch_device

        def forward() -> torch.Tensor:
            with torch.set_grad_enabled(grad):
                return loss_fn(model, _to_device(batch, device))

        return forward

    # ------------------------------------------------------------------ weights out

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, weight) of every parameter in the compute dtype, one at a time, up to date."""
        self.flush()
        for name in self.structure.order:
            yield name, self._homes.weight(name)

    def master_weight(self, name: str) -> torch.Tensor:
        """The fp32 master of a parameter (for a frozen one, its weight in fp32)."""
        self.flush()
        return self._homes.master(name)

    def save_pretrained(self, folder: str | Path) -> None:
        """A Hugging Face folder: config, generation config, safetensors in shards of bounded size."""
        save_pretrained(self.structure, self.named_weights(), folder, use_cache=self._use_cache)


def _whole_slots(size_bytes: int) -> int:
    """`size_bytes` rounded down to whole aligned slots: the part of a budget that a plan can use."""
    return size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def _without_cache(model: nn.Module) -> bool | None:
    """Turn key-value caches off in every config of the model (encoder-decoders hold several): a cache would grow with
    each recompute of a layer, and nothing in training reads it. The main config's value before.
    """
    main: bool | None = getattr(getattr(model, "config", None), "use_cache", None)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False
    return main


def _to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
