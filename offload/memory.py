"""What a run may use: the user's budgets, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

GRAPH = "graph"

PROCESS_BYTES = 768 << 20
"""What a process takes beside its RAM budget: the interpreter, torch and the rest of the libraries, threads, and the
activations inside one layer. Measured beyond the budget: 0.38 to 0.69 GiB for 0.2B to 2.8B parameters at 256 tokens
a batch (benchmarks/results/memory_*.json). Longer batches add to it: activations inside a layer are not in the budget.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskMemory:
    """A directory for the swap file, and how large the file may grow."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Caps. `gpu_bytes` None on a CPU means that RAM itself is the fast tier; with a figure, that tier is a
    separate RAM arena of this size and the run goes through all tiers as it would on a GPU.
    """

    ram_bytes: int
    gpu_bytes: int | None = None
    disk: DiskMemory | None = None
