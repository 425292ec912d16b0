"""One pass over the computes that inserts transfers and releases and gives every copy its offset.

Home copies lie from offset 0 up, in the order of the blocks, the same in every plan of a job; the rest of a tier
floats. A block that is needed is fetched hop by hop from the nearest tier that has it up to date. Room is made by
evicting the copy whose next use is furthest away, then the next, until a hole fits; only what overlaps the hole really
goes. Doing eviction by counting bytes and offsets later fails on fragmentation.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop

from .order import Order
from .plan import COMPUTE_LANE, Access, Block, Compute, Machine, Op, Plan, Release, Slot, Step, Transfer, aligned
from .region import Copy, Region


class Infeasible(Exception):
    """`tier` cannot hold what one compute needs at once: `need_bytes` of `have_bytes`, homes included."""

    def __init__(self, tier: str, need_bytes: int, have_bytes: int, what: str) -> None:
        super().__init__(f"{what} needs {need_bytes} bytes in {tier}, which has {have_bytes}")
        self.tier, self.need_bytes, self.have_bytes = tier, need_bytes, have_bytes


class _NoRoom(Exception):
    def __init__(self, tier: str) -> None:
        self.tier = tier


def home_offsets(blocks: Iterable[Block]) -> dict[str, int]:
    """Offset of every block that has a home, packed from 0 in each tier, in order."""
    ends: dict[str, int] = {}
    offsets = {}
    for block in blocks:
        if block.home is not None:
            offsets[block.name] = ends.get(block.home, 0)
            ends[block.home] = offsets[block.name] + aligned(block.size_bytes)
    return offsets


def residency(order: Order, machine: Machine, *, lookahead: int) -> Plan:
    """A plan without dependencies (see `hazards`). `lookahead`: how many visits ahead blocks are fetched, as far as
    there is room. Raises Infeasible when a single compute does not fit.
    """
    return _Residency(order, machine, lookahead).run()


class _Residency:
    def __init__(self, order: Order, machine: Machine, lookahead: int) -> None:
        self._order = order
        self._machine = machine
        self._lookahead = lookahead
        self._blocks = {block.name: block for block in order.blocks}
        self._sizes = {block.name: aligned(block.size_bytes) for block in order.blocks}
        self._levels = {tier.name: level for level, tier in enumerate(machine.tiers)}
        self._exit = set(order.exit)
        self._ops: list[tuple[Op, str]] = []
        self._slots: list[Slot] = []
        self._homes = home_offsets(order.blocks)
        self._home_bytes: dict[str, int] = {}
        self._regions: dict[str, Region] = {}
        for tier in (*machine.tiers, machine.graph_tier):
            used = sum(self._sizes[b.name] for b in order.blocks if b.home == tier.name)
            if used > tier.capacity_bytes:
                raise Infeasible(tier.name, used, tier.capacity_bytes, "what lives there")
            self._home_bytes[tier.name] = used
            self._regions[tier.name] = Region(used, tier.capacity_bytes)
        self._valid: dict[str, set[str]] = {b.name: set() for b in order.blocks}
        for name in order.entry:
            home = self._blocks[name].home
            assert home is not None
            self._valid[name].add(home)
        self._uses: dict[str, list[int]] = {b.name: [] for b in order.blocks}
        self._changes: dict[str, list[int]] = {b.name: [] for b in order.blocks}
        for i, compute in enumerate(order.computes):
            for access in compute.accesses:
                self._uses[access.block].append(i)
                if access.mode != "read":
                    self._changes[access.block].append(i)
            self._fits_alone(compute)
        self._past_uses = dict.fromkeys(self._uses, 0)
        self._now = 0
        self._pins: dict[tuple[str, str], int] = {}
        self._held: dict[tuple[str, str], int] = {}

    # ---------------------------------------------------------------- the pass

    def run(self) -> Plan:
        visits = list(_visits(self._order.computes))
        ahead = 0
        for v, (start, end) in enumerate(visits):
            self._now = start
            ahead = max(ahead, v)
            while ahead < len(visits) and ahead <= v + self._lookahead:
                if not self._prefetch(visits[ahead]) and ahead > v:
                    break
                ahead += 1
            for i in range(start, end):
                self._now = i
                self._compute(self._order.computes[i])
            self._unpin(visits[v])
        self._now = len(self._order.computes)
        self._pins.clear()
        for name in self._order.exit:
            home = self._blocks[name].home
            assert home is not None
            if home not in self._valid[name]:
                self._bring_all((Access(block=name, tier=home, mode="read"),), "the end of the step")
        for tier, region in self._regions.items():
            for copy in list(region.copies.values()):
                self._release(copy, tier)
        count = len(self._ops)
        for block in self._order.blocks:
            if block.home is not None:
                slot = Slot(
                    block=block.name, tier=block.home, offset_bytes=self._homes[block.name], first=-1, last=count
                )
                self._slots.append(slot)
        return Plan(
            machine=self._machine,
            blocks=self._order.blocks,
            steps=tuple(Step(op=op, lane=lane) for op, lane in self._ops),
            slots=tuple(self._slots),
            entry=self._order.entry,
            exit=self._order.exit,
        )

    def _prefetch(self, visit: tuple[int, int]) -> bool:
        """Pin what the visit needs and fetch what it reads, as far as there is room."""
        self._pin(visit)
        start = visit[0]
        first: dict[tuple[str, str], str] = {}
        for i in range(*visit):
            for access in self._order.computes[i].accesses:
                first.setdefault((access.block, access.tier), access.mode)
        # What the visit overwrites first is not fetched: its old content is of no use.
        wanted = [key for key, mode in first.items() if mode != "write" and key[1] in self._levels]
        for block, tier in wanted:
            changes = self._changes[block]
            pending = bisect_left(changes, self._now) < bisect_left(changes, start)
            if pending or not self._valid[block]:
                continue
            try:
                self._ensure(block, tier)
            except _NoRoom:
                if visit[0] > self._now:
                    self._unpin(visit)
                return False
        return True

    def _pin(self, visit: tuple[int, int]) -> None:
        for i in range(*visit):
            for access in self._order.computes[i].accesses:
                key = access.block, access.tier
                self._pins[key] = self._pins.get(key, 0) + 1

    def _unpin(self, visit: tuple[int, int]) -> None:
        for i in range(*visit):
            for access in self._order.computes[i].accesses:
                key = access.block, access.tier
                left = self._pins.get(key, 0) - 1
                if left > 0:
                    self._pins[key] = left
                else:
                    self._pins.pop(key, None)

    def _compute(self, compute: Compute) -> None:
        self._bring_all(compute.accesses, str(compute))
        lane = COMPUTE_LANE
        if compute.kind == "update" and compute.accesses[0].tier != self._machine.compute_tier:
            lane = self._machine.update_lane
        self._ops.append((compute, lane))
        for access in compute.accesses:
            self._touch(access.block, access.tier)
            if access.mode != "read":
                self._invalidate_others(access.block, access.tier)
        self._hold(compute)
        for access in compute.accesses:
            if access.mode != "read":
                self._write_back(access.block)
            elif self._blocks[access.block].role == "saved":
                self._release(self._regions[access.tier].copies[access.block], access.tier)

    def _bring_all(self, accesses: Sequence[Access], what: str) -> None:
        """Bring every block of `accesses` to its tier. Without room the window ahead is given up, then a tier whose
        holes are too small is cleared: only what must be there at once can make this fail.
        """
        window, cleared = self._pins, set[str]()
        while True:
            try:
                for slower in reversed(self._machine.tiers):
                    if slower.name in cleared:
                        self._clear(slower.name)
                for access in accesses:
                    self._bring(access)
                break
            except _NoRoom as error:
                tier = error.tier
            if self._pins is window:
                self._pins = {(a.block, a.tier): 1 for a in accesses}
            elif tier not in cleared and tier in self._levels:
                cleared.add(tier)
            else:
                raise self._infeasible(tier, self._need_bytes(accesses, tier), what)
        self._pins = window

    def _bring(self, access: Access) -> None:
        block, tier = access.block, access.tier
        if access.mode != "write":
            self._ensure(block, tier)
        elif self._blocks[block].home != tier and block not in self._regions[tier].copies:
            self._allocate(block, tier)

    def _fits_alone(self, compute: Compute) -> None:
        """Refuse by arithmetic what no order of transfers could place: far cheaper than finding out on the way."""
        for tier in sorted({access.tier for access in compute.accesses}):
            need = self._need_bytes(compute.accesses, tier)
            if need > self._machine.tier(tier).capacity_bytes:
                raise self._infeasible(tier, need, str(compute))

    def _need_bytes(self, accesses: Sequence[Access], tier: str) -> int:
        """All homes in `tier`, and what `accesses` touch there away from home."""
        visiting = {a.block for a in accesses if a.tier == tier and self._blocks[a.block].home != tier}
        return self._home_bytes[tier] + sum(self._sizes[block] for block in visiting)

    def _infeasible(self, tier: str, need_bytes: int, what: str) -> Infeasible:
        have = self._machine.tier(tier).capacity_bytes
        return Infeasible(tier, max(need_bytes, have + 1), have, what)

    # ---------------------------------------------------------------- copies

    def _ensure(self, block: str, tier: str) -> None:
        """Bring an up-to-date copy to `tier`, hop by hop from the nearest one."""
        valid = self._valid[block]
        if tier in valid:
            return
        target = self._levels[tier]
        level = min((self._levels[t] for t in valid), key=lambda lv: (abs(lv - target), lv))
        while level != target:
            following = level + (1 if target > level else -1)
            source, goal = self._machine.tiers[level].name, self._machine.tiers[following].name
            if goal not in valid:
                key = (block, source)
                self._pins[key] = self._pins.get(key, 0) + 1
                try:
                    if self._blocks[block].home != goal:
                        self._allocate(block, goal)
                finally:
                    self._pins[key] -= 1
                    if not self._pins[key]:
                        del self._pins[key]
                self._ops.append((Transfer(block=block, source=source, target=goal), f"{source}>{goal}"))
                valid.add(goal)
                self._touch(block, goal)
            level = following

    def _touch(self, block: str, tier: str) -> None:
        copy = self._regions[tier].copies.get(block)
        if copy is not None:
            copy.used = self._now

    def _invalidate_others(self, block: str, tier: str) -> None:
        # Sorted: the order of a set of names differs from process to process, and the plan must not.
        for other in sorted(self._valid[block] - {tier}):
            copy = self._regions[other].copies.get(block)
            if copy is not None:
                self._release(copy, other)
        self._valid[block] = {tier}

    def _write_back(self, block: str) -> None:
        """Send a block home after its last change, while the lanes are free; what finds no room waits for the end."""
        home = self._blocks[block].home
        if (
            home is None
            or block not in self._exit
            or self._changes[block][-1] > self._now
            or home in self._valid[block]
        ):
            return
        try:
            self._ensure(block, home)
        except _NoRoom:
            return

    def _hold(self, compute: Compute) -> None:
        """A kept graph points into the slots of its weights: they stay from F+ to B."""
        keeps = compute.kind == "forward" and compute.keep_graph
        ends = compute.kind == "backward" and any(self._blocks[a.block].role == "saved" for a in compute.accesses)
        if not keeps and not ends:
            return
        for access in compute.accesses:
            if self._blocks[access.block].role in ("weight", "frozen"):
                key = access.block, access.tier
                self._held[key] = self._held.get(key, 0) + (1 if keeps else -1)

    def _release(self, copy: Copy, tier: str) -> None:
        self._slots.append(
            Slot(block=copy.block, tier=tier, offset_bytes=copy.start, first=copy.first, last=len(self._ops))
        )
        self._ops.append((Release(block=copy.block, tier=tier), ""))
        self._regions[tier].give_back(copy, self._now)
        self._valid[copy.block].discard(tier)

    def _next_use(self, block: str) -> float:
        uses, k = self._uses[block], self._past_uses[block]
        while k < len(uses) and uses[k] < self._now:
            k += 1
        self._past_uses[block] = k  # time only goes on
        return uses[k] if k < len(uses) else math.inf

    def _allocate(self, block: str, tier: str) -> None:
        region, size = self._regions[tier], self._sizes[block]
        window = region.free_window(size)
        if window is None:
            window = self._make_room(region, tier, size)
        region.take(*window, size, block, len(self._ops), self._now)

    def _make_room(self, region: Region, tier: str, size: int) -> tuple[int, int]:
        window = region.window_over(self._by_eviction(region, tier), size)
        if window is None:
            raise _NoRoom(tier)
        i, j = window
        for victim in [s.copy for s in region.segments[i : j + 1] if s.copy is not None]:
            self._evict(victim, tier)  # frees its segment in place: i and j still hold
        return window

    def _by_eviction(self, region: Region, tier: str) -> Iterator[str]:
        """Blocks whose copy may leave `tier`, furthest next use first; mostly few are asked for, so a heap serves."""
        heap = [
            (-self._next_use(copy.block), copy.used, copy.start, copy.block)
            for copy in region.copies.values()
            if (copy.block, tier) not in self._pins
        ]
        heapify(heap)
        while heap:
            block = heappop(heap)[-1]
            if self._can_leave(block, tier):
                yield block

    def _clear(self, tier: str) -> None:
        """Evict whatever can leave, also what the compute at hand has already brought: it comes back side by side."""
        for copy in list(self._regions[tier].copies.values()):
            if self._can_leave(copy.block, tier):
                self._evict(copy, tier)
        self._regions[tier].merge_free()

    def _can_leave(self, block: str, tier: str) -> bool:
        if self._held.get((block, tier)):
            return False
        goes_down = tier in self._levels and tier != self._machine.tiers[-1].name
        return goes_down or not self._only_here(block, tier)

    def _only_here(self, block: str, tier: str) -> bool:
        """Is this the only up-to-date copy of something still needed?"""
        needed = self._next_use(block) < math.inf or block in self._exit
        return needed and self._valid[block] == {tier}

    def _evict(self, copy: Copy, tier: str) -> None:
        if self._only_here(copy.block, tier):
            self._ensure(copy.block, self._machine.tiers[self._levels[tier] + 1].name)
        self._release(copy, tier)


def _visits(computes: Sequence[Compute]) -> Iterator[tuple[int, int]]:
    """Runs of computes of one kind on one layer; each part of an update is a visit of its own."""
    start = 0
    for i in range(1, len(computes) + 1):
        if (
            i == len(computes)
            or (computes[i].kind, computes[i].layer) != (computes[start].kind, computes[start].layer)
            or computes[i].kind == "update"
        ):
            yield start, i
            start = i
