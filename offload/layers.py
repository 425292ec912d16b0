"""A model as ordered visits and groups of parameters: what the planner calls layers and groups.

Every swappable module (a decoder block, the embedding, the head, any other large leaf) is one place where
weights can come and go. A *visit* is one call of such a module in the forward pass; a tied weight or a module
that is called twice shows as one group in several visits. Parameters outside these modules (final norms and the
like) form the group `rest`, which stays in the compute tier.

The order of visits, the bytes of boundary activations and of autograd graphs come from `probe`: two tiny forward
passes of the real model on zero weights, so any architecture works and no weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from .device import zeros_on

REST = "rest"
TENSOR_ALIGNMENT_BYTES = 64
"""As torch's own allocator aligns, so that kernels take the same path on a slot as on an ordinary tensor."""

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter: `offset_numel` is its place in its group's weight (and gradient) block."""

    name: str
    shape: torch.Size
    offset_numel: int
    decay: bool

    @property
    def numel(self) -> int:
        return self.shape.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Parameters that move as one block, in `dtype`. `numel` includes the padding between parameters."""

    name: str
    parameters: tuple[ParameterSpec, ...]
    numel: int
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitSpec:
    """One call of `module` (its name) in the forward pass. Bytes of one microbatch of n tokens:
    activation `input_bytes_per_token * n`, graph as `graph_size_bytes` says.
    `droppable`: the activation is another visit's output and nothing else in the model reads it, now or later.
    """

    name: str
    module: str
    groups: tuple[str, ...]
    input_bytes_per_token: int
    graph_bytes: tuple[float, float]
    flops_per_token: int
    droppable: bool

    def graph_size_bytes(self, rows: int, length: int) -> int:
        """The autograd graph of one microbatch (rows, length), inputs included."""
        return int(rows * (self.graph_bytes[0] * length + self.graph_bytes[1] * length * length))


@dataclass(slots=True)
class Structure:
    """The model, taken apart."""

    model: nn.Module
    dtype: torch.dtype
    modules: dict[str, nn.Module]
    groups: dict[str, GroupSpec]
    visits: tuple[VisitSpec, ...] = ()
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    order: tuple[str, ...] = ()

    def bind(self, name: str, data: torch.Tensor) -> None:
        """Let the parameter compute with `data`, a view of a slot."""
        self.parameters[name].data = data

    def unbind(self, group: str) -> None:
        """Take the group's weights away: what is left keeps shape and dtype, costs nothing, and reads as NaN."""
        for spec in self.groups[group].parameters:
            parameter = self.parameters[spec.name]
            parameter.data = placeholder(spec.shape, parameter.dtype, parameter.device)


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of the right shape and dtype that holds one NaN: it costs nothing, and is loud when it is read."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


def skeleton(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make` builds, without weights: parameters on the meta device, buffers real (rotary frequencies
    are computed, not stored in files).
    """
    with init_empty_weights(include_buffers=False):
        model: Any = make()
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # every parameter was replaced on its own
    return model.train()


def swappable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Decoder blocks (`_no_split_modules`, else the elements of module lists of one class), input embedding,
    output head, and every other leaf module that is at least a quarter of the largest block.
    """
    wanted = set(getattr(model, "_no_split_modules", None) or ())
    found: dict[str, nn.Module] = {}

    def inside(name: str) -> bool:
        return any(name == outer or name.startswith(outer + ".") for outer in found)

    for name, module in model.named_modules():
        if type(module).__name__ in wanted and name and not inside(name) and _numel(module):
            found[name] = module
    if not any(type(module).__name__ in wanted for module in found.values()):
        for name, module in model.named_modules():
            kinds = {type(child) for child in module} if isinstance(module, nn.ModuleList) else set()
            if len(kinds) == 1 and len(module) > 1 and not inside(name):
                found |= {f"{name}.{i}": child for i, child in enumerate(module) if _numel(child)}
    largest = max((_numel(module) for module in found.values()), default=0)
    ends = [getter() for getter in (_getter(model, "get_input_embeddings"), _getter(model, "get_output_embeddings"))]
    for name, module in model.named_modules():
        own = sum(p.numel() for p in module.parameters(recurse=False))
        is_end = any(module is end for end in ends)
        if name and own and not inside(name) and (is_end or (own * 4 >= largest and not list(module.children()))):
            found[name] = module
    names = [name for name, _ in model.named_modules() if name in found]
    return {name: found[name] for name in names}


def _getter(model: nn.Module, name: str) -> Callable[[], nn.Module | None]:
    method = getattr(model, name, None)

    def get() -> nn.Module | None:
        try:
            return method() if method else None
        except (AttributeError, NotImplementedError):  # models without such an end
            return None

    return get


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def take_apart(
    model: nn.Module, dtype: torch.dtype, device: torch.device, *, decay_1d: bool, decay_embeddings: bool
) -> Structure:
    """Find modules and groups and replace every parameter of `model` by a placeholder of `dtype` on `device`.

    Buffers stay, in the dtype the model gave them. The model's own values are gone afterwards: take them first.
    """
    modules = swappable_modules(model)
    if not modules:
        raise ValueError(f"{type(model).__name__} has no repeated blocks, embedding or head to swap")
    uses = _uses(model, modules)
    parameters = {id(p): p for p in model.parameters()}
    grouped: dict[str, list[int]] = {}
    for key, parameter in parameters.items():
        holders = uses[key].holders
        if len(holders) == 1:
            group = next(iter(holders))
        elif REST in holders:
            group = REST
        else:
            group = "tied." + min(holders, key=list(modules).index)
        grouped.setdefault(group + ("" if parameter.requires_grad else ".frozen"), []).append(key)

    order = tuple(uses[key].name for key in parameters)
    structure = Structure(model=model, dtype=dtype, modules=modules, groups={}, order=order)
    padding = TENSOR_ALIGNMENT_BYTES // dtype.itemsize
    for group, keys in grouped.items():
        specs, offset = [], 0
        for key in keys:
            parameter = parameters[key]
            decay = (decay_1d or parameter.ndim > 1) and (decay_embeddings or not uses[key].embeds)
            specs.append(ParameterSpec(name=uses[key].name, shape=parameter.shape, offset_numel=offset, decay=decay))
            offset += -(-parameter.numel() // padding) * padding
        structure.groups[group] = GroupSpec(
            name=group, parameters=tuple(specs), numel=offset, trainable=not group.endswith(".frozen")
        )
    for key, parameter in parameters.items():
        new = nn.Parameter(placeholder(parameter.shape, dtype, device), requires_grad=parameter.requires_grad)
        structure.parameters[uses[key].name] = new
        for module, attribute in uses[key].places:
            module._parameters[attribute] = new
    _move_buffers(model, device)
    return structure


@dataclass(slots=True)
class _Use:
    """Where a parameter hangs: its first name, the swappable modules (or the rest) that hold it, every attribute."""

    name: str
    holders: set[str] = field(default_factory=set)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    embeds: bool = False


def _uses(model: nn.Module, modules: dict[str, nn.Module]) -> dict[int, _Use]:
    """By `id` of the parameter. A module that hangs in two places is walked once for each holder."""
    owner = {id(module): name for name, module in modules.items()}
    uses: dict[int, _Use] = {}
    visited: set[tuple[int, str]] = set()

    def walk(module: nn.Module, prefix: str, holder: str) -> None:
        holder = owner.get(id(module), holder)
        if (id(module), holder) in visited:
            return
        visited.add((id(module), holder))
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            use = uses.setdefault(id(parameter), _Use(prefix + attribute))
            use.holders.add(holder)
            if (module, attribute) not in use.places:
                use.places.append((module, attribute))
            use.embeds |= isinstance(module, nn.Embedding)
        for name, child in module.named_children():
            walk(child, f"{prefix}{name}.", holder)

    walk(model, "", REST)
    return uses


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for attribute, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                raise ValueError(
                    f"buffer {attribute} of {type(module).__name__} has no values; build the model with skeleton()"
                )
            module._buffers[attribute] = buffer.to(device)


def groups_of(structure: Structure, module_name: str) -> tuple[str, ...]:
    """The groups whose parameters `module_name` holds, `rest` left out (it is always there)."""
    held = {id(p) for p in structure.modules[module_name].parameters()}
    return tuple(
        group.name
        for group in structure.groups.values()
        if not is_rest(group.name) and any(id(structure.parameters[s.name]) in held for s in group.parameters)
    )


def is_rest(group: str) -> bool:
    return group in (REST, f"{REST}.frozen")


@dataclass(slots=True)
class _Seen:
    module: str
    input_bytes: int
    graph_bytes: int = 0
    droppable: bool = False


def probe(structure: Structure, example: Callable[[int], Batch], *, lengths: tuple[int, int] = (8, 16)) -> None:
    """Fill `structure.visits` from forward passes of `example(tokens)`, one row each, on zero weights.

    The last pass overwrites every activation that looks droppable with NaN after its layer; if a NaN comes out, some
    code reads them later (skip connections over layers) and none is dropped.
    """
    (short, _), (long, _) = (_observe(structure, example(tokens), drop=False) for tokens in lengths)
    if [seen.module for seen in short] != [seen.module for seen in long]:
        raise ValueError("the model visits its layers in an order that depends on the input; it cannot be planned")
    _, finite = _observe(structure, example(lengths[0]), drop=True)
    first, second = lengths
    visits, counts = [], dict.fromkeys(structure.modules, 0)
    for a, b in zip(short, long, strict=True):
        counts[a.module] += 1
        quadratic = max(0.0, (b.graph_bytes / second - a.graph_bytes / first) / (second - first))
        linear = max(0.0, a.graph_bytes / first - quadratic * first)
        module = structure.modules[a.module]
        used = sum(p.numel() for p in module.parameters() if p.ndim > 1)
        visits.append(
            VisitSpec(
                name=a.module if counts[a.module] == 1 else f"{a.module}#{counts[a.module]}",
                module=a.module,
                groups=groups_of(structure, a.module),
                input_bytes_per_token=max(-(-a.input_bytes // first), -(-b.input_bytes // second)),
                graph_bytes=(linear, quadratic),
                flops_per_token=0 if isinstance(module, nn.Embedding) else 2 * used,
                droppable=a.droppable and finite,
            )
        )
    structure.visits = tuple(visits)
    # A module that is never called is never fetched; its parameters get no gradient and stay as they are.
    for name in set(structure.modules) - {seen.module for seen in short}:
        structure.modules.pop(name)
    first_visit: dict[str, int] = {}
    for index, visit in enumerate(visits):
        for group in visit.groups:
            first_visit.setdefault(group, index)
    groups = sorted(structure.groups, key=lambda g: -1 if is_rest(g) else first_visit.get(g, len(visits)))
    structure.groups = {name: structure.groups[name] for name in groups}


def device_of(structure: Structure) -> torch.device:
    return next(iter(structure.parameters.values())).device


def main_input(flat: list[Any]) -> int | None:
    """Position of the boundary activation among a layer's flattened arguments: the first floating-point tensor."""
    for position, value in enumerate(flat):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1:
            return position
    return None


def _observe(structure: Structure, batch: Batch, *, drop: bool) -> tuple[list[_Seen], bool]:
    """The visits of one forward pass, and whether all that the model returned is finite."""
    seen: list[_Seen] = []
    owned = {id(parameter) for parameter in structure.parameters.values()}
    counted: set[int] = set()
    outputs: dict[int, torch.Tensor] = {}
    glue: set[int] = set()
    inside = [False]
    # One run of zeros serves every weight; on a CPU its pages are never written and so cost no memory.
    largest = max(parameter.numel() for parameter in structure.parameters.values())
    zero_weights = zeros_on(device_of(structure), largest * structure.dtype.itemsize).view(structure.dtype)
    zeros_key = zero_weights.untyped_storage().data_ptr()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage().data_ptr()
        if not inside[0]:
            glue.add(key)
        elif id(tensor) not in owned and key != zeros_key and key not in counted:
            counted.add(key)
            seen[-1].graph_bytes += tensor.untyped_storage().nbytes()
        return tensor

    @contextmanager
    def zeros(names: list[str]) -> Iterator[None]:
        for name in names:
            shape = structure.parameters[name].shape
            structure.bind(name, zero_weights[: shape.numel()].view(shape))
        yield
        for name in names:
            parameter = structure.parameters[name]
            structure.bind(name, placeholder(parameter.shape, parameter.dtype, parameter.device))

    def wrap(name: str, module: nn.Module) -> Callable[..., Any]:
        original = module.forward
        held = {id(parameter) for parameter in module.parameters()}
        own = [n for n, parameter in structure.parameters.items() if id(parameter) in held]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return original(*args, **kwargs)
            flat, _ = tree_flatten((args, kwargs))
            position = main_input(flat)
            main = None if position is None else flat[position]
            visit = _Seen(name, 0 if main is None else main.numel() * main.element_size())
            if main is not None and id(main) in outputs:
                visit.droppable = main.untyped_storage().data_ptr() not in glue
            seen.append(visit)
            inside[0] = True
            try:
                with zeros(own):
                    # Only counted: what goes on is cut off from the layer's graph.
                    output = _detach(original(*args, **kwargs))
            finally:
                inside[0] = False
                counted.clear()
            if drop and main is not None and visit.droppable:
                main.detach().fill_(float("nan"))
            outputs.update({id(value): value for value in tree_flatten(output)[0] if isinstance(value, torch.Tensor)})
            return output

        return forward

    rest = [s.name for group in structure.groups.values() if is_rest(group.name) for s in group.parameters]
    for name, module in structure.modules.items():
        module.forward = wrap(name, module)
    try:
        with zeros(rest), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            result, _ = tree_flatten(structure.model(**batch))
    finally:
        for module in structure.modules.values():
            del module.forward
    floats = [value for value in result if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return seen, all(bool(value.isfinite().all()) for value in floats)


def _detach(output: Any) -> Any:
    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().requires_grad_()
        return value

    return tree_map(one, output)
