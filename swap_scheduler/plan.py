"""What a plan is made of: tiers, blocks, steps, slots. Data only; nothing here decides or moves anything.

One `Plan` covers one pass over the model (an optimizer step, a forward-only pass, a final update). It drives
the checker, the simulator and the executor alike. Every step has an exact text form, both ways:

    F3.0      forward of layer 3 for microbatch 0; its graph is dropped and the backward recomputes it
    F3.0+     the same, but its graph is kept until B3.0
    B3.0      backward of layer 3 for microbatch 0
    U3.1      optimizer update of part 1 of layer 3
    layer.3/weight disk>ram    a transfer between neighbouring tiers
    free layer.3/weight@ram    the block's copy leaves the tier
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

ALIGNMENT_BYTES = 4096
"""Every slot starts on this boundary and is padded to it, so that direct disk I/O needs no bounce copy."""

Role = Literal["weight", "frozen", "grad", "optim", "input", "saved"]
Mode = Literal["read", "write", "update"]
Kind = Literal["forward", "backward", "update"]

COMPUTE_LANE = "compute"
UPDATE_LANE = "update"


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to the slot alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place that holds blocks, `capacity_bytes` of it."""

    name: str
    capacity_bytes: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise ValueError(f"tier name {self.name!r} must be a lower-case word")
        if self.capacity_bytes < 0:
            raise ValueError(f"tier {self.name} has a negative capacity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The tiers a plan may use, fastest first; blocks move between neighbours only.

    `tiers[0]` computes forward and backward. `update_tier` is where optimizer updates run when the states do not
    live in `tiers[0]`; `graph_tier` accounts for kept autograd graphs: it has a capacity but no arena, since
    the tensors in it belong to the allocator. `shared_lane` says that forward, backward and updates share
    one processor, hence one lane.
    """

    tiers: tuple[Tier, ...]
    update_tier: str
    graph_tier: Tier
    shared_lane: bool

    def __post_init__(self) -> None:
        names = [tier.name for tier in self.tiers]
        if not names or len(set(names)) != len(names) or self.graph_tier.name in names:
            raise ValueError(f"a machine needs tiers with distinct names, got {names} and {self.graph_tier.name}")
        if self.update_tier not in names:
            raise ValueError(f"update tier {self.update_tier!r} is not one of {names}")

    @property
    def compute_tier(self) -> str:
        return self.tiers[0].name

    @property
    def update_lane(self) -> str:
        return COMPUTE_LANE if self.shared_lane else UPDATE_LANE

    def tier(self, name: str) -> Tier:
        """The tier called `name`, graph tier included; KeyError when there is none."""
        for tier in (*self.tiers, self.graph_tier):
            if tier.name == name:
                return tier
        raise KeyError(name)

    def level(self, name: str) -> int:
        """Position of an arena tier, 0 the fastest."""
        return [tier.name for tier in self.tiers].index(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A run of bytes that moves as one. `home` is the tier that owns it between plans; None = lives inside one plan."""

    name: str
    role: Role
    size_bytes: int
    home: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a compute does to a block. "write" discards the old content, "update" reads and writes it."""

    block: str
    tier: str
    mode: Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Forward or backward of `layer` for microbatch `index`, or the update of its part `index`."""

    kind: Kind
    layer: int
    index: int
    keep_graph: bool = False
    accesses: tuple[Access, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.layer}.{self.index}{'+' if self.keep_graph else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    block: str
    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.block} {self.source}>{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    block: str
    tier: str

    def __str__(self) -> str:
        return f"free {self.block}@{self.tier}"


Op: TypeAlias = Compute | Transfer | Release

_COMPUTE = re.compile(r"([FBU])(\d+)\.(\d+)(\+?)")
_TRANSFER = re.compile(r"(\S+) ([a-z][a-z0-9_]*)>([a-z][a-z0-9_]*)")
_RELEASE = re.compile(r"free (\S+)@([a-z][a-z0-9_]*)")
_KINDS: dict[str, Kind] = {kind[0].upper(): kind for kind in get_args(Kind)}


def parse_op(text: str) -> Op:
    """The op that prints as `text` (a compute comes back without its accesses); ValueError otherwise."""
    if match := _COMPUTE.fullmatch(text):
        kind, layer, index, keep = match.groups()
        return Compute(kind=_KINDS[kind], layer=int(layer), index=int(index), keep_graph=bool(keep))
    if match := _RELEASE.fullmatch(text):
        return Release(block=match[1], tier=match[2])
    if match := _TRANSFER.fullmatch(text):
        return Transfer(block=match[1], source=match[2], target=match[3])
    raise ValueError(f"not a step: {text!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One op, the lane that runs it, and the earlier steps (by position) of other lanes it must wait for.

    Releases run on no lane (`lane == ""`): they mark where a copy ends and take no time.
    """

    op: Op
    lane: str
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a copy of `block` lies in `tier`, from step `first` to step `last` (positions, inclusive).

    The home copy of a block spans the whole plan: first = -1, last = number of steps.
    """

    block: str
    tier: str
    offset_bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps in a valid order, with the slot of every copy.

    `entry` names the blocks that are at home when the plan starts, `exit` those that must be there at its end.
    """

    machine: Machine
    blocks: tuple[Block, ...]
    steps: tuple[Step, ...]
    slots: tuple[Slot, ...]
    entry: tuple[str, ...]
    exit: tuple[str, ...]

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lane names in order of first use."""
        return tuple(dict.fromkeys(step.lane for step in self.steps if step.lane))

    @property
    def digest(self) -> str:
        """The same for equal plans, on any machine and Python version."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def peak_bytes(self) -> dict[str, int]:
        """Highest address used in each tier (its end, not the sum of what is alive)."""
        sizes = {block.name: block.size_bytes for block in self.blocks}
        peaks = {tier.name: 0 for tier in (*self.machine.tiers, self.machine.graph_tier)}
        for slot in self.slots:
            peaks[slot.tier] = max(peaks[slot.tier], slot.offset_bytes + aligned(sizes[slot.block]))
        return peaks

    def moved_bytes(self) -> dict[str, int]:
        """Bytes that cross each link in one pass: {"disk>ram": ...}."""
        sizes = {block.name: block.size_bytes for block in self.blocks}
        moved: dict[str, int] = {}
        for step in self.steps:
            if isinstance(step.op, Transfer):
                link = f"{step.op.source}>{step.op.target}"
                moved[link] = moved.get(link, 0) + sizes[step.op.block]
        return moved

    def to_text(self) -> str:
        """One step a line; what golden files hold."""
        return "".join(f"{step.op}\n" for step in self.steps)

    def to_json(self) -> str:
        content = {
            "machine": dataclasses.asdict(self.machine),
            "blocks": [_fields(block) for block in self.blocks],
            "steps": [_step_dict(step) for step in self.steps],
            "slots": [_fields(slot) for slot in self.slots],
            "entry": self.entry,
            "exit": self.exit,
        }
        return json.dumps(content, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        raw = json.loads(text)
        machine = raw["machine"]
        return cls(
            machine=Machine(
                tiers=tuple(Tier(**tier) for tier in machine["tiers"]),
                update_tier=machine["update_tier"],
                graph_tier=Tier(**machine["graph_tier"]),
                shared_lane=machine["shared_lane"],
            ),
            blocks=tuple(Block(**block) for block in raw["blocks"]),
            steps=tuple(_step_from(step) for step in raw["steps"]),
            slots=tuple(Slot(**slot) for slot in raw["slots"]),
            entry=tuple(raw["entry"]),
            exit=tuple(raw["exit"]),
        )


def _fields(item: Block | Slot | Access) -> dict[str, Any]:
    """Like dataclasses.asdict, without its deep copies: a plan has thousands of these."""
    return {name: getattr(item, name) for name in item.__slots__}


def _step_dict(step: Step) -> dict[str, Any]:
    accesses = [_fields(access) for access in step.op.accesses] if isinstance(step.op, Compute) else []
    return {"op": str(step.op), "lane": step.lane, "after": step.after, "accesses": accesses}


def _step_from(raw: dict[str, Any]) -> Step:
    op = parse_op(raw["op"])
    if isinstance(op, Compute):
        op = dataclasses.replace(op, accesses=tuple(Access(**access) for access in raw["accesses"]))
    return Step(op=op, lane=raw["lane"], after=tuple(raw["after"]))
