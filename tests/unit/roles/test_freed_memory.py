"""On a CPU a run's processes keep the memory that tensors free."""

import subprocess
import sys

ALLOCATES = """
import resource
import torch

if {in_a_run}:
    from grpo.roles.process_groups import setup_trainers
    setup_trainers()
new_pages = []
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 * 2**20)
    new_pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(max(new_pages[-5:]))
"""


def new_pages(in_a_run: bool) -> int:
    """Return the most pages that the system clears for a tensor of 64 MiB, after fifteen of its kind."""
    command = [sys.executable, "-c", ALLOCATES.format(in_a_run=in_a_run)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return int(ended.stdout.split()[-1])


def test_a_tensor_takes_the_pages_of_one_that_was_freed():
    """Without a run it is 2**26 / 4096 = 16,384 pages each time, or fewer large ones."""
    assert new_pages(in_a_run=True) < new_pages(in_a_run=False) / 10
