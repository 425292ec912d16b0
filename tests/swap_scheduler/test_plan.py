from __future__ import annotations

import pytest
from support.workloads import KIB, chain, costs, machine

from overspill.swap_scheduler import Compute, Plan, Release, Transfer, choose, parse_op, plan_pass

TEXTS = ("F3.0", "F3.0+", "B12.7", "U3.1", "layer.3/weight disk>ram", "free layer.3/weight@ram", "a.b/optim.2 ram>gpu")


@pytest.mark.parametrize("text", TEXTS)
def test_step_text_goes_both_ways(text: str) -> None:
    assert str(parse_op(text)) == text


def test_step_text_means_what_it_says() -> None:
    assert parse_op("B12.7") == Compute(kind="backward", layer=12, index=7)
    assert parse_op("F3.0+") == Compute(kind="forward", layer=3, index=0, keep_graph=True)
    assert parse_op("x/weight disk>ram") == Transfer(block="x/weight", source="disk", target="ram")
    assert parse_op("free x/weight@ram") == Release(block="x/weight", tier="ram")


@pytest.mark.parametrize("text", ["", "F3", "G3.0", "F3.0-", "x disk>", "free x", "x disk->ram"])
def test_other_text_is_no_step(text: str) -> None:
    with pytest.raises(ValueError, match="not a step"):
        parse_op(text)


def test_json_goes_both_ways_and_digest_is_stable() -> None:
    workload = chain(3, 2)
    where = machine(500 * KIB, 1 << 24)
    choice = choose(workload, where, costs(workload), clipping=True)
    plan = plan_pass(workload, where, choice, "steady")
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest == plan_pass(workload, where, choice, "steady").digest
    assert plan.digest != plan_pass(workload, where, choice, "first").digest
