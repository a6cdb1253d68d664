"""A reward for measurements: a coin per completion, so that groups have variance and gradients are not zero."""

import zlib


def coin(completions, **columns):
    """Give 1.0 or 0.0 by a checksum of the text."""
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]
