from __future__ import annotations

from typing import Any

import pytest
from support.workloads import KIB, chain, machine

from overspill.swap_scheduler import Compute, Group, Layer, Machine, Order, Workload, order
from overspill.swap_scheduler.workload import persistent_blocks

FAST = machine(1 << 20, 1 << 24)
APART = machine(1 << 20, 1 << 24, 1 << 26, shared=False)


def made(
    workload: Workload, name: Any, *, where: Machine = FAST, home: str = "disk", tail: int = 1, **more: Any
) -> Order:
    blocks = [b for b in persistent_blocks(workload) if name != "fused" or b.role != "grad"]
    resident = {group.name for group in workload.groups if group.resident}
    homes = {b.name: where.compute_tier if b.name.split("/")[0] in resident else home for b in blocks}
    return order(workload, where, homes, name, tail=tail, kept=more.get("kept", frozenset()))


def text(order_: Order) -> str:
    return " ".join(map(str, order_.computes))


def modes(compute: Compute) -> dict[str, str]:
    return {access.block: f"{access.mode}@{access.tier}" for access in compute.accesses}


@pytest.mark.parametrize(
    "name, tail, expected",
    [
        ("first", 1, "F0.0 F0.1 F1.0 F1.1 F2.0+ B2.0 F2.1+ B2.1 B1.0 B1.1 B0.0 B0.1"),
        ("first", 2, "F0.0 F0.1 F1.0+ F2.0+ B2.0 B1.0 F1.1+ F2.1+ B2.1 B1.1 B0.0 B0.1"),
        ("first", 9, "F0.0+ F1.0+ F2.0+ B2.0 B1.0 B0.0 F0.1+ F1.1+ F2.1+ B2.1 B1.1 B0.1"),
        ("steady", 1, "U0.0 F0.0 F0.1 U1.0 F1.0 F1.1 U2.0 F2.0+ B2.0 F2.1+ B2.1 B1.0 B1.1 B0.0 B0.1"),
        ("fused", 1, "F0.0 F0.1 F1.0 F1.1 F2.0+ B2.0 F2.1+ B2.1 U2.0 B1.0 B1.1 U1.0 B0.0 B0.1 U0.0"),
        ("flush", 1, "U0.0 U1.0 U2.0"),
        ("evaluate", 1, "F0.0 F0.1 F1.0 F1.1 F2.0 F2.1"),
    ],
)
def test_passes_run_layer_by_layer_and_microbatches_in_order(name: str, tail: int, expected: str) -> None:
    assert text(made(chain(1, 2, parts=1, resident=False), name, tail=tail)) == expected


def test_a_kept_layer_writes_its_graph_and_any_other_its_input() -> None:
    by_text = {str(c): modes(c) for c in made(chain(2, 1, resident=False), "first", kept=frozenset({1})).computes}
    assert by_text["F1.0+"] == {"layer.0/weight": "read@ram", "layer.0/saved.0": "write@graph"}
    assert by_text["F2.0"] == {"layer.1/weight": "read@ram", "layer.1/input.0": "write@ram"}
    assert by_text["B2.0"] == {"layer.1/weight": "read@ram", "layer.1/input.0": "read@ram", "layer.1/grad": "write@ram"}


def test_the_first_backward_writes_a_gradient_and_the_others_add_to_it() -> None:
    """Tied: the head's backward comes first, so the embedding's own finds a gradient to add to."""
    computes = made(chain(1, 2, tied=True, resident=False), "first").computes
    assert [modes(c).get("embed/grad") for c in computes if c.kind == "backward"] == [
        "write@ram", "update@ram", None, None, "update@ram", "update@ram",
    ]  # fmt: skip


def test_a_tied_group_updates_before_its_first_use_and_after_its_last() -> None:
    tied = chain(1, 1, tied=True, parts=2, resident=False)
    assert text(made(tied, "steady")) == "U0.0 U0.1 F0.0 U1.0 U1.1 F1.0 F2.0+ B2.0 B1.0 B0.0"
    assert text(made(tied, "fused")) == "F0.0 F1.0 F2.0+ B2.0 B1.0 U1.0 U1.1 B0.0 U0.0 U0.1"


def test_a_resident_group_is_used_by_every_layer() -> None:
    steady = made(chain(1, 1, parts=1), "steady").computes
    assert [str(c) for c in steady[:3]] == ["U1.0", "U0.0", "F0.0"]
    assert set(modes(steady[1]).values()) == {"read@ram", "update@ram"}
    layers = [c for c in steady if c.kind != "update"]
    assert all(modes(c)["rest/weight"] == "read@ram" for c in layers)
    assert [modes(c)["rest/grad"] for c in layers if c.kind == "backward"] == ["write@ram", "update@ram", "update@ram"]
    assert text(made(chain(1, 1, parts=1), "fused")).endswith("B0.0 U1.0 U0.0")


@pytest.mark.parametrize("home, tier", [("gpu", "gpu"), ("ram", "ram"), ("disk", "ram")])
def test_updates_run_where_the_states_live_or_in_the_update_tier(home: str, tier: str) -> None:
    updates = made(chain(1, 1, resident=False), "flush", where=APART, home=home).computes
    assert {access.tier for c in updates for access in c.accesses} == {tier}


def test_frozen_groups_have_no_gradient_and_no_update() -> None:
    made_ = made(chain(2, 1, frozen=frozenset({1, 2}), resident=False), "steady")
    touched = {access.block for c in made_.computes for access in c.accesses}
    assert {"layer.0/weight", "layer.1/weight"} < touched
    assert not {b for b in touched if b.startswith("layer") and not b.endswith(("weight", "input.0"))}
    assert {modes(c).get("layer.0/weight", "read@ram") for c in made_.computes} == {"read@ram"}


@pytest.mark.parametrize(
    "name, grads_enter, grads_leave",
    [("first", False, True), ("steady", True, True), ("flush", True, False), ("evaluate", False, False),
     ("fused", False, False)],
)  # fmt: skip
def test_gradients_enter_and_leave_with_the_passes_that_hold_them(
    name: str, grads_enter: bool, grads_leave: bool
) -> None:
    made_ = made(chain(2, 1), name)
    grads = {b.name for b in made_.blocks if b.role == "grad"}
    rest = {b.name for b in made_.blocks if b.role in ("weight", "frozen", "optim")}
    assert set(made_.entry) == rest | (grads if grads_enter else set())
    assert set(made_.exit) == rest | (grads if grads_leave else set())


def test_a_layer_without_boundary_or_graph_has_no_such_block() -> None:
    bare = Workload(
        layers=(Layer(name="a", weights=("g",)), Layer(name="b", weights=("g",))),
        groups=(Group(name="g", weight_bytes=KIB, grad_bytes=KIB, optim_bytes=(KIB,)),),
        microbatches=2,
    )
    made_ = made(bare, "first", kept=frozenset({0, 1}))
    assert {b.role for b in made_.blocks} == {"weight", "grad", "optim"}
    assert "+" not in text(made_)
