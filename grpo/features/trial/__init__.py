"""A user's loss, advantages and aggregation, tried before a run that depends on them."""

from typing import Any

CHECKS = {"loss": "grpo.features.trial.formulas:check_loss"}


def try_algorithm(algorithm: Any) -> None:
    """Call the functions that a config names on a few tokens. Raises ValueError for what does not fit or raises."""
    from grpo.features.trial import formulas

    formulas.try_algorithm(algorithm)
