"""What has to be computed, without a word on where or when: layers, their blocks, microbatches, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .plan import Block, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One visit of the forward pass: a module that is called once at this point of the model.

    `weights` and `frozen` name the groups it reads (a tied weight or a module called twice appears in several
    layers). `input_bytes` and `saved_bytes` are per microbatch: the boundary activation kept for recompute, and
    the autograd graph when it is kept instead.
    """

    name: str
    weights: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    input_bytes: int = 0
    saved_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that move as one block. Trainable groups have a gradient of the same shape and optimizer states,
    the states cut into parts that are updated one after the other. `resident` groups (norms and other small
    parameters that the model uses between layers) never leave the compute tier.
    """

    name: str
    weight_bytes: int
    grad_bytes: int = 0
    optim_bytes: tuple[int, ...] = ()
    resident: bool = False

    @property
    def trainable(self) -> bool:
        return bool(self.optim_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One job: `layers` in the order the forward pass visits them, `groups` in the order of their first visit.

    The `U<i>.<p>` steps update part p of `groups[i]`.
    """

    layers: tuple[Layer, ...]
    groups: tuple[Group, ...]
    microbatches: int

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ValueError("group names must differ")
        used = {name for layer in self.layers for name in (*layer.weights, *layer.frozen)}
        if missing := used - set(names):
            raise ValueError(f"layers name unknown groups: {sorted(missing)}")
        if self.microbatches < 1 or not self.layers:
            raise ValueError("a workload needs at least one layer and one microbatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured seconds; never part of a plan. `forward_s[layer]` and `backward_s[layer]` are per microbatch, the
    backward without recompute; `update_s[group]` per part, in the order of `Group.optim_bytes`.
    """

    links: Mapping[str, Link]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[tuple[float, ...], ...]


def weight_block(group: str) -> str:
    return f"{group}/weight"


def grad_block(group: str) -> str:
    return f"{group}/grad"


def optim_block(group: str, part: int) -> str:
    return f"{group}/optim.{part}"


def input_block(layer: str, microbatch: int) -> str:
    return f"{layer}/input.{microbatch}"


def saved_block(layer: str, microbatch: int) -> str:
    return f"{layer}/saved.{microbatch}"


def persistent_blocks(workload: Workload) -> tuple[Block, ...]:
    """Weights, gradients and states of every group, homes still open, in the order they get their places."""
    blocks: list[Block] = []
    for group in workload.groups:
        role: Role = "weight" if group.trainable else "frozen"
        blocks.append(Block(name=weight_block(group.name), role=role, size_bytes=group.weight_bytes))
        if group.trainable:
            blocks.append(Block(name=grad_block(group.name), role="grad", size_bytes=group.grad_bytes))
            blocks += [
                Block(name=optim_block(group.name, part), role="optim", size_bytes=size)
                for part, size in enumerate(group.optim_bytes)
            ]
    return tuple(blocks)
