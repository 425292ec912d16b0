"""Dependencies are right when no execution that respects lanes and `after` alone can tell them from program order.

`execute` does what the executor does, on pages that hold the name and version of what was written last.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.workloads import KIB, chain, machine

from overspill.swap_scheduler import (
    Access,
    Block,
    Compute,
    Group,
    Infeasible,
    Layer,
    Machine,
    Order,
    Pass,
    Plan,
    Tier,
    Transfer,
    Workload,
    add_dependencies,
    aligned,
    check,
    order,
    residency,
)
from overspill.swap_scheduler.plan import ALIGNMENT_BYTES, Mode
from overspill.swap_scheduler.workload import persistent_blocks

TIERS = (("ram",), ("ram", "disk"), ("gpu", "ram", "disk"), ("gpu", "ram", "nvme", "disk"))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Layers that share groups in any way: tied, partly frozen, without parameters, with resident groups beside."""
    groups = []
    for i in range(draw(st.integers(1, 8))):
        size = draw(st.integers(1, 20)) * 3000
        parts = tuple(draw(st.lists(st.integers(1, 20).map(lambda k: k * 2000), max_size=3)))
        groups.append(Group(name=f"g{i}", weight_bytes=size, grad_bytes=size if parts else 0, optim_bytes=parts))
    layers = []
    for i in range(draw(st.integers(1, 12))):
        picked = draw(st.lists(st.sampled_from(groups), max_size=3, unique=True))
        layers.append(
            Layer(
                name=f"l{i}",
                weights=tuple(g.name for g in picked if g.trainable),
                frozen=tuple(g.name for g in picked if not g.trainable),
                input_bytes=draw(st.sampled_from([0, 3000, 20_000])),
                saved_bytes=draw(st.sampled_from([0, 5000, 40_000])),
            )
        )
    names = list(dict.fromkeys(name for layer in layers for name in (*layer.weights, *layer.frozen)))
    used = sorted((g for g in groups if g.name in names), key=lambda g: names.index(g.name))
    if draw(st.booleans()):
        used.insert(0, Group(name="rest", weight_bytes=900, grad_bytes=900, optim_bytes=(4500,), resident=True))
    return Workload(layers=tuple(layers), groups=tuple(used), microbatches=draw(st.integers(1, 5)))


@st.composite
def plans(draw: st.DrawFn) -> Plan | None:
    """A plan without dependencies, homes chosen at random and little room beside them; None where it does not fit."""
    workload = draw(workloads())
    names = draw(st.sampled_from(TIERS))
    name: Pass = draw(st.sampled_from(["first", "steady", "flush", "evaluate", "fused"]))
    homes = {}
    for group in workload.groups:
        # Apart from the update tier, the fast tier takes a trainable group whole or not at all.
        whole = group.resident or (group.trainable and names[0] != "ram" and draw(st.integers(0, 4)) == 0)
        below = names[1:] if group.trainable and names[0] != "ram" else names
        for block in persistent_blocks(replace(workload, groups=(group,), layers=(Layer(name="x"),))):
            if block.role != "grad" or name != "fused":
                homes[block.name] = names[0] if whole else draw(st.sampled_from(below))
    graph = Tier(name="graph", capacity_bytes=1 << 24)
    shape = Machine(
        tiers=tuple(Tier(name=n, capacity_bytes=0) for n in names),
        update_tier="ram",
        graph_tier=graph,
        shared_lane=draw(st.booleans()),
    )
    kept = draw(st.frozensets(st.integers(0, 11), max_size=3))
    made = order(workload, shape, homes, name, tail=draw(st.integers(1, 3)), kept=kept)
    room = draw(st.sampled_from([1.0, 1.3, 2.0, 4.0]))
    try:
        return residency(made, _with_room(shape, made, room), lookahead=draw(st.sampled_from([0, 1, 2, 4])))
    except Infeasible:
        return None


def _with_room(shape: Machine, made: Order, room: float) -> Machine:
    """`room` times what the largest compute, or block passing through, needs beside the homes; plenty in the last."""
    sizes = {b.name: aligned(b.size_bytes) for b in made.blocks}
    homes = {b.name: b.home for b in made.blocks}
    tiers = []
    for tier in shape.tiers:
        visiting = [
            sum(sizes[a.block] for a in c.accesses if a.tier == tier.name != homes[a.block]) for c in made.computes
        ]
        need = max([*visiting, *sizes.values()], default=0)
        spare = int(need * room) if tier is not shape.tiers[-1] else 1 << 24
        tiers.append(replace(tier, capacity_bytes=sum(sizes[b] for b in sizes if homes[b] == tier.name) + spare))
    return replace(shape, tiers=tuple(tiers))


def execute(plan: Plan, seed: int) -> None:
    """Run the plan in a random order that respects lanes and `after`; every read and every home must be right."""
    dice = random.Random(seed)
    pages: dict[tuple[str, int], tuple[str, int]] = {}
    places = {}
    for slot in plan.slots:
        for i in range(max(slot.first, 0), slot.last + 1):
            places[slot.block, slot.tier, i] = slot.offset_bytes // ALIGNMENT_BYTES
    sizes = {b.name: aligned(b.size_bytes) // ALIGNMENT_BYTES for b in plan.blocks}

    def content(block: str, tier: str, i: int) -> set[tuple[str, int] | None]:
        start = places[block, tier, i]
        return {pages.get((tier, page)) for page in range(start, start + sizes[block])}

    def fill(block: str, tier: str, i: int, value: tuple[str, int]) -> None:
        for page in range(places[block, tier, i], places[block, tier, i] + sizes[block]):
            pages[tier, page] = value

    for block in plan.blocks:
        if block.name in plan.entry:
            assert block.home is not None
            fill(block.name, block.home, 0, (block.name, 0))
    expected, versions = _versions(plan)
    lanes: dict[str, list[int]] = {}
    for i, step in enumerate(plan.steps):
        if step.lane:
            lanes.setdefault(step.lane, []).append(i)
    done = {i for i, step in enumerate(plan.steps) if not step.lane}
    eager = dice.choice([None, *lanes]) if lanes else None
    while lanes:
        ready = [lane for lane, left in lanes.items() if done.issuperset(plan.steps[left[0]].after)]
        assert ready, "no step may start"
        lane = eager if eager in ready and dice.random() < 0.9 else dice.choice(ready)
        i = lanes[lane].pop(0)
        if not lanes[lane]:
            del lanes[lane]
        op = plan.steps[i].op
        if isinstance(op, Transfer):
            found = content(op.block, op.source, i)
            value = found.pop() if len(found) == 1 else None
            fill(op.block, op.target, i, value or ("garbage", 0))
        elif isinstance(op, Compute):
            for access in op.accesses:
                if access.mode != "write":
                    now = expected[i, access.block] - (access.mode == "update")
                    assert content(access.block, access.tier, i) == {(access.block, now)}, f"{op} reads {access.block}"
            for access in op.accesses:
                if access.mode != "read":
                    fill(access.block, access.tier, i, (access.block, expected[i, access.block]))
        done.add(i)
    for block in plan.blocks:
        if block.name in plan.exit:
            assert block.home is not None
            assert content(block.name, block.home, len(plan.steps)) == {(block.name, versions[block.name])}, block.name


def _versions(plan: Plan) -> tuple[dict[tuple[int, str], int], dict[str, int]]:
    """In program order: the version of every block after each compute that touches it, and at the end."""
    versions = {b.name: 0 for b in plan.blocks}
    after = {}
    for i, step in enumerate(plan.steps):
        if isinstance(step.op, Compute):
            for access in step.op.accesses:
                versions[access.block] += access.mode != "read"
                after[i, access.block] = versions[access.block]
    return after, versions


@settings(max_examples=250, deadline=None)
@given(bare=plans(), seed=st.integers(0, 1 << 30))
def test_no_legal_order_of_execution_reads_a_wrong_byte(bare: Plan | None, seed: int) -> None:
    if bare is None:
        return
    plan = add_dependencies(bare)
    check(plan)
    for k in range(3):
        execute(plan, seed + k)


@settings(max_examples=100, deadline=None)
@given(bare=plans())
def test_a_step_names_the_latest_step_of_each_other_lane_at_most(bare: Plan | None) -> None:
    if bare is None:
        return
    plan = add_dependencies(bare)
    for i, step in enumerate(plan.steps):
        lanes = [plan.steps[other].lane for other in step.after]
        assert len(set(lanes)) == len(lanes) and step.lane not in lanes and "" not in lanes
        assert list(step.after) == sorted(step.after) and all(other < i for other in step.after)
        if not step.lane:
            assert step.after == ()


def _wrong(plan: Plan) -> bool:
    for seed in range(40):
        try:
            execute(plan, seed)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("kind", ["raw", "reuse"])
def test_without_a_kind_of_edge_some_order_reads_a_wrong_byte(kind: str) -> None:
    workload = chain(6, 2)
    where = machine(400 * KIB, 900 * KIB, 1 << 26, shared=False)
    homes = {b.name: "gpu" if b.name.startswith("rest/") else "disk" for b in persistent_blocks(workload)}
    bare = residency(order(workload, where, homes, "steady", tail=2, kept=frozenset()), where, lookahead=2)
    assert not _wrong(add_dependencies(bare))
    assert _wrong(add_dependencies(bare, skip=frozenset({kind})))


def test_without_write_after_read_an_update_overtakes_a_transfer() -> None:
    """U0.0 changes x in ram while x still travels to the gpu; F0.0 wants the old one."""

    def use(kind: str, tier: str, mode: Mode) -> Compute:
        accesses = (Access(block="x", tier=tier, mode=mode),)
        return Compute(kind="forward" if kind == "F" else "update", layer=0, index=0, accesses=accesses)

    made = Order(
        computes=(use("F", "gpu", "read"), use("U", "ram", "update")),
        blocks=(Block(name="x", role="weight", size_bytes=4096, home="ram"),),
        entry=("x",),
        exit=("x",),
    )
    bare = residency(made, machine(8192, 8192, 1 << 20, shared=False), lookahead=0)
    assert not _wrong(add_dependencies(bare))
    assert _wrong(add_dependencies(bare, skip=frozenset({"war"})))
