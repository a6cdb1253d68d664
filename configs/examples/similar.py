"""A reward as a class, for what is costly to begin with: a model, a client, a dictionary.

    --reward.functions configs/examples/similar.py:Similar 1.0

Other characters to ignore: --reward.options configs/examples/similar.py:Similar '{"ignore": " ,"}'
"""

import difflib


class Similar:
    """How similar a response is to its target, from 0 to 1. Each reward process makes one object and keeps it."""

    def __init__(self, ignore: str = " "):
        self.matcher = difflib.SequenceMatcher(lambda letter: letter in ignore)

    def __call__(self, prompt, response, target):
        self.matcher.set_seqs(response, target)
        return self.matcher.ratio()
