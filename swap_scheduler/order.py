"""The computes of one pass in the order they run, with what each reads and writes. No word on transfers.

Layer-major: every microbatch runs on a layer before the next layer; microbatches go 0, 1, ... in both directions, so
that gradients are summed in the order of plain accumulation. The last `tail` layers go forward and backward in one
visit per microbatch, so logits never pile up and nothing of them is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .plan import Access, Block, Compute, Kind, Machine, Mode, Role
from .workload import (
    Group,
    Workload,
    grad_block,
    input_block,
    optim_block,
    persistent_blocks,
    saved_block,
    weight_block,
)

Pass: TypeAlias = Literal["first", "steady", "flush", "evaluate", "fused"]
"""first: forward, backward. steady: updates with the gradients that wait at home, forward, backward. flush: those
updates alone. evaluate: forward alone. fused: forward, backward, each update as soon as its gradient is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    computes: tuple[Compute, ...]
    blocks: tuple[Block, ...]
    entry: tuple[str, ...]
    exit: tuple[str, ...]


def order(
    workload: Workload, machine: Machine, homes: Mapping[str, str], name: Pass, *, tail: int, kept: frozenset[int]
) -> Order:
    """The computes of pass `name`, and the blocks they touch.

    homes: tier of every persistent block; gradients that live inside the pass have none. kept: layers whose graph
    outlives their forward (the tail's always does).
    """
    return _Builder(workload, machine, homes, name, tail, kept).build()


class _Builder:
    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        homes: Mapping[str, str],
        name: Pass,
        tail: int,
        kept: frozenset[int],
    ) -> None:
        self._workload = workload
        self._machine = machine
        self._homes = homes
        self._name = name
        self._count = len(workload.layers)
        self._tail = min(tail, self._count)
        self._kept = kept | frozenset(range(self._count - self._tail, self._count))
        self._groups = {group.name: group for group in workload.groups}
        self._index = {group.name: i for i, group in enumerate(workload.groups)}
        self._resident = [group for group in workload.groups if group.resident]
        self._written: set[str] = set()
        self._first_layer: dict[str, int] = {}
        for i, layer in enumerate(workload.layers):
            for group in layer.weights:
                self._first_layer.setdefault(group, i)
        for resident in self._resident:
            self._first_layer[resident.name] = 0

    def build(self) -> Order:
        computes = tuple(self._computes())
        blocks: list[Block] = []
        entry, exits = [], []
        for block in persistent_blocks(self._workload):
            grad = block.role == "grad"
            home = self._homes.get(block.name) if grad else self._homes[block.name]
            blocks.append(Block(name=block.name, role=block.role, size_bytes=block.size_bytes, home=home))
            if not grad or self._name in ("steady", "flush"):
                entry.append(block.name)
            if not grad or self._name in ("first", "steady"):
                exits.append(block.name)
        written = {access.block for compute in computes for access in compute.accesses if access.mode == "write"}
        exits = [name for name in exits if name in set(entry) | written]
        for layer in self._workload.layers:
            for m in range(self._workload.microbatches):
                pairs: tuple[tuple[str, Role, int], ...] = (
                    (input_block(layer.name, m), "input", layer.input_bytes),
                    (saved_block(layer.name, m), "saved", layer.saved_bytes),
                )
                blocks += [Block(name=n, role=r, size_bytes=s) for n, r, s in pairs if n in written]
        return Order(computes=computes, blocks=tuple(blocks), entry=tuple(entry), exit=tuple(exits))

    def _computes(self) -> Iterator[Compute]:
        if self._name == "flush":
            for group in self._workload.groups:
                yield from self._updates(group)
            return
        microbatches = range(self._workload.microbatches)
        head = self._count if self._name == "evaluate" else self._count - self._tail
        for layer in range(head):
            yield from self._updates_before(layer)
            for m in microbatches:
                yield self._forward(layer, m)
        if self._name == "evaluate":
            return
        for layer in range(head, self._count):
            yield from self._updates_before(layer)
        for m in microbatches:
            for layer in range(head, self._count):
                yield self._forward(layer, m)
            for layer in reversed(range(head, self._count)):
                yield self._backward(layer, m)
        for layer in reversed(range(head, self._count)):
            yield from self._updates_after(layer)
        for layer in reversed(range(head)):
            for m in microbatches:
                yield self._backward(layer, m)
            yield from self._updates_after(layer)

    def _updates_before(self, layer: int) -> Iterator[Compute]:
        if self._name == "steady":
            for name, first in self._first_layer.items():
                if first == layer and (group := self._groups[name]).trainable:
                    yield from self._updates(group)

    def _updates_after(self, layer: int) -> Iterator[Compute]:
        if self._name == "fused":
            for name, first in self._first_layer.items():
                if first == layer and (group := self._groups[name]).trainable:
                    yield from self._updates(group)

    def _updates(self, group: Group) -> Iterator[Compute]:
        for part in range(len(group.optim_bytes)):
            optim = optim_block(group.name, part)
            fast = self._homes[optim] == self._machine.compute_tier
            tier = self._machine.compute_tier if fast else self._machine.update_tier
            accesses = (
                Access(block=grad_block(group.name), tier=tier, mode="read"),
                Access(block=weight_block(group.name), tier=tier, mode="update"),
                Access(block=optim, tier=tier, mode="update"),
            )
            yield Compute(kind="update", layer=self._index[group.name], index=part, accesses=accesses)

    def _forward(self, layer: int, m: int) -> Compute:
        spec = self._workload.layers[layer]
        keep = layer in self._kept and self._name != "evaluate" and spec.saved_bytes > 0
        accesses = self._weights(layer)
        if keep:
            accesses.append(self._graph(saved_block(spec.name, m), "write"))
        elif spec.input_bytes and self._name != "evaluate":
            accesses.append(self._at_compute(input_block(spec.name, m), "write"))
        return self._compute("forward", layer, m, accesses, keep)

    def _backward(self, layer: int, m: int) -> Compute:
        spec = self._workload.layers[layer]
        accesses = self._weights(layer)
        if layer in self._kept and spec.saved_bytes > 0:
            accesses.append(self._graph(saved_block(spec.name, m), "read"))
        elif spec.input_bytes:
            accesses.append(self._at_compute(input_block(spec.name, m), "read"))
        for name in (*(group.name for group in self._resident), *spec.weights):
            if self._groups[name].trainable:
                block = grad_block(name)
                accesses.append(self._at_compute(block, "update" if block in self._written else "write"))
                self._written.add(block)
        return self._compute("backward", layer, m, accesses, False)

    def _weights(self, layer: int) -> list[Access]:
        spec = self._workload.layers[layer]
        names = (*(group.name for group in self._resident), *spec.weights, *spec.frozen)
        return [self._at_compute(weight_block(name), "read") for name in names]

    def _at_compute(self, block: str, mode: Mode) -> Access:
        return Access(block=block, tier=self._machine.compute_tier, mode=mode)

    def _graph(self, block: str, mode: Mode) -> Access:
        return Access(block=block, tier=self._machine.graph_tier.name, mode=mode)

    def _compute(self, kind: Kind, layer: int, m: int, accesses: list[Access], keep: bool) -> Compute:
        return Compute(kind=kind, layer=layer, index=m, keep_graph=keep, accesses=tuple(accesses))
