"""A reward that keeps what is costly to begin with: a model, a client, a dictionary.

    --reward.functions configs/examples/similar.py:similar 1.0

Other characters to ignore: --reward.options configs/examples/similar.py:similar '{"ignore": " ,"}'
"""

import difflib
import functools


@functools.cache
def matcher(ignore):
    """Make what compares texts. Each reward process does it once."""
    return difflib.SequenceMatcher(lambda letter: letter in ignore)


def similar(completions, answer, ignore=" ", **columns):
    """Return how similar each completion is to its answer, from 0 to 1."""
    values = []
    for text, target in zip(completions, answer, strict=True):
        matcher(ignore).set_seqs(text, target)
        values.append(matcher(ignore).ratio())
    return values
