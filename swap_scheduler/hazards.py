"""Dependencies between steps, derived from what each step reads and writes. Nobody writes them by hand.

A step waits for: the last write of a copy it reads (raw), the reads of a copy it overwrites (war, and the write before
them), and, at the first write of a new copy, for every use of older copies whose bytes it takes (reuse). Steps of one
lane run in order, so only the latest step of every other lane is named.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .plan import Compute, Plan, Slot, Step, Transfer, aligned


@dataclass(slots=True)
class _State:
    """Who used a copy: the last writer, and since then the last reader in each lane."""

    writer: int | None = None
    readers: dict[str, int] = field(default_factory=dict)
    users: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Past:
    start: int
    end: int
    users: dict[str, int]


def uses(step: Step) -> list[tuple[str, str, bool, bool]]:
    """(block, tier, reads, writes) of a step."""
    op = step.op
    if isinstance(op, Compute):
        return [(a.block, a.tier, a.mode != "write", a.mode != "read") for a in op.accesses]
    if isinstance(op, Transfer):
        return [(op.block, op.source, True, False), (op.block, op.target, False, True)]
    return []


def add_dependencies(plan: Plan, *, skip: frozenset[str] = frozenset()) -> Plan:
    """The plan with `Step.after` filled in. `skip` leaves kinds of edges out, to show in tests what they are for."""
    sizes = {block.name: aligned(block.size_bytes) for block in plan.blocks}
    starts: dict[int, list[Slot]] = {}
    states: dict[tuple[str, str], _State] = {}
    fresh: dict[tuple[str, str], Slot] = {}
    past: dict[str, list[_Past]] = {}
    for slot in plan.slots:
        if slot.first >= 0:
            starts.setdefault(slot.first, []).append(slot)
    closing: dict[int, list[Slot]] = {}
    for slot in plan.slots:
        if slot.first >= 0:
            closing.setdefault(slot.last, []).append(slot)

    def take_over(slot: Slot) -> dict[str, int]:
        """The users of older copies under the new one; the new one stands for them from now on."""
        start, end = slot.offset_bytes, slot.offset_bytes + sizes[slot.block]
        waits: dict[str, int] = {}
        left: list[_Past] = []
        for old in past.get(slot.tier, []):
            if old.end <= start or end <= old.start:
                left.append(old)
                continue
            _merge(waits, old.users)
            if old.start < start:
                left.append(_Past(old.start, start, old.users))
            if end < old.end:
                left.append(_Past(end, old.end, old.users))
        past[slot.tier] = left
        return waits

    steps: list[Step] = []
    for index, step in enumerate(plan.steps):
        for slot in starts.get(index, ()):
            states[slot.block, slot.tier] = _State()
            fresh[slot.block, slot.tier] = slot
        waits: dict[str, int] = {}
        for block, tier, reads, writes in uses(step):
            state = states.setdefault((block, tier), _State())
            if writes and (slot_ := fresh.pop((block, tier), None)) is not None:
                older = take_over(slot_)
                if "reuse" not in skip:
                    _merge(waits, older)
            if reads and state.writer is not None and "raw" not in skip:
                _merge(waits, {plan.steps[state.writer].lane: state.writer})
            if writes and "war" not in skip:
                _merge(waits, state.readers)
            if writes and state.writer is not None and "raw" not in skip:
                _merge(waits, {plan.steps[state.writer].lane: state.writer})
        for block, tier, reads, writes in uses(step):
            state = states[block, tier]
            if writes:
                state.writer, state.readers = index, {}
            if reads:
                state.readers[step.lane] = index
            state.users[step.lane] = index
        waits.pop(step.lane, None)
        steps.append(replace(step, after=tuple(sorted(waits.values()))))
        for slot in closing.get(index, ()):
            state = states.pop((slot.block, slot.tier))
            fresh.pop((slot.block, slot.tier), None)
            if state.users:
                end = slot.offset_bytes + sizes[slot.block]
                past.setdefault(slot.tier, []).append(_Past(slot.offset_bytes, end, state.users))
    return replace(plan, steps=tuple(steps))


def _merge(into: dict[str, int], other: dict[str, int]) -> None:
    for lane, index in other.items():
        into[lane] = max(into.get(lane, -1), index)
