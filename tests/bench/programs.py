"""Programs per second that the sandbox of code_reward starts and ends, of one checkout or of several in turns.

    python tests/bench/programs.py [CHECKOUT ...] [--rounds 5]

Each program prints a number; one at a time. Prints for each checkout (by default this one) median, lowest and highest,
and the same of CPU milliseconds for a program, the sandbox's processes included.
"""

import resource
import time

from in_turns import in_turns

NUM_PROGRAMS = 25


def measure() -> dict[str, float]:
    """Of the checkout that comes first on the path."""
    try:
        from grpo.workers.sandbox.run import run_python
    except ImportError:  # where older checkouts have it
        from grpo.workers.sandbox import run_python

    def run() -> None:
        outcome = run_python("print(6 * 7)", timeout_seconds=20, memory_gib=1)
        assert outcome.stdout == "42\n", outcome

    run()  # tries out what the kernel grants
    start, used = time.perf_counter(), cpu_seconds()
    for _ in range(NUM_PROGRAMS):
        run()
    return {
        "programs/s": NUM_PROGRAMS / (time.perf_counter() - start),
        "CPU ms": 1000 * (cpu_seconds() - used) / NUM_PROGRAMS,
    }


def cpu_seconds() -> float:
    """Of this process and those that it started and waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    in_turns(measure, __file__, __doc__, rounds=5)
