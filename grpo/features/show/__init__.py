"""The first examples of SFT, shown by a dry run as the model sees them."""

from collections.abc import Iterable
from typing import Any


def show_examples(examples: Iterable[Any], tokenizer: Any) -> None:
    """Print examples, each with its length and its labels in colour."""
    from grpo.features.show.examples import print_examples

    print_examples(examples, tokenizer)
