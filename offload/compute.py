"""One compute of a plan: the forward or backward of a layer for a microbatch, or the update of a part.

Forward: the parked call runs on detached inputs. Without a kept graph only the boundary activation is stored, in its
slot; its outputs become leaves of the strand's outer graph. Backward: recompute with grad (or take the kept graph),
feed the leaves' gradients, collect the gradient of each input, and push it into the outer graph once every later layer
that used this input is done; that is what makes encoder-decoder models right.

Random numbers: every forward, its recompute, and the model's own code between layers are seeded by (seed, step, layer,
microbatch), so dropout does not depend on the order of execution.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..kernels.adamw import AdamWStep, Scratch, adamw
from ..swap_scheduler.order import Pass
from ..swap_scheduler.plan import Compute
from ..swap_scheduler.workload import grad_block, input_block, optim_block, weight_block
from .layers import Structure, is_rest, main_input, placeholder
from .optimizer import AdamW, PartLayout
from .strands import Call, Strand, StrandPool, VisitError

Slot = Callable[[str], torch.Tensor]
"""block name -> the bytes of its slot (uint8), at the tier where the compute accesses it"""

_CAST_NUMEL = 1 << 22


class NonFiniteGradient(FloatingPointError):
    """Without clipping, a gradient that is not finite turned up while updates were under way."""


class Work(Protocol):
    """What the executor calls for each compute."""

    def __call__(self, compute: Compute, slot: Slot) -> None: ...


def _seed(*parts: int) -> int:
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class LayerCompute:
    """Carries out the computes of one job. State that outlives a pass: step counts and pending gradients."""

    def __init__(
        self,
        structure: Structure,
        pool: StrandPool,
        parts: Mapping[str, tuple[PartLayout, ...]],
        optimizer: AdamW,
        *,
        seed: int,
        generator: torch.Generator,
        between_layers: Callable[[], None] | None = None,
    ) -> None:
        self._between_layers = between_layers
        self._generator = generator
        self._structure = structure
        self._pool = pool
        self._parts = parts
        self._optimizer = optimizer
        self._seed_base = seed
        self._scratch: dict[torch.device, Scratch] = {}
        self._group_names = tuple(structure.groups)
        self._rest = tuple(group for group in structure.groups if is_rest(group))
        self._grad_views: dict[str, torch.Tensor] = {}
        self._forwards: list[Callable[[], torch.Tensor]] = []
        self._last_use: dict[str, int] = {}
        for index, visit in enumerate(structure.visits):
            for group in visit.groups:
                self._last_use.setdefault(group, index)  # backward goes down: the first visit is the last use
        self.step_counts: dict[str, int] = dict.fromkeys(structure.order, 0)
        self._seen: set[str] = set()
        self._updating: set[str] = set()
        self.norms: dict[str, torch.Tensor] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.pass_number = 0
        self.updates = 0
        self._pass: Pass = "evaluate"
        self.loss_scale = 1.0
        self.learning_rate = 0.0
        self.gradient_scale = 1.0
        for name, parameter in structure.parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._grad_hook(name))

    # ------------------------------------------------------------------ a pass

    def begin(self, name: Pass, forwards: list[Callable[[], torch.Tensor]]) -> None:
        """Get ready for a pass that runs `forwards`, one a microbatch (none for an update-only pass)."""
        self.pass_number += 1
        self.updates = 0
        self._pass = name
        self._forwards = forwards
        self.losses = {}
        if name in ("steady", "flush"):
            self._updating = self._seen  # the gradients that waited since the pass before
        if name in ("first", "steady", "fused"):
            self._seen = set()
            self.norms = {}
        if name == "fused":
            self._updating = self._seen

    def __call__(self, compute: Compute, slot: Slot) -> None:
        if compute.kind == "update":
            self._update(compute, slot)
        elif compute.kind == "forward":
            self._forward(compute, slot)
        else:
            self._backward(compute, slot)

    # ------------------------------------------------------------------ weights

    def _bind(self, groups: tuple[str, ...], slot: Slot, *, grads: bool) -> None:
        structure = self._structure
        for group in groups:
            spec = structure.groups[group]
            weight = slot(weight_block(group)).view(structure.dtype)
            grad = slot(grad_block(group)).view(structure.dtype) if grads and spec.trainable else None
            for parameter in spec.parameters:
                start, end = parameter.offset_numel, parameter.offset_numel + parameter.numel
                structure.bind(parameter.name, weight[start:end].view(parameter.shape))
                if grad is not None:
                    tensor = structure.parameters[parameter.name]
                    tensor.grad = grad[start:end].view(parameter.shape) if parameter.name in self._seen else None
                    self._grad_views[parameter.name] = grad[start:end].view(parameter.shape)

    def _unbind(self, groups: tuple[str, ...]) -> None:
        for group in groups:
            self._structure.unbind(group)
            for parameter in self._structure.groups[group].parameters:
                self._structure.parameters[parameter.name].grad = None

    def _grad_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if name in self._seen:
                return  # autograd accumulated into the slot in place
            view = self._grad_views[name]
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
            self._seen.add(name)

        return hook

    # ------------------------------------------------------------------ forward

    def _forward(self, compute: Compute, slot: Slot) -> None:
        visit = self._structure.visits[compute.layer]
        strand = self._pool.get(compute.index)
        groups = (*self._rest, *visit.groups)
        self._grad_views = {}
        self._bind(groups, slot, grads=False)
        try:
            if compute.layer == 0:
                self._reseed(0, compute.index)
                strand.start(self._forwards[compute.index])
            call = strand.parked
            if call is not None and call.visit == compute.layer:
                self._run_forward(strand, call, compute, slot)
            if strand.loss is not None:
                self.losses[compute.index] = strand.loss.detach()
        finally:
            self._unbind(visit.groups)

    def _run_forward(self, strand: Strand, call: Call, compute: Compute, slot: Slot) -> None:
        visit = self._structure.visits[compute.layer]
        training = self._pass != "evaluate" and call.grad
        keep = compute.keep_graph and training
        module = self._structure.modules[visit.module]
        trainable = training and (any(call.needs) or any(p.requires_grad for p in module.parameters()))
        inputs = [_detached(value, keep and need) for value, need in zip(call.flat, call.needs, strict=True)]
        self._reseed(2 * compute.layer + 1, compute.index)
        with call.context(grad=keep):
            output = self._pool.call(call, visit.module, inputs)
        flat, output_spec = tree_flatten(output)
        leaves = [_leaf(value, trainable) for value in flat]
        if training:
            call.outputs = leaves
            strand.calls[compute.layer] = call
            for value, need in zip(call.flat, call.needs, strict=True):
                if need:
                    strand.pending.setdefault(id(value), [value, compute.layer, None])
            if keep:
                call.kept = (inputs, flat)
            else:
                self._store_input(call, compute, slot)
        outputs = tree_unflatten(leaves, output_spec)
        del output, flat, inputs, call
        self._reseed(2 * compute.layer + 2, compute.index)
        strand.advance(outputs)

    def _store_input(self, call: Call, compute: Compute, slot: Slot) -> None:
        """Copy the boundary activation into its slot. What the strand passed is then only remembered where the
        outer graph needs it.
        """
        call.main = main_input(call.flat)
        if call.main is None:
            return
        held = call.flat[call.main]
        value = held.detach()
        size = value.numel() * value.element_size()
        name = input_block(self._structure.visits[compute.layer].name, compute.index)
        room = slot(name)
        if size > room.numel():
            raise VisitError(
                f"{name}: this microbatch needs {size} bytes and {room.numel()} were planned; "
                "a batch is larger than the max_tokens that the job was built for"
            )
        room[:size].view(value.dtype).view(value.shape).copy_(value)
        call.main_shape, call.main_dtype = value.shape, value.dtype
        if not call.needs[call.main]:
            call.flat[call.main] = None
        if self._structure.visits[compute.layer].droppable:
            # The slot is now the only copy: the outer graph needs this tensor for its gradient, never for its values.
            held.data = placeholder(value.shape, value.dtype, value.device)

    # ------------------------------------------------------------------ backward

    def _backward(self, compute: Compute, slot: Slot) -> None:
        visit = self._structure.visits[compute.layer]
        strand = self._pool.get(compute.index)
        groups = (*self._rest, *visit.groups)
        self._grad_views = {}
        self._bind(groups, slot, grads=True)
        try:
            self._flush(strand, compute.layer)
            call = strand.calls.pop(compute.layer, None)
            if call is not None:
                self._run_backward(strand, call, compute, slot)
            if compute.layer == 0:
                self._flush(strand, -1)
        finally:
            self._unbind(visit.groups)
        if compute.index == len(self._forwards) - 1:
            done = [g for g in visit.groups if self._last_use[g] == compute.layer]
            self._measure_norms((*done, *(self._rest if compute.layer == 0 else ())), slot)
            if self._between_layers is not None:
                self._between_layers()

    def _flush(self, strand: Strand, layer: int) -> None:
        """Push into the outer graph what later layers have left for it: first the loss, then the gradients of
        every input whose first use lies behind `layer`.
        """
        if strand.loss is not None:
            loss, strand.loss = strand.loss, None
            if loss.requires_grad:
                seed = torch.full_like(loss, self.loss_scale)
                torch.autograd.backward([loss], [seed], retain_graph=True)
            del loss
        ready = [key for key, (_, first, grad) in strand.pending.items() if first > layer and grad is not None]
        tensors, grads = [], []
        for key in ready:
            tensor, _, grad = strand.pending.pop(key)
            if tensor.is_leaf:
                tensor.grad = grad if tensor.grad is None else tensor.grad + grad
            else:
                tensors.append(tensor)
                grads.append(grad)
        if tensors:
            # Two of them may share code of the model between layers, so its graph must outlive this call; it goes
            # with the last tensor that refers to it.
            torch.autograd.backward(tensors, grads, retain_graph=True)

    def _run_backward(self, strand: Strand, call: Call, compute: Compute, slot: Slot) -> None:
        visit = self._structure.visits[compute.layer]
        if not any(isinstance(leaf, torch.Tensor) and leaf.grad is not None for leaf in call.outputs):
            return  # nothing behind this layer depends on it
        if call.kept is not None:
            inputs, outputs = call.kept
        else:
            inputs = [_detached(value, need) for value, need in zip(call.flat, call.needs, strict=True)]
            if call.main is not None:
                assert call.main_shape is not None and call.main_dtype is not None
                size = call.main_shape.numel() * call.main_dtype.itemsize
                stored = slot(input_block(visit.name, compute.index))[:size].view(call.main_dtype).view(call.main_shape)
                inputs[call.main] = stored.requires_grad_(call.needs[call.main])
            self._reseed(2 * compute.layer + 1, compute.index)
            with call.context(grad=True):
                outputs, _ = tree_flatten(self._pool.call(call, visit.module, inputs))
        roots, grads = [], []
        for output, leaf in zip(outputs, call.outputs, strict=True):
            if isinstance(output, torch.Tensor) and output.requires_grad and leaf.grad is not None:
                roots.append(output)
                grads.append(leaf.grad)
        call.outputs = []
        if roots:
            torch.autograd.backward(roots, grads)
        for value, detached, need in zip(call.flat, inputs, call.needs, strict=True):
            if need and detached.grad is not None:
                entry = strand.pending[id(value)]
                entry[2] = detached.grad if entry[2] is None else entry[2] + detached.grad

    def _measure_norms(self, groups: tuple[str, ...], slot: Slot) -> None:
        for group in groups:
            spec = self._structure.groups[group]
            if not spec.trainable:
                continue
            grad = slot(grad_block(group)).view(self._structure.dtype)
            for parameter in spec.parameters:
                if parameter.name in self._seen:
                    part = grad[parameter.offset_numel : parameter.offset_numel + parameter.numel]
                    self.norms[parameter.name] = _norm(part)

    # ------------------------------------------------------------------ update

    def _update(self, compute: Compute, slot: Slot) -> None:
        group = self._group_names[compute.layer]
        layout = self._parts[group][compute.index]
        dtype = self._structure.dtype
        if self._pass == "fused" and compute.index == 0:
            self._refuse_non_finite(group)
        self.updates += 1
        weight, grad = slot(weight_block(group)).view(dtype), slot(grad_block(group)).view(dtype)
        optim = slot(optim_block(group, compute.index))
        scratch = self._scratch.get(weight.device)
        if scratch is None:
            scratch = self._scratch[weight.device] = Scratch.on(weight.device)
        for segment in layout.segments:
            name = segment.parameter.name
            if name not in self._updating:
                continue  # no gradient this step: no decay, no step count, bit-identical
            if segment.is_first:
                self.step_counts[name] += 1
            exp_avg, exp_avg_sq, master = layout.fields(optim, segment)
            settings = AdamWStep(
                learning_rate=self.learning_rate,
                beta1=self._optimizer.beta1,
                beta2=self._optimizer.beta2,
                epsilon=self._optimizer.epsilon,
                weight_decay=self._optimizer.weight_decay if segment.parameter.decay else 0.0,
                step=self.step_counts[name],
                gradient_scale=self.gradient_scale,
            )
            run = slice(segment.start, segment.start + segment.numel)
            adamw(weight[run], grad[run], exp_avg, exp_avg_sq, master, settings, scratch)

    def _refuse_non_finite(self, group: str) -> None:
        """Updates run under the backward pass here, so each group is looked at before its first part is updated."""
        values = [self.norms[s.name] for s in self._structure.groups[group].parameters if s.name in self.norms]
        if not all(bool(value.isfinite()) for value in (*values, *self.losses.values())):
            raise NonFiniteGradient(f"the loss or the gradient of {group} is not finite")

    def _reseed(self, place: int, microbatch: int) -> None:
        self._generator.manual_seed(_seed(self._seed_base, self.pass_number, place, microbatch))


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    """The norm in fp32: the same bits either way, but the cast copy of a small gradient is twice as fast."""
    if gradient.numel() <= _CAST_NUMEL:
        return torch.linalg.vector_norm(gradient.float())
    return torch.linalg.vector_norm(gradient, dtype=torch.float32)


def _detached(value: Any, need: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(need) if value.is_floating_point() else value


def _leaf(value: Any, trainable: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(trainable and value.is_floating_point())
