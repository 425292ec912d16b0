from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from support.workloads import KIB, chain, costs, machine, machines, workloads

from overspill.swap_scheduler import (
    Access,
    Block,
    BudgetError,
    Choice,
    Compute,
    Machine,
    Order,
    PlanError,
    Transfer,
    Workload,
    add_dependencies,
    aligned,
    check,
    choose,
    order,
    plan_pass,
    residency,
    simulate,
)

GOLDEN = Path(__file__).parent / "golden"
PASSES = {True: ("first", "steady", "flush", "evaluate"), False: ("fused", "evaluate")}
DISK = 1 << 26


@settings(max_examples=40, deadline=None)
@given(workload=workloads(), where=machines())
def test_any_workload_is_refused_with_numbers_or_planned_right(workload: Workload, where: Machine) -> None:
    _refused_or_right(workload, where)


@pytest.mark.soak
@settings(max_examples=2000, deadline=None)
@given(workload=workloads(), where=machines())
def test_many_workloads_are_refused_with_numbers_or_planned_right(workload: Workload, where: Machine) -> None:
    _refused_or_right(workload, where)


def _refused_or_right(workload: Workload, where: Machine) -> None:
    for clipping, passes in PASSES.items():
        try:
            choice = choose(workload, where, costs(workload), clipping=clipping)
        except BudgetError as error:
            refusal = error
        else:
            refusal = None
        if refusal is not None:
            assert refusal.need_bytes > refusal.have_bytes == where.tier(refusal.tier).capacity_bytes
            assert f"the {refusal.tier} budget" in str(refusal)
            assert str(refusal.need_bytes - refusal.have_bytes) in str(refusal)
            continue
        for name in passes:
            plan = plan_pass(workload, where, choice, name)
            check(plan)
            for tier, peak in plan.peak_bytes().items():
                assert peak <= where.tier(tier).capacity_bytes
            expected = _computes(workload, name)
            assert Counter(_key(s.op) for s in plan.steps if isinstance(s.op, Compute)) == expected


@settings(max_examples=25, deadline=None)
@given(workload=workloads(), where=machines())
def test_short_windows_fit_under_the_choice_of_the_full_one(workload: Workload, where: Machine) -> None:
    _short_windows_fit(workload, where)


@pytest.mark.soak
@settings(max_examples=2000, deadline=None)
@given(workload=workloads(), where=machines())
def test_many_short_windows_fit_under_the_choice_of_the_full_one(workload: Workload, where: Machine) -> None:
    _short_windows_fit(workload, where)


def _short_windows_fit(workload: Workload, where: Machine) -> None:
    for clipping, passes in PASSES.items():
        try:
            choice = choose(workload, where, costs(workload), clipping=clipping)
        except BudgetError:
            continue
        for microbatches in range(1, workload.microbatches):
            for name in passes:
                check(plan_pass(replace(workload, microbatches=microbatches), where, choice, name))


@pytest.mark.parametrize("weight", [57_000, 64 * KIB])
@pytest.mark.parametrize("layers", [1, 4])
def test_the_bytes_of_one_update_are_room_enough(layers: int, weight: int) -> None:
    """Nothing is refused because what is free lies in pieces."""
    workload = chain(layers, 3, weight=weight, parts=1, inputs=50_000, resident=False)
    one_update = 2 * aligned(weight) + aligned(5 * weight)
    where = machine(one_update, DISK, graph=64 * KIB, shared=False)
    for clipping, passes in PASSES.items():
        choice = choose(workload, where, costs(workload), clipping=clipping)
        for microbatches in (1, 2, 3):
            for name in passes:
                check(plan_pass(replace(workload, microbatches=microbatches), where, choice, name))
        with pytest.raises(BudgetError) as refusal:
            choose(workload, machine(one_update - 4096, DISK, graph=64 * KIB), costs(workload), clipping=clipping)
        assert refusal.value.need_bytes == one_update


def _key(op: Compute) -> tuple[str, int, int]:
    return op.kind, op.layer, op.index


def _computes(workload: Workload, name: str) -> Counter[tuple[str, int, int]]:
    microbatches, layers = range(workload.microbatches), range(len(workload.layers))
    wanted = [] if name == "flush" else [("forward", i, m) for i in layers for m in microbatches]
    if name in ("first", "steady", "fused"):
        wanted += [("backward", i, m) for i in layers for m in microbatches]
    if name in ("steady", "flush", "fused"):
        wanted += [("update", g, p) for g, group in enumerate(workload.groups) for p in range(len(group.optim_bytes))]
    return Counter(wanted)


@settings(max_examples=15, deadline=None)
@given(workload=workloads())
def test_a_refusal_names_a_budget_that_works(workload: Workload) -> None:
    where = machine(4096, DISK, graph=1 << 20)
    with pytest.raises(BudgetError) as refusal:
        choose(workload, where, costs(workload), clipping=True)
    assert refusal.value.tier == "ram"
    enough = machine(refusal.value.need_bytes, DISK, graph=1 << 20)
    check(plan_pass(workload, enough, choose(workload, enough, costs(workload), clipping=True), "steady"))


def test_room_for_everything_means_no_transfer() -> None:
    workload = chain(6, 3)
    where = machine(1 << 26, DISK, graph=1 << 24)
    for clipping, passes in PASSES.items():
        choice = choose(workload, where, costs(workload), clipping=clipping)
        assert set(choice.homes.values()) == {"ram"}
        assert choice.kept == frozenset(range(8))
        for name in passes:
            assert plan_pass(workload, where, choice, name).moved_bytes() == {}


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("clipping", [True, False])
def test_full_spill_moves_three_weights_across_the_fast_link(microbatches: int, clipping: bool) -> None:
    """Forward fetch, backward fetch, one gradient: for any number of microbatches, less what stays resident."""
    frozen = frozenset({2, 4})
    workload = chain(8, microbatches, frozen=frozen, resident=False, inputs=0)
    groups = [group for group in workload.groups if group.trainable]
    weights = sum(group.weight_bytes for group in groups)
    fixed = sum(group.weight_bytes for group in workload.groups if not group.trainable)
    where = machine(3 * aligned(groups[0].weight_bytes), 1 << 26, DISK)
    homes = dict.fromkeys((b.name for b in _blocks(workload)), "ram")
    choice = Choice(homes=homes, lookahead=0, tail=1, kept=frozenset())
    plan = plan_pass(workload, where, choice, "steady" if clipping else "fused")
    check(plan)
    moved = plan.moved_bytes()
    backward = [s.op.layer for s in plan.steps if isinstance(s.op, Compute) and s.op.kind == "backward"]
    fetched = Counter(s.op.block for s in plan.steps if isinstance(s.op, Transfer) and s.op.target == "gpu")
    kept = sum(g.weight_bytes for g in workload.groups if fetched[f"{g.name}/weight"] == 1)
    assert moved["ram>gpu"] == 2 * (weights + fixed) - kept
    assert kept <= 2 * groups[0].weight_bytes
    assert moved["gpu>ram"] == weights
    assert "ram>disk" not in moved
    assert backward == sorted(backward, reverse=True)


def _blocks(workload: Workload):
    from overspill.swap_scheduler.workload import persistent_blocks

    return persistent_blocks(workload)


@pytest.mark.parametrize("clipping", [True, False])
def test_frozen_blocks_are_never_written(clipping: bool) -> None:
    frozen = frozenset(range(1, 5))
    workload = chain(6, 2, frozen=frozen)
    where = machine(500 * KIB, DISK)
    choice = choose(workload, where, costs(workload), clipping=clipping)
    for name in PASSES[clipping]:
        plan = plan_pass(workload, where, choice, name)
        roles = {block.name: block.role for block in plan.blocks}
        written = {s.op.block for s in plan.steps if isinstance(s.op, Transfer) and s.op.target == "disk"}
        assert not {block for block in written if roles[block] == "frozen"}
        assert not [b for b in plan.blocks if b.role in ("grad", "optim") and b.name.split("/")[0] in {"layer.0"}]


def test_an_update_waits_for_the_transfer_that_still_reads() -> None:
    """Write after read: U changes x in ram while x travels from there to gpu."""
    reads = Compute(kind="forward", layer=0, index=0, accesses=(Access(block="x", tier="gpu", mode="read"),))
    writes = Compute(kind="update", layer=0, index=0, accesses=(Access(block="x", tier="ram", mode="update"),))
    block = Block(name="x", role="weight", size_bytes=4096, home="ram")
    made = Order(computes=(reads, writes), blocks=(block,), entry=("x",), exit=("x",))
    bare = residency(made, machine(8192, 8192, DISK, shared=False), lookahead=0)
    check(add_dependencies(bare))
    with pytest.raises(PlanError, match="writes before an earlier read is done"):
        check(add_dependencies(bare, skip=frozenset({"war"})))


@pytest.mark.parametrize("skip", ["raw", "reuse"])
def test_every_kind_of_edge_is_needed(skip: str) -> None:
    workload = chain(6, 2)
    where = machine(260 * KIB, 700 * KIB, DISK, shared=False)
    choice = choose(workload, where, costs(workload), clipping=True)
    made = order(workload, where, choice.homes, "steady", tail=choice.tail, kept=choice.kept)
    bare = residency(made, where, lookahead=choice.lookahead)
    check(add_dependencies(bare))
    with pytest.raises(PlanError) as error:
        check(add_dependencies(bare, skip=frozenset({skip})))
    assert "->" in str(error.value)
    assert "story of" in str(error.value)


def test_a_broken_plan_is_found() -> None:
    workload = chain(4, 1)
    where = machine(500 * KIB, DISK)
    plan = plan_pass(workload, where, choose(workload, where, costs(workload), clipping=True), "first")
    fetch = next(i for i, s in enumerate(plan.steps) if isinstance(s.op, Transfer))
    bent = list(plan.slots)
    moving = next(i for i, slot in enumerate(bent) if slot.first >= 0)
    bent[moving] = replace(bent[moving], offset_bytes=0)
    with pytest.raises(PlanError):
        check(replace(plan, slots=tuple(bent)))
    unfetched = tuple(replace(s, after=()) for i, s in enumerate(plan.steps) if i != fetch)
    with pytest.raises(PlanError, match=r"not up to date|has no slot|not before"):
        check(replace(plan, steps=unfetched))
    with pytest.raises(PlanError, match="not up to date at home"):
        check(replace(plan, steps=(), slots=tuple(s for s in plan.slots if s.first < 0)))


CASES = {
    "ram_disk_steady": (chain(2, 2), machine(460 * KIB, DISK), True, "steady"),
    "ram_disk_fused": (chain(2, 1), machine(460 * KIB, DISK), False, "fused"),
    "three_tiers_steady": (chain(2, 1, tied=True), machine(260 * KIB, 500 * KIB, DISK, shared=False), True, "steady"),
    "resident_first": (chain(1, 2), machine(1 << 24, graph=1 << 22), True, "first"),
}


@pytest.mark.parametrize("case", CASES)
def test_golden_plans(case: str) -> None:
    """The steps, one a line, and the simulated seconds. OVERSPILL_GOLDEN=write makes the files anew."""
    workload, where, clipping, name = CASES[case]
    choice = choose(workload, where, costs(workload), clipping=clipping)
    plan = plan_pass(workload, where, choice, name)
    check(plan)
    text = plan.to_text() + f"{simulate(plan, costs(workload)).total_s:.6f} s\n"
    file = GOLDEN / f"{case}.txt"
    if os.environ.get("OVERSPILL_GOLDEN") == "write":
        file.write_text(text)
    assert text == file.read_text()


def test_large_plans_are_checked_and_the_size_is_known() -> None:
    """80 layers, 8 microbatches, three tiers; benchmarks/plan_speed.py has the seconds."""
    workload = chain(80, 8, weight=400 << 20, parts=4, inputs=2 << 20, saved=40 << 20)
    where = machine(20 << 30, 64 << 30, 1 << 40, graph=80 << 20, shared=False)
    choice = choose(workload, where, costs(workload, bandwidth=1e10), clipping=True)
    plan = plan_pass(workload, where, choice, "steady")
    check(plan)
    assert 5000 < len(plan.steps) < 9000


def test_scheduler_needs_the_standard_library_only() -> None:
    code = "import overspill.swap_scheduler, sys; print(sorted({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
