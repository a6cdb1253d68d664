"""Completions for tests: their tokens count up, so that order and loss of one show."""

import torch

from grpo.types import Completion


def completion(index: int, length: int, version: int = 0, ended: bool = True, first: int = 0, **fields) -> Completion:
    """Tokens first, first + 1, ...; log-probs their negative hundredths."""
    ids_T = torch.arange(first, first + length)
    return Completion.of(
        ids_T, -ids_T / 100, version=version, index=index, ended=ended, **{"truncated": False} | fields
    )


def hands(of: Completion) -> list[tuple[int, int]]:
    """(version, tokens) of its pieces."""
    return [(piece.version, piece.num_tokens) for piece in of.pieces]
