"""Seconds to plan, check and simulate a large workload: 80 layers, 8 microbatches, three tiers.

    python benchmarks/plan_speed.py --json benchmarks/results/plan_speed.json

`choose` tries its candidates and plans every pass; `plan` makes the steady pass once more under the choice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overspill.swap_scheduler import (
    Costs,
    Group,
    Layer,
    Link,
    Machine,
    Tier,
    Workload,
    check,
    choose,
    plan_pass,
    simulate,
)

GIB, MIB = 1 << 30, 1 << 20
LAYERS, MICROBATCHES, PARTS = 80, 8, 4


def workload() -> Workload:
    names = ["embed", *(f"layer.{i}" for i in range(LAYERS)), "head"]
    layers = tuple(Layer(name=name, weights=(name,), input_bytes=2 * MIB, saved_bytes=40 * MIB) for name in names)
    groups = tuple(
        Group(name=name, weight_bytes=400 * MIB, grad_bytes=400 * MIB, optim_bytes=(500 * MIB,) * PARTS)
        for name in names
    )
    return Workload(layers=layers, groups=groups, microbatches=MICROBATCHES)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    work = workload()
    tiers = tuple(
        Tier(name=n, capacity_bytes=c) for n, c in (("gpu", 20 * GIB), ("ram", 64 * GIB), ("disk", 1024 * GIB))
    )
    graph = Tier(name="graph", capacity_bytes=80 * MIB)
    machine = Machine(tiers=tiers, update_tier="ram", graph_tier=graph, shared_lane=False)
    count = len(work.layers)
    links = {"disk>ram": 3e9, "ram>disk": 6e9, "ram>gpu": 2e10, "gpu>ram": 2e10}
    costs = Costs(
        links={name: Link(bandwidth_bytes_per_s=rate) for name, rate in links.items()},
        forward_s=(0.035,) * count, backward_s=(0.07,) * count, update_s=((0.02,) * PARTS,) * count,
    )  # fmt: skip
    rows = []
    for _ in range(5):
        choose_s, choice = timed(lambda: choose(work, machine, costs, clipping=True))
        plan_s, plan = timed(lambda c=choice: plan_pass(work, machine, c, "steady"))
        check_s, _ = timed(lambda p=plan: check(p))
        simulate_s, _ = timed(lambda p=plan: simulate(p, costs))
        rows.append({"choose_s": choose_s, "plan_s": plan_s, "check_s": check_s, "simulate_s": simulate_s})
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "command": "python benchmarks/plan_speed.py", "commit": commit.stdout.strip(), "cores": os.cpu_count(),
        "steps": len(plan.steps), "medians": medians, "rows": rows,
    }  # fmt: skip
    print({key: round(value, 3) for key, value in medians.items()}, len(plan.steps), "steps")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
