"""Choose homes, prefetch depth and kept graphs for a job: try a handful, score each with the simulator, keep the best.

The choice holds for every pass of the job and any number of microbatches, so homes never move.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from .hazards import add_dependencies
from .order import Pass, order
from .plan import ALIGNMENT_BYTES, Machine, Plan, Tier, aligned
from .residency import Infeasible, residency
from .simulate import simulate
from .workload import Costs, Group, Workload, grad_block, optim_block, weight_block

LOOKAHEADS = (2, 4, 1, 8, 0)
GOOD_ENOUGH = 1.02
_SCALES = (0.0, 0.5, *(1.0 + 0.4 * i for i in range(8)), math.inf)
_LARGE_STEPS = 2000
# By `clipping`; the main pass, which is scored, comes first.
_PASSES: dict[bool, tuple[Pass, ...]] = {True: ("steady", "first", "flush", "evaluate"), False: ("fused", "evaluate")}


class BudgetError(ValueError):
    """No plan fits the budgets: `tier` needs `need_bytes` and has `have_bytes`."""

    def __init__(self, tier: str, need_bytes: int, have_bytes: int, advice: str) -> None:
        self.tier, self.need_bytes, self.have_bytes, self.advice = tier, need_bytes, have_bytes, advice
        missing = need_bytes - have_bytes
        super().__init__(
            f"the {tier} budget is too small: {show_bytes(need_bytes)} are needed ({need_bytes} bytes), "
            f"{show_bytes(have_bytes)} are there, {show_bytes(missing)} ({missing} bytes) are missing; {advice}"
        )


def show_bytes(size_bytes: int) -> str:
    """Binary units, as budgets are written in a config."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a job's plans have in common. `homes`: tier of every persistent block."""

    homes: Mapping[str, str]
    lookahead: int
    tail: int
    kept: frozenset[int]


def plan_pass(workload: Workload, machine: Machine, choice: Choice, name: Pass) -> Plan:
    """The plan of one pass under a choice made for this job. Raises Infeasible when the workload is not that job's."""
    return add_dependencies(_place(workload, machine, choice, name))


def _place(workload: Workload, machine: Machine, choice: Choice, name: Pass) -> Plan:
    made = order(workload, machine, choice.homes, name, tail=choice.tail, kept=choice.kept)
    return residency(made, machine, lookahead=choice.lookahead)


def choose(workload: Workload, machine: Machine, costs: Costs, *, clipping: bool) -> Choice:
    """The fastest of a handful of valid plans for `workload`. `clipping`: gradients wait at home for their norm.

    Raises BudgetError naming the tier and the missing bytes when nothing fits.
    """
    try:
        return _choose(workload, machine, costs, clipping)
    except Infeasible as error:
        need = _smallest(workload, machine, clipping, error)
        advice = f"raise memory.{error.tier}"
        if error.tier == machine.tiers[-1].name and error.tier != "disk":
            advice += " or add memory.disk"
        elif error.tier != machine.tiers[-1].name:
            advice += ", shorten data.max_length or lower the batch size"
        raise BudgetError(error.tier, need, error.have_bytes, advice) from error


def _smallest(workload: Workload, machine: Machine, clipping: bool, error: Infeasible) -> int:
    """The smallest capacity of the failing tier that works without prefetch, to 1/64, other tiers as given.

    Only whole slots are tried and what is returned has been tried: one page more than a capacity that works may not
    work, since homes and addresses fall differently.
    """

    roomy = machine
    if error.tier != machine.graph_tier.name:
        # Too small as it may be too, what it needs depends on no other tier.
        roomy = replace(machine, graph_tier=replace(machine.graph_tier, capacity_bytes=1 << 62))

    def fits(capacity: int) -> bool:
        try:
            _fit(workload, _with_capacity(roomy, error.tier, capacity), 0, 1, frozenset(), clipping, _SCALES[::-1])
        except Infeasible as other:
            # Another tier is the next bottleneck: this one is large enough.
            return other.tier != error.tier
        return True

    high = aligned(max(error.need_bytes, ALIGNMENT_BYTES))
    while not fits(high):
        high *= 2
    low = error.have_bytes
    while high - low > max(2 * ALIGNMENT_BYTES, high // 64):
        middle = aligned((low + high) // 2)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _with_capacity(machine: Machine, tier: str, capacity_bytes: int) -> Machine:
    def change(old: Tier) -> Tier:
        return replace(old, capacity_bytes=capacity_bytes) if old.name == tier else old

    return replace(machine, tiers=tuple(map(change, machine.tiers)), graph_tier=change(machine.graph_tier))


def _choose(workload: Workload, machine: Machine, costs: Costs, clipping: bool) -> Choice:
    best: Choice | None = None
    best_key = (math.inf, math.inf)
    failure: Infeasible | None = None
    for lookahead, tail, kept in _candidates(workload, machine):
        try:
            choice, plan = _fit(workload, machine, lookahead, tail, kept, clipping)
        except Infeasible as error:
            failure = failure or error
            if failure.tier == machine.graph_tier.name:
                failure = error
            continue
        trace = simulate(plan, costs)
        key = (trace.total_s, float(sum(plan.moved_bytes().values())))
        if key < best_key:
            best, best_key = choice, key
        if trace.total_s <= GOOD_ENOUGH * max(trace.busy_s().values()) or len(plan.steps) > _LARGE_STEPS:
            break
    if best is None:
        assert failure is not None
        raise failure
    return best


def _candidates(workload: Workload, machine: Machine) -> Iterator[tuple[int, int, frozenset[int]]]:
    graphs = sum(aligned(layer.saved_bytes) for layer in workload.layers) * workload.microbatches
    every = frozenset(range(len(workload.layers)))
    keep_all = graphs <= machine.graph_tier.capacity_bytes
    for lookahead in LOOKAHEADS:
        for tail in (2, 1):
            if keep_all:
                yield lookahead, tail, every
    for lookahead in LOOKAHEADS:
        for tail in (2, 1):
            yield lookahead, tail, frozenset()


def _fit(
    workload: Workload,
    machine: Machine,
    lookahead: int,
    tail: int,
    kept: frozenset[int],
    clipping: bool,
    scales: Iterable[float] = _SCALES,
) -> tuple[Choice, Plan]:
    """The first of `scales` under which every pass of the job fits, and the plan of its main pass. By default:
    everything in the fastest tier if that works; else as many homes in the fast tiers as their floating part can
    spare, fewer on each try that does not fit. Raises the Infeasible of the fewest homes.
    """
    spare = _window_bytes(workload, machine, lookahead)
    homes: dict[str, str] = {}
    failures: dict[float, Infeasible] = {}
    for scale in scales:
        tried, homes = homes, _homes(workload, machine, spare, scale, clipping)
        if failures and homes == tried:
            continue  # the same plan would fail the same way
        choice = Choice(homes=homes, lookahead=lookahead, tail=tail, kept=kept)
        try:
            main, *_ = [_place(workload, machine, choice, name) for name in _PASSES[clipping]]
            return choice, add_dependencies(main)
        except Infeasible as error:
            failures[scale] = error
            if error.tier == machine.graph_tier.name:
                raise
    raise failures[max(failures)]


def _window_bytes(workload: Workload, machine: Machine, lookahead: int) -> dict[str, int]:
    """What the floating part of each tier should hold so that `lookahead` visits can be fetched ahead: an estimate."""
    groups = {group.name: group for group in workload.groups}
    moving = [group for group in workload.groups if not group.resident]
    visit = max(
        (
            sum(aligned(groups[g].weight_bytes) + aligned(groups[g].grad_bytes) for g in layer.weights)
            + sum(aligned(groups[g].weight_bytes) for g in layer.frozen)
            + aligned(layer.input_bytes) * workload.microbatches
            for layer in workload.layers
        ),
        default=0,
    )
    part = max((aligned(size) for group in moving for size in group.optim_bytes), default=0)
    state = max((aligned(g.weight_bytes) + aligned(g.grad_bytes) for g in moving), default=0)
    inputs = sum(aligned(layer.input_bytes) for layer in workload.layers) * workload.microbatches
    spare = {tier.name: 0 for tier in machine.tiers}
    spare[machine.compute_tier] = visit * (lookahead + 1)
    spare[machine.update_tier] += part * (lookahead + 1) + state
    if len(machine.tiers) > 2:
        for tier in machine.tiers[1:-1]:
            spare[tier.name] += visit * (lookahead + 1)
    spare[machine.tiers[-1].name] += inputs
    return spare


@dataclass(frozen=True, slots=True)
class _Item:
    """Blocks that get one home. `density`: bytes of traffic that a home in the fast tier saves, per byte and step."""

    blocks: tuple[str, ...]
    size_bytes: int
    density: int


def _homes(
    workload: Workload, machine: Machine, spare: Mapping[str, int], scale: float, clipping: bool
) -> dict[str, str]:
    """Fill tiers fastest first with what saves the most traffic per byte, leaving `scale * spare` floating in each.
    Where updates run in another tier than the compute tier, a trainable group lives in the latter whole or not at all.
    """
    homes: dict[str, str] = {}
    for group in workload.groups:
        if group.resident:
            homes |= {block: machine.compute_tier for item in _items(group, clipping) for block in item.blocks}
    moving = [group for group in workload.groups if not group.resident]
    apart = machine.compute_tier != machine.update_tier
    resident = sum(item.size_bytes for g in workload.groups if g.resident for item in _items(g, clipping))
    for tier in machine.tiers:
        if tier is machine.tiers[-1]:
            left = math.inf
        elif math.isinf(scale):
            left = 0.0
        else:
            left = tier.capacity_bytes - scale * spare[tier.name]
        if tier is machine.tiers[0]:
            left -= resident
        items = [item for group in moving for item in _items(group, clipping)]
        if tier is machine.tiers[0] and apart:
            items = [_whole(group, clipping) for group in moving]
        for item in sorted(items, key=lambda item: -item.density):
            if item.blocks[0] not in homes and item.size_bytes <= left:
                homes |= dict.fromkeys(item.blocks, tier.name)
                left -= item.size_bytes
    return homes


def _items(group: Group, clipping: bool) -> list[_Item]:
    weight = _Item((weight_block(group.name),), aligned(group.weight_bytes), 3 if group.trainable else 2)
    if not group.trainable:
        return [weight]
    parts = [_Item((optim_block(group.name, i),), aligned(size), 2) for i, size in enumerate(group.optim_bytes)]
    grad = [_Item((grad_block(group.name),), aligned(group.grad_bytes), 2)] if clipping else []
    return [weight, *grad, *parts]


def _whole(group: Group, clipping: bool) -> _Item:
    items = _items(group, clipping)
    return _Item(tuple(b for item in items for b in item.blocks), sum(item.size_bytes for item in items), 2)
