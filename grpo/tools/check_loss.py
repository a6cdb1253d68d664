"""Is this loss right? Four checks on a CPU, in seconds, before a run depends on it: `python -m grpo.check_loss LOSS`.

    python -m grpo.check_loss path/file.py:function [RECIPE.py] [--field value ...]     your own
    python -m grpo.check_loss gspo [RECIPE.py] [--field value ...]                      or a built-in one

Each check finds a mistake that trains without an error, but computes another algorithm than the one written down. Flags
are those of a run, such as `--algorithm.loss-options alpha 2`; without a recipe the rest is as in train_grpo.py. What
is left out: whether the idea is good. Exit code 1 if a check fails.
"""

import sys

from grpo import features
from grpo.tools.command import subject_of, tool_config
from grpo.watch.failures import refuse_bad_input, run_rank
from train_grpo import policy_loss


def main(arguments: list[str] | None = None) -> int:
    """Print one line per check, and return the exit code."""
    loss_name, flags = subject_of(__doc__, arguments)
    exit_code = 0
    with refuse_bad_input():
        config = tool_config([*flags, "--algorithm.loss", loss_name])
        check = features.offers("CHECKS").get("loss")
        if not check:
            raise ValueError("check_loss needs grpo/features/trial, which this checkout lacks")
        for promise, holds, advice in check(config.algorithm, policy_loss):
            print(f"holds  {promise}" if holds else f"FAILS  {promise}\n       {advice}")
            exit_code |= not holds
    return exit_code


if __name__ == "__main__":
    sys.exit(run_rank(main))
