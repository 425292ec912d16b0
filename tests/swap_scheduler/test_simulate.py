from __future__ import annotations

import pytest
from support.workloads import KIB, chain, costs, machine

from overspill.swap_scheduler import Choice, Trace, choose, plan_pass, simulate


def test_resident_step_is_the_sum_of_its_computes() -> None:
    workload = chain(2, 2, resident=False)
    where = machine(1 << 24, graph=1 << 22)
    choice = choose(workload, where, costs(workload), clipping=True)
    # 4 layers x 2 microbatches x (1 forward + 2 backward) and 4 groups x 2 parts x 0.5
    trace = simulate(plan_pass(workload, where, choice, "steady"), costs(workload))
    assert trace.total_s == pytest.approx(4 * 2 * 3 + 4 * 2 * 0.5)


def test_recompute_costs_one_more_forward() -> None:
    workload = chain(2, 1, resident=False)
    where = machine(1 << 24, graph=1 << 22)
    homes = dict(choose(workload, where, costs(workload), clipping=True).homes)
    choice = Choice(homes=homes, lookahead=1, tail=1, kept=frozenset())
    trace = simulate(plan_pass(workload, where, choice, "first"), costs(workload))
    assert trace.total_s == pytest.approx(4 * 3 + 3)


def test_a_slow_link_binds_and_a_fast_one_hides() -> None:
    workload = chain(6, 1)
    where = machine(700 * KIB, 1 << 26)
    slow, fast = costs(workload, bandwidth=8.0 * KIB), costs(workload, bandwidth=1024.0 * KIB)
    plan = plan_pass(workload, where, choose(workload, where, slow, clipping=True), "steady")
    bound = plan.moved_bytes()["disk>ram"] / (8 * KIB)
    assert bound <= simulate(plan, slow).total_s
    hidden = simulate(plan, fast)
    assert hidden.total_s == pytest.approx(hidden.busy_s()["compute"], rel=0.1)


def test_trace_goes_through_json() -> None:
    workload = chain(2, 1)
    where = machine(500 * KIB, 1 << 26)
    plan = plan_pass(workload, where, choose(workload, where, costs(workload), clipping=True), "first")
    trace = simulate(plan, costs(workload))
    assert Trace.from_json(trace.to_json()) == trace
    assert trace.digest == plan.digest
    assert dict(trace.peak_bytes) == plan.peak_bytes()
