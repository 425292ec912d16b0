"""Each fault that `check` must find, made by hand in a plan that is right before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from overspill.swap_scheduler import (
    Access,
    Block,
    Compute,
    Machine,
    Plan,
    PlanError,
    Slot,
    Step,
    Tier,
    Transfer,
    check,
)

PAGE = 4096


def right() -> Plan:
    """x and y live on disk and visit one page of ram, one after the other; F1.0 keeps its graph until B1.0."""
    reads = {name: (Access(block=name, tier="ram", mode="read"),) for name in "xy"}
    change = (Access(block="x", tier="ram", mode="update"),)
    return Plan(
        machine=Machine(
            tiers=(Tier(name="ram", capacity_bytes=PAGE), Tier(name="disk", capacity_bytes=2 * PAGE)),
            update_tier="ram",
            graph_tier=Tier(name="graph", capacity_bytes=0),
            shared_lane=True,
        ),
        blocks=tuple(Block(name=name, role="weight", size_bytes=PAGE, home="disk") for name in "xy"),
        steps=(
            Step(op=Transfer(block="x", source="disk", target="ram"), lane="disk>ram"),
            Step(op=Compute(kind="update", layer=0, index=0, accesses=change), lane="compute", after=(0,)),
            Step(op=Transfer(block="x", source="ram", target="disk"), lane="ram>disk", after=(0, 1)),
            Step(op=Transfer(block="y", source="disk", target="ram"), lane="disk>ram", after=(1, 2)),
            Step(
                op=Compute(kind="forward", layer=1, index=0, keep_graph=True, accesses=reads["y"]),
                lane="compute",
                after=(3,),
            ),
            Step(op=Compute(kind="backward", layer=1, index=0, accesses=reads["y"]), lane="compute", after=(3,)),
        ),
        slots=(
            Slot(block="x", tier="disk", offset_bytes=0, first=-1, last=6),
            Slot(block="y", tier="disk", offset_bytes=PAGE, first=-1, last=6),
            Slot(block="x", tier="ram", offset_bytes=0, first=0, last=2),
            Slot(block="y", tier="ram", offset_bytes=0, first=3, last=5),
        ),
        entry=("x", "y"),
        exit=("x", "y"),
    )


def slot(plan: Plan, index: int, **change: int) -> Plan:
    slots = list(plan.slots)
    slots[index] = replace(slots[index], **change)
    return replace(plan, slots=tuple(slots))


def after(plan: Plan, index: int, *steps: int) -> Plan:
    changed = list(plan.steps)
    changed[index] = replace(changed[index], after=steps)
    return replace(plan, steps=tuple(changed))


def reread(plan: Plan) -> Plan:
    """y leaves and comes back between F1.0+ and B1.0."""
    back = replace(plan.steps[3], after=(4,))
    slots = (
        *(replace(s, last=7) for s in plan.slots[:2]),
        plan.slots[2],
        replace(plan.slots[3], last=4),
        replace(plan.slots[3], first=5, last=6),
    )
    last = replace(plan.steps[5], after=(5,))
    return replace(plan, steps=(*plan.steps[:5], back, last), slots=slots)


def stale(plan: Plan) -> Plan:
    """x is read from ram before anything was copied there."""
    reads = (Access(block="x", tier="ram", mode="read"),)
    changed = list(plan.steps)
    changed[0] = Step(op=Compute(kind="forward", layer=0, index=0, accesses=reads), lane="compute")
    return replace(plan, steps=tuple(changed))


FAULTS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "no slot": (lambda p: replace(p, slots=p.slots[:3]), "y has no slot in ram"),
    "slot too short": (lambda p: slot(p, 2, last=1), "x has no slot in ram"),
    "outside the tier": (lambda p: slot(p, 3, offset_bytes=PAGE), "the slot of y lies outside ram"),
    "below zero": (lambda p: slot(p, 3, offset_bytes=-PAGE), "the slot of y lies outside ram"),
    "over a live copy": (lambda p: slot(p, 2, last=4), "y and x lie on the same bytes of ram"),
    "over a home": (lambda p: slot(p, 1, offset_bytes=0), "the homes of x and y overlap"),
    "twice": (lambda p: replace(p, slots=(*p.slots, replace(p.slots[2], first=1))), "x has two slots in ram at once"),
    "not fetched": (stale, "x in ram is not up to date"),
    "not home": (lambda p: replace(p, steps=p.steps[:2], slots=p.slots[:3]), "x is not up to date at home"),
    "read too early": (lambda p: after(p, 1), "U0.0 reads before it is written"),
    "sent too early": (lambda p: after(p, 2, 0), "x ram>disk reads before it is written"),
    "bytes taken too early": (lambda p: after(p, 3, 1), "takes the bytes of x while they are in use"),
    "graph left alone": (reread, "y moved while a kept graph points at it"),
    "waits for the future": (lambda p: after(p, 1, 4), "waits for step 4, which is not before it"),
}


def test_the_plan_is_right_before() -> None:
    check(right())


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_and_shown(fault: str) -> None:
    change, message = FAULTS[fault]
    with pytest.raises(PlanError) as error:
        check(change(right()))
    assert message in str(error.value).splitlines()[0]
    assert sum(line.startswith("->") for line in str(error.value).splitlines()) == 1


def test_order_may_come_through_other_lanes() -> None:
    """U0.0 waits for the fetch of x; whoever waits for U0.0 need not name the fetch."""
    check(after(right(), 2, 1))


def test_the_story_of_the_block_is_told() -> None:
    with pytest.raises(PlanError, match=r"story of x: 0 x disk>ram, 1 U0\.0, 2 x ram>disk"):
        check(after(right(), 2, 0))
