"""Prove that a plan is right, without trusting the passes that made it.

Replays the steps with versions of every block and with vector clocks over the lanes: a conflicting pair of steps must
be ordered by lanes and `after` alone, since that is all that the executor respects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from .hazards import uses
from .plan import Compute, Plan, Slot, aligned


class PlanError(ValueError):
    """The plan is wrong; the message shows the steps around the fault and the story of the block."""


@dataclass(slots=True, eq=False)
class _Copy:
    """Content of a slot: which version of the block, who wrote it, who has read it since."""

    slot: Slot
    version: int = -1
    writer: int = -1
    readers: list[int] = field(default_factory=list)
    users: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Past:
    start: int
    end: int
    copy: _Copy


def check(plan: Plan) -> None:
    """Raises PlanError at the first of: a read of what is not there or not up to date, two copies on the same bytes, a
    slot outside its tier, a pair of conflicting steps without order, a kept graph whose weights moved, a block that is
    not home at the end.
    """
    _Checker(plan).run()


class _Checker:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sizes = {block.name: aligned(block.size_bytes) for block in plan.blocks}
        self._roles = {block.name: block.role for block in plan.blocks}
        self._lanes = {lane: k for k, lane in enumerate(plan.lanes)}
        self._clocks: list[tuple[int, ...]] = []
        self._versions = {block.name: 0 for block in plan.blocks}
        self._copies: dict[tuple[str, str], _Copy] = {}
        self._past: dict[str, list[_Past]] = {}
        self._held: dict[tuple[str, int, int], _Copy] = {}

    def run(self) -> None:
        plan = self._plan
        self._order_lanes()
        opening: dict[int, list[Slot]] = {}
        closing: dict[int, list[Slot]] = {}
        for slot in plan.slots:
            self._inside(slot)
            opening.setdefault(slot.first, []).append(slot)
            closing.setdefault(slot.last, []).append(slot)
        self._open_homes(opening.pop(-1, []))
        for index, step in enumerate(plan.steps):
            for slot in opening.get(index, ()):
                self._open(slot, index)
            if isinstance(step.op, Compute):
                self._graphs(step.op, index)
            for block, tier, reads, writes in uses(step):
                self._use(index, block, tier, reads, writes)
            for slot in closing.get(index, ()):
                copy = self._copies.pop((slot.block, slot.tier))
                end = slot.offset_bytes + self._sizes[slot.block]
                self._past.setdefault(slot.tier, []).append(_Past(slot.offset_bytes, end, copy))
        homes = {block.name: block.home for block in plan.blocks}
        for name in plan.exit:
            home = homes[name]
            at_home = self._copies.get((name, home)) if home else None
            if at_home is None or at_home.version != self._versions[name]:
                raise self._fault(len(plan.steps) - 1, name, f"{name} is not up to date at home at the end")

    def _order_lanes(self) -> None:
        """clock[k] of a step: the latest step of lane k that surely ran before it (or is it)."""
        last: dict[str, tuple[int, ...]] = {}
        empty = (-1,) * len(self._lanes)
        for index, step in enumerate(self._plan.steps):
            clock = list(last.get(step.lane, empty)) if step.lane else list(empty)
            for other in step.after:
                if not 0 <= other < index:
                    raise self._fault(index, "", f"step {index} waits for step {other}, which is not before it")
                clock = [max(pair) for pair in zip(clock, self._clocks[other], strict=True)]
            if step.lane:
                clock[self._lanes[step.lane]] = index
                last[step.lane] = tuple(clock)
            self._clocks.append(tuple(clock))

    def _before(self, first: int, second: int) -> bool:
        lane = self._lanes[self._plan.steps[first].lane]
        return self._clocks[second][lane] >= first

    def _inside(self, slot: Slot) -> None:
        capacity = self._plan.machine.tier(slot.tier).capacity_bytes
        if slot.offset_bytes < 0 or slot.offset_bytes + self._sizes[slot.block] > capacity:
            raise self._fault(max(slot.first, 0), slot.block, f"the slot of {slot.block} lies outside {slot.tier}")

    def _open_homes(self, slots: list[Slot]) -> None:
        ends: dict[str, list[tuple[int, int, str]]] = {}
        for slot in slots:
            end = slot.offset_bytes + self._sizes[slot.block]
            ends.setdefault(slot.tier, []).append((slot.offset_bytes, end, slot.block))
            copy = self._copies[slot.block, slot.tier] = _Copy(slot)
            if slot.block in self._plan.entry:
                copy.version = 0
            self._past.setdefault(slot.tier, []).append(_Past(slot.offset_bytes, end, copy))
        for runs in ends.values():
            runs.sort()
            for (_, end, block), (start, _, other) in pairwise(runs):
                if start < end:
                    raise self._fault(0, other, f"the homes of {block} and {other} overlap")

    def _open(self, slot: Slot, index: int) -> None:
        key = slot.block, slot.tier
        if key in self._copies:
            raise self._fault(index, slot.block, f"{slot.block} has two slots in {slot.tier} at once")
        self._copies[key] = _Copy(slot)
        start, end = slot.offset_bytes, slot.offset_bytes + self._sizes[slot.block]
        for (block, tier), copy in self._copies.items():
            if tier == slot.tier and block != slot.block:
                other = copy.slot.offset_bytes
                if start < other + self._sizes[block] and other < end:
                    raise self._fault(index, slot.block, f"{slot.block} and {block} lie on the same bytes of {tier}")

    def _use(self, index: int, block: str, tier: str, reads: bool, writes: bool) -> None:
        copy = self._copies.get((block, tier))
        if copy is None:
            raise self._fault(index, block, f"{block} has no slot in {tier}")
        if not copy.users and copy.slot.first >= 0:
            self._take_over(index, copy)
        if reads:
            if copy.version != self._versions[block]:
                raise self._fault(index, block, f"{block} in {tier} is not up to date")
            self._ordered(copy.writer, index, block, "reads before it is written")
        if writes:
            self._ordered(copy.writer, index, block, "writes before an earlier write is done")
            for reader in copy.readers:
                self._ordered(reader, index, block, "writes before an earlier read is done")
            if isinstance(self._plan.steps[index].op, Compute):
                self._versions[block] += 1
            copy.version, copy.writer, copy.readers = self._versions[block], index, []
        if reads:
            copy.readers.append(index)
        copy.users.append(index)

    def _take_over(self, index: int, copy: _Copy) -> None:
        """The first use of a new copy comes after every use of what lay on its bytes; it stands for them from here."""
        slot = copy.slot
        start, end = slot.offset_bytes, slot.offset_bytes + self._sizes[slot.block]
        left: list[_Past] = []
        for old in self._past.get(slot.tier, []):
            if old.end <= start or end <= old.start:
                left.append(old)
                continue
            for user in old.copy.users:
                self._ordered(
                    user, index, slot.block, f"takes the bytes of {old.copy.slot.block} while they are in use"
                )
            if old.start < start:
                left.append(_Past(old.start, start, old.copy))
            if end < old.end:
                left.append(_Past(end, old.end, old.copy))
        self._past[slot.tier] = left

    def _ordered(self, first: int, second: int, block: str, what: str) -> None:
        if first >= 0 and first != second and not self._before(first, second):
            raise self._fault(second, block, f"{self._plan.steps[second].op} {what} ({self._plan.steps[first].op})")

    def _graphs(self, op: Compute, index: int) -> None:
        for access in op.accesses:
            if self._roles[access.block] not in ("weight", "frozen"):
                continue
            key = access.block, op.layer, op.index
            copy = self._copies.get((access.block, access.tier))
            if op.kind == "forward" and op.keep_graph and copy is not None:
                self._held[key] = copy
            elif op.kind == "backward" and self._held.pop(key, copy) is not copy:
                raise self._fault(index, access.block, f"{access.block} moved while a kept graph points at it")

    def _fault(self, index: int, block: str, message: str) -> PlanError:
        steps = self._plan.steps
        lines = [message]
        for i in range(max(0, index - 4), min(len(steps), index + 3)):
            arrow = "->" if i == index else "  "
            lines.append(f"{arrow} {i:5} {steps[i].lane:10} {steps[i].op}   after {list(steps[i].after)}")
        story = [i for i, step in enumerate(steps) if any(use[0] == block for use in uses(step))]
        if story:
            lines.append(f"story of {block}: " + ", ".join(f"{i} {steps[i].op}" for i in story[:40]))
        return PlanError("\n".join(lines))
