"""overspill: models larger than the GPU, or the RAM, of one machine train exactly.

    import overspill

    overspill.plan("configs/example.yaml")   # what would move where, and how long a step takes; reads no weights
    overspill.train("configs/example.yaml")  # the same job as `overspill train configs/example.yaml`

Importing this package imports neither torch nor transformers: the functions load their modules when they are first
asked for, so `overspill --help` and the scheduler stay quick and free of heavy imports.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overspill.trainer.run import plan, train

__version__ = "0.1.0"
__all__ = ["__version__", "plan", "train"]

# Large CPU tensors on huge pages: a layer's activations and gradients come and go with every microbatch, and 4 KiB page
# faults cost a tenth of a step (LOG.md, 2026-12-01). torch reads this once, when it makes its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

_HOME_OF = {"plan": "overspill.trainer.run", "train": "overspill.trainer.run"}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
