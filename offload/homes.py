"""Weights and states at home: filled when a run starts, read when a model is saved."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..kernels.split_master import join_master, split_master
from ..swap_scheduler.plan import Plan, aligned
from ..swap_scheduler.workload import optim_block, weight_block
from .arena import Arena, DiskArena, MemoryArena
from .device import anonymous
from .layers import GroupSpec, ParameterSpec, Structure
from .optimizer import PartLayout, Segment
from .sources import WeightSource


class Homes:
    """The home slots of all blocks, which are the same in every plan of a job."""

    def __init__(
        self, structure: Structure, parts: Mapping[str, tuple[PartLayout, ...]], plan: Plan, arenas: Mapping[str, Arena]
    ) -> None:
        self._structure = structure
        self._parts = parts
        self._arenas = arenas
        self._sizes = {block.name: block.size_bytes for block in plan.blocks}
        self._tiers = {block.name: block.home for block in plan.blocks if block.home is not None}
        self._offsets = {slot.block: slot.offset_bytes for slot in plan.slots if slot.first < 0}
        self._where = {spec.name: (group, spec) for group in structure.groups.values() for spec in group.parameters}

    def fill(self, source: WeightSource) -> None:
        """Read every weight once, tensor by tensor, and write weight, master and zero moments to their homes."""
        for group in self._structure.groups.values():
            weights = self._staging(weight_block(group.name))
            parts = [self._staging(optim_block(group.name, i)) for i in range(len(self._parts.get(group.name, ())))]
            for part in parts:
                part.zero_()
            segments = self._segments(group)
            for parameter in group.parameters:
                tensor = source.tensor(parameter.name, parameter.shape).reshape(-1)
                run = slice(parameter.offset_numel, parameter.offset_numel + parameter.numel)
                target = weights.view(self._structure.dtype)[run]
                if group.name not in self._parts or self._structure.dtype == torch.float32:
                    target.copy_(tensor)
                    continue
                for index, segment in segments[parameter.name]:
                    self._split(tensor, target, parameter, segment, self._parts[group.name][index], parts[index])
            self._write(weight_block(group.name), weights)
            for index, part in enumerate(parts):
                self._write(optim_block(group.name, index), part)

    def _split(
        self, tensor: torch.Tensor, target: torch.Tensor, parameter: ParameterSpec, segment: Segment,
        layout: PartLayout, part: torch.Tensor,
    ) -> None:  # fmt: skip
        start = segment.start - parameter.offset_numel
        run = slice(start, start + segment.numel)
        master = layout.fields(part, segment)[2]
        assert master is not None
        values = tensor[run].to(torch.float32, copy=True)
        if master.dtype == torch.int16:
            split_master(values, target[run], master)
        else:
            master.copy_(values)
            target[run].copy_(values)

    def _segments(self, group: GroupSpec) -> dict[str, list[tuple[int, Segment]]]:
        found: dict[str, list[tuple[int, Segment]]] = {spec.name: [] for spec in group.parameters}
        for index, layout in enumerate(self._parts.get(group.name, ())):
            for segment in layout.segments:
                found[segment.parameter.name].append((index, segment))
        return found

    def weight(self, name: str) -> torch.Tensor:
        """A copy of the parameter, in the compute dtype, on the CPU."""
        group, spec = self._where[name]
        block = self._read(weight_block(group.name)).view(self._structure.dtype)
        return block[spec.offset_numel : spec.offset_numel + spec.numel].view(spec.shape).clone()

    def master(self, name: str) -> torch.Tensor:
        """The parameter's fp32 master, on the CPU."""
        group, spec = self._where[name]
        weight = self.weight(name).view(-1)
        if group.name not in self._parts or self._structure.dtype == torch.float32:
            return weight.float().view(spec.shape)
        result = torch.empty(spec.numel)
        for index, segment in self._segments(group)[name]:
            layout = self._parts[group.name][index]
            part = self._read(optim_block(group.name, index))
            start = segment.start - spec.offset_numel
            run = slice(start, start + segment.numel)
            master = layout.fields(part, segment)[2]
            assert master is not None
            if master.dtype == torch.int16:
                join_master(weight[run], master, result[run])
            else:
                result[run] = master
        return result.view(spec.shape)

    # A home in host memory is used in place; one on a device or on disk through a staging buffer.

    def _staging(self, block: str) -> torch.Tensor:
        arena = self._arenas[self._tiers[block]]
        if isinstance(arena, MemoryArena) and arena.bytes.device.type == "cpu":
            return arena.view(self._offsets[block], self._sizes[block])
        return anonymous(aligned(self._sizes[block]))[: self._sizes[block]]

    def _write(self, block: str, data: torch.Tensor) -> None:
        arena = self._arenas[self._tiers[block]]
        if isinstance(arena, DiskArena):
            whole = data.as_strided((aligned(data.numel()),), (1,))
            arena.write(self._offsets[block], whole)
        else:
            target = arena.view(self._offsets[block], self._sizes[block])
            if target.data_ptr() != data.data_ptr():
                target.copy_(data)

    def _read(self, block: str) -> torch.Tensor:
        arena = self._arenas[self._tiers[block]]
        if isinstance(arena, DiskArena):
            data = anonymous(aligned(self._sizes[block]))
            arena.read(self._offsets[block], data)
            return data[: self._sizes[block]]
        return arena.view(self._offsets[block], self._sizes[block]).cpu()
