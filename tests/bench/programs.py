"""Programs per second that code_reward starts and ends, of one checkout or of several in turns.

    python tests/bench/programs.py [CHECKOUT ...] [--rounds 5]

Each program prints a number; one at a time. Prints for each checkout (by default this one) median, lowest and highest,
and the same of CPU milliseconds for a program, all its processes included.
"""

import functools
import resource
import time

from in_turns import in_turns

NUM_PROGRAMS = 25


def measure() -> dict[str, float]:
    """Measure the checkout that comes first on the path."""
    try:
        from grpo.workers.programs import Limits, run_python

        run = functools.partial(run_python, "print(6 * 7)", "", Limits(timeout_seconds=20, memory_gib=1))
    except ImportError:  # older checkouts
        from grpo.rewards.sandbox.run import run_python

        run = functools.partial(run_python, "print(6 * 7)", timeout_seconds=20, memory_gib=1)
    assert run().stdout == "42\n"  # also tries out what the kernel grants
    start = time.perf_counter()
    used = cpu_seconds()
    for _ in range(NUM_PROGRAMS):
        run()
    return {
        "programs/s": NUM_PROGRAMS / (time.perf_counter() - start),
        "CPU ms": 1000 * (cpu_seconds() - used) / NUM_PROGRAMS,
    }


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it started and waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    in_turns(measure, __file__, __doc__, rounds=5)
