"""Examples as a person reads them: the text of the tokens, labels in colour."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from grpo.text import printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LABEL_STYLE, OTHER_STYLE = "bold green", "dim"


def show_chat(ids: Sequence[int], mask: Sequence[bool], tokenizer: "PreTrainedTokenizerBase") -> Text:
    """Text of an example for rich's console, its labels in LABEL_STYLE; a line break that is a label shows as ↵ too.

    Special tokens are shown; what would act on a terminal is escaped. Raises ValueError if the lengths differ.
    """
    if len(ids) != len(mask):
        raise ValueError(f"{len(ids)} tokens and {len(mask)} entries in the mask; pass those of one example")
    shown, start, before = Text(), 0, ""
    for is_label, run in itertools.groupby(mask):
        start += len(list(run))
        # From the beginning each time: some tokenizers drop a blank at the beginning of what they decode.
        decoded = tokenizer.decode(ids[:start], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece = printable(decoded[len(before) :])
        shown.append(piece.replace("\n", "↵\n") if is_label else piece, LABEL_STYLE if is_label else OTHER_STYLE)
        before = decoded
    return shown
