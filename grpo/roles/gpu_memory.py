"""The most memory that this process held of its GPU at one time.

torch goes on counting what a sleeping engine has given back to the GPU (`generator.sleep`), which this does not.
"""

import torch

_highest = 0  # bytes, of the times that are over: torch counts anew from each change
_given_back = 0  # bytes, now


def set_given_back(num_bytes: int) -> None:
    """Say how much of what torch counts is not held from now on: an engine's when it falls asleep, 0 when it wakes."""
    global _highest, _given_back
    _highest, _given_back = peak_bytes(), num_bytes
    torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Since the process began."""
    return max(_highest, torch.cuda.max_memory_allocated() - _given_back)
