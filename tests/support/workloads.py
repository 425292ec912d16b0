"""Workloads, machines and costs for tests of the scheduler."""

from __future__ import annotations

from hypothesis import strategies as st

from overspill.swap_scheduler import Costs, Group, Layer, Link, Machine, Tier, Workload

KIB = 1 << 10


def chain(
    layers: int, microbatches: int, *, weight: int = 64 * KIB, parts: int = 2, inputs: int = 8 * KIB,
    saved: int = 16 * KIB, tied: bool = False, frozen: frozenset[int] = frozenset(), resident: bool = True,
) -> Workload:  # fmt: skip
    """Embedding, `layers` blocks, head; the head's weight is the embedding's when tied."""
    names = ["embed", *(f"layer.{i}" for i in range(layers)), "head"]
    group_of = {name: "embed" if tied and name == "head" else name for name in names}
    visits = tuple(
        Layer(
            name=name,
            weights=() if i in frozen else (group_of[name],),
            frozen=(group_of[name],) if i in frozen else (),
            input_bytes=0 if name == "embed" else inputs,
            saved_bytes=saved,
        )
        for i, name in enumerate(names)
    )
    groups = [
        Group(name=name, weight_bytes=weight)
        if i in frozen
        else Group(name=name, weight_bytes=weight, grad_bytes=weight, optim_bytes=(5 * weight // parts,) * parts)
        for i, name in enumerate(names)
        if group_of[name] == name
    ]
    if resident:
        rest = Group(name="rest", weight_bytes=KIB, grad_bytes=KIB, optim_bytes=(5 * KIB,), resident=True)
        groups.insert(0, rest)
    return Workload(layers=visits, groups=tuple(groups), microbatches=microbatches)


def machine(*capacities: int, graph: int = 32 * KIB, shared: bool = True) -> Machine:
    """Tiers gpu, ram, disk (or ram, disk, or ram) of these capacities."""
    names = {1: ("ram",), 2: ("ram", "disk"), 3: ("gpu", "ram", "disk")}[len(capacities)]
    tiers = tuple(Tier(name=n, capacity_bytes=c) for n, c in zip(names, capacities, strict=True))
    graph_tier = Tier(name="graph", capacity_bytes=graph)
    return Machine(tiers=tiers, update_tier="ram", graph_tier=graph_tier, shared_lane=shared)


def costs(workload: Workload, *, forward_s: float = 1.0, update_s: float = 0.5, bandwidth: float = 64.0 * KIB) -> Costs:
    """By default one second to move a weight, one to run a layer forward, two back."""
    links = ("gpu>ram", "ram>gpu", "ram>disk", "disk>ram")
    return Costs(
        links={name: Link(bandwidth_bytes_per_s=bandwidth) for name in links},
        forward_s=(forward_s,) * len(workload.layers),
        backward_s=(2 * forward_s,) * len(workload.layers),
        update_s=tuple((update_s,) * len(group.optim_bytes) for group in workload.groups),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    layers = draw(st.integers(1, 8))
    size = st.integers(1, 40).map(lambda pages: pages * 3000)
    return chain(
        layers,
        draw(st.integers(1, 4)),
        weight=draw(size),
        parts=draw(st.integers(1, 3)),
        inputs=draw(st.sampled_from([0, 3000, 50_000])),
        saved=draw(st.sampled_from([0, 5000, 70_000])),
        tied=draw(st.booleans()),
        frozen=draw(st.frozensets(st.integers(1, layers), max_size=layers)),
        resident=draw(st.booleans()),
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    page = st.integers(1, 600).map(lambda pages: pages * 4096)
    tiers = draw(st.integers(1, 3))
    capacities = [draw(page) for _ in range(tiers)]
    if tiers > 1:
        capacities[-1] = 1 << 30
    return machine(*capacities, graph=draw(page), shared=draw(st.booleans()))
