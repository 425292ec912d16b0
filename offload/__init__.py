"""Make tensors follow a plan: layers, arenas, lanes, strands, executor."""

from ..swap_scheduler import BudgetError
from .compute import NonFiniteGradient
from .device import open_device
from .job import Job, StepResult
from .layers import skeleton
from .measure import matmul_flops_per_s
from .memory import PROCESS_BYTES, DiskMemory, Memory
from .optimizer import AdamW
from .sources import RandomSource, SafetensorsSource, StateDictSource, WeightError, WeightSource

__all__ = [
    "PROCESS_BYTES",
    "AdamW",
    "BudgetError",
    "DiskMemory",
    "Job",
    "Memory",
    "NonFiniteGradient",
    "RandomSource",
    "SafetensorsSource",
    "StateDictSource",
    "StepResult",
    "WeightError",
    "WeightSource",
    "matmul_flops_per_s",
    "open_device",
    "skeleton",
]
