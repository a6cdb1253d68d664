"""A user's loss, advantages and aggregation, tried before a run that depends on them."""

from collections.abc import Callable, Iterator
from typing import Any


def try_algorithm(algorithm: Any) -> None:
    """Call the functions that a config names on a few tokens. Raises ValueError for what does not fit or raises."""
    from grpo.features.trial import formulas

    formulas.try_algorithm(algorithm)


def check_loss(algorithm: Any, policy_loss: Callable[..., Any]) -> Iterator[tuple[str, bool, str]]:
    """Yield promises of a loss, whether it keeps each, and advice."""
    from grpo.features.trial import formulas

    return formulas.check_loss(algorithm, policy_loss)
