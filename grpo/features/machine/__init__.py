"""What the config leaves to the machine, and whether the run fits: a table of `--dry-run`, warnings of a start."""

from typing import Any


def fit_to_machine(config: Any, *inputs: Any) -> tuple[Any, int]:
    """Decide and judge as the function of this name in fit.py does, whose arguments these are."""
    from grpo.features.machine import fit

    return fit.fit_to_machine(config, *inputs)
