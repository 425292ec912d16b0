"""The least that a step with exact clipping can take on a measured disk, whatever its schedule."""

from __future__ import annotations


def clipped_step_s(backward_s: float, rest_s: float, unheld_bytes: float, read_bytes_per_s: float) -> float:
    """No state may change before the norm of all gradients is known, at the end of the backward, and every state must
    have changed before the end of the next forward. So what RAM does not hold of states and gradients at the end of
    the backward (`unheld_bytes`) is read while the rest of the step runs:

        t >= backward + max(rest, unheld bytes / read bandwidth)

    with the bandwidth measured while as much is written, as it must be. `rest_s`: forward and updates.
    """
    return backward_s + max(rest_s, unheld_bytes / read_bytes_per_s)
