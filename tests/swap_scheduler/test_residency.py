from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from support.workloads import KIB, chain, machine

from overspill.swap_scheduler import (
    Access,
    Block,
    Choice,
    Compute,
    Infeasible,
    Machine,
    Order,
    Plan,
    Release,
    Workload,
    add_dependencies,
    aligned,
    check,
    order,
    plan_pass,
    residency,
)
from overspill.swap_scheduler.plan import Kind, Mode
from overspill.swap_scheduler.residency import home_offsets
from overspill.swap_scheduler.workload import persistent_blocks

PAGE = 4096
DISK = 1 << 26


def use(kind: Kind, layer: int, *accesses: str) -> Compute:
    """`use("forward", 0, "read x@gpu")`"""
    parts = [text.replace("@", " ").split() for text in accesses]
    made: list[Access] = []
    for mode, block, tier in parts:
        checked: Mode = "read" if mode == "read" else "write" if mode == "write" else "update"
        made.append(Access(block=block, tier=tier, mode=checked))
    return Compute(kind=kind, layer=layer, index=0, accesses=tuple(made))


def lower(computes: list[Compute], blocks: list[Block], where: Machine, lookahead: int = 0) -> Plan:
    names = tuple(block.name for block in blocks if block.home)
    made = Order(computes=tuple(computes), blocks=tuple(blocks), entry=names, exit=names)
    plan = add_dependencies(residency(made, where, lookahead=lookahead))
    check(plan)
    return plan


def weight(name: str, home: str, pages: int = 1) -> Block:
    return Block(name=name, role="weight", size_bytes=pages * PAGE, home=home)


def ops(plan: Plan) -> list[str]:
    return [str(step.op) for step in plan.steps if not isinstance(step.op, Release)]


def test_a_block_hops_through_every_tier_between() -> None:
    plan = lower([use("forward", 0, "read x@gpu")], [weight("x", "disk")], machine(PAGE, PAGE, DISK))
    assert ops(plan) == ["x disk>ram", "x ram>gpu", "F0.0"]


def test_a_changed_block_goes_home_after_its_last_change_not_before() -> None:
    computes = [use("update", 0, "update x@ram"), use("update", 1, "update x@ram"), use("forward", 0, "read y@ram")]
    plan = lower(computes, [weight("x", "disk"), weight("y", "disk")], machine(4 * PAGE, DISK))
    assert ops(plan) == ["x disk>ram", "U0.0", "U1.0", "x ram>disk", "y disk>ram", "F0.0"]


def test_a_clean_copy_is_dropped_without_a_transfer() -> None:
    computes = [use("forward", 0, "read x@ram"), use("forward", 1, "read y@ram")]
    plan = lower(computes, [weight("x", "disk"), weight("y", "disk")], machine(PAGE, DISK))
    assert ops(plan) == ["x disk>ram", "F0.0", "y disk>ram", "F1.0"]


def test_the_copy_used_furthest_away_makes_room() -> None:
    layers = "xyzx"
    computes = [use("forward", i, f"read {name}@ram") for i, name in enumerate(layers)]
    plan = lower(computes, [weight(name, "disk") for name in "xyz"], machine(2 * PAGE, DISK))
    assert plan.moved_bytes() == {"disk>ram": 3 * PAGE}


def test_a_block_about_to_change_elsewhere_is_not_fetched_before() -> None:
    """The update in ram would make a copy on the gpu stale: F1 gets the new weight, once."""
    computes = [use("forward", 0, "read y@gpu"), use("update", 0, "update x@ram"), use("forward", 1, "read x@gpu")]
    where = machine(4 * PAGE, 4 * PAGE, DISK, shared=False)
    plan = lower(computes, [weight("x", "ram"), weight("y", "ram")], where, lookahead=4)
    assert ops(plan) == ["y ram>gpu", "F0.0", "U0.0", "x ram>gpu", "F1.0"]


@pytest.mark.parametrize("lookahead, before", [(0, 1), (1, 2), (2, 3)])
def test_lookahead_is_how_many_visits_ahead_blocks_are_fetched(lookahead: int, before: int) -> None:
    computes = [use("forward", i, f"read {name}@ram") for i, name in enumerate("xyz")]
    plan = lower(computes, [weight(name, "disk") for name in "xyz"], machine(4 * PAGE, DISK), lookahead)
    assert ops(plan).index("F0.0") == before


def test_a_compute_too_large_for_its_tier_is_named() -> None:
    computes = [use("forward", 7, "read x@ram", "read y@ram")]
    with pytest.raises(Infeasible, match=r"F7\.0") as refusal:
        lower(computes, [weight("x", "disk", 2), weight("y", "disk", 3)], machine(4 * PAGE, DISK))
    assert (refusal.value.tier, refusal.value.need_bytes, refusal.value.have_bytes) == ("ram", 5 * PAGE, 4 * PAGE)


def test_homes_too_large_for_their_tier_are_named() -> None:
    with pytest.raises(Infeasible, match="what lives there") as refusal:
        lower([], [weight("x", "ram", 2), weight("y", "ram", 3)], machine(4 * PAGE, DISK))
    assert (refusal.value.need_bytes, refusal.value.have_bytes) == (5 * PAGE, 4 * PAGE)


def test_weights_of_a_kept_graph_stay_where_they_are() -> None:
    workload = chain(4, 2, resident=False)
    where = machine(9 * 64 * KIB, DISK, graph=1 << 20)
    homes = {block.name: "disk" for block in persistent_blocks(workload)}
    for kept in (frozenset({1}), frozenset({1, 3})):
        choice = Choice(homes=homes, lookahead=1, tail=1, kept=kept)
        plan = plan_pass(workload, where, choice, "first")
        check(plan)
        at = {str(step.op): i for i, step in enumerate(plan.steps)}
        for layer in kept:
            name = f"{workload.layers[layer].name}/weight"
            spans = [(s.first, s.last) for s in plan.slots if (s.block, s.tier) == (name, "ram")]
            assert any(first <= at[f"F{layer}.0+"] and at[f"B{layer}.1"] <= last for first, last in spans)


def test_homes_do_not_move_between_the_passes_of_a_job() -> None:
    workload = chain(4, 3)
    where = machine(16 * 64 * KIB, DISK)
    homes = {
        b.name: "ram" if b.name.split("/")[0] in ("rest", "embed") else "disk" for b in persistent_blocks(workload)
    }
    choice = Choice(homes=homes, lookahead=1, tail=1, kept=frozenset())
    seen = set()
    for name in ("first", "steady", "flush", "evaluate"):
        for microbatches in (1, 3):
            plan = plan_pass(replace(workload, microbatches=microbatches), where, choice, name)
            seen.add(frozenset((s.block, s.tier, s.offset_bytes) for s in plan.slots if s.first < 0))
    assert len(seen) == 1
    blocks = [replace(block, home=homes[block.name]) for block in persistent_blocks(workload)]
    assert {(b, homes[b], offset) for b, offset in home_offsets(blocks).items()} == set(*seen)


def test_homes_are_packed_from_zero_on_aligned_offsets() -> None:
    blocks = [replace(weight("x", "ram"), size_bytes=1), weight("y", "disk"), weight("z", "ram", 2), weight("w", "ram")]
    assert home_offsets(blocks) == {"x": 0, "y": 0, "z": PAGE, "w": 3 * PAGE}
    assert home_offsets([Block(name="g", role="grad", size_bytes=PAGE)]) == {}


def test_a_copy_is_released_only_where_its_slot_ends() -> None:
    workload: Workload = chain(5, 2)
    where = machine(12 * 64 * KIB, DISK)
    homes = {b.name: "ram" if b.name.startswith("rest/") else "disk" for b in persistent_blocks(workload)}
    plan = add_dependencies(
        residency(order(workload, where, homes, "first", tail=2, kept=frozenset()), where, lookahead=2)
    )
    ends = {(s.block, s.tier, s.last) for s in plan.slots if s.first >= 0}
    assert ends == {(s.op.block, s.op.tier, i) for i, s in enumerate(plan.steps) if isinstance(s.op, Release)}
    assert all(slot.offset_bytes % aligned(1) == 0 for slot in plan.slots)


HASHED = """
from overspill.swap_scheduler import Access, Block, Compute, Machine, Order, Tier, residency
tiers = tuple(Tier(name=n, capacity_bytes=1 << 20) for n in ("gpu", "ram", "nvme", "disk"))
graph = Tier(name="graph", capacity_bytes=0)
where = Machine(tiers=tiers, update_tier="gpu", graph_tier=graph, shared_lane=True)
modes = (("forward", "read"), ("update", "update"))
computes = tuple(
    Compute(kind=kind, layer=0, index=0, accesses=(Access(block="x", tier="gpu", mode=mode),)) for kind, mode in modes
)
blocks = (Block(name="x", role="weight", size_bytes=4096, home="disk"),)
print(residency(Order(computes=computes, blocks=blocks, entry=("x",), exit=("x",)), where, lookahead=0).digest)
"""
"""x has copies in gpu, ram and nvme when the update makes two of them stale: they go in one order, always."""


def test_a_plan_does_not_depend_on_the_hashes_of_the_process() -> None:
    digests = set()
    for seed in range(6):
        environment = os.environ | {"PYTHONHASHSEED": str(seed)}
        done = subprocess.run(
            [sys.executable, "-c", HASHED], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout)
    assert len(digests) == 1
