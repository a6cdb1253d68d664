"""torch.distributed's collectives and messages, and how long this rank spent in them.

What `comm` sends is small, so its time is that of waiting for other ranks. The step's ledger leaves it out: else every
rank would seem as slow as the slowest one.
"""

import functools
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

Function = TypeVar("Function", bound=Callable)

_waited = {"seconds": 0.0}


def seconds_waited() -> float:
    """Wall seconds in the functions below since the process began."""
    return _waited["seconds"]


def timed(function: Function) -> Function:
    """The same function, whose calls count in `seconds_waited`."""

    @functools.wraps(function)
    def run(*arguments, **options):
        start = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            _waited["seconds"] += time.perf_counter() - start

    return run


all_gather = timed(dist.all_gather)
all_reduce = timed(dist.all_reduce)
barrier = timed(dist.barrier)
broadcast = timed(dist.broadcast)
broadcast_object_list = timed(dist.broadcast_object_list)
gather_object = timed(dist.gather_object)
recv = timed(dist.recv)
send = timed(dist.send)
