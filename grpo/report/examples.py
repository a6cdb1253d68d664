"""Examples of SFT to read: their text as the model sees it, labels in colour."""

import itertools
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from grpo.data.encode import Encoded
from grpo.text import printable


def show_examples(examples: Iterable[Encoded], tokenizer: PreTrainedTokenizerBase) -> None:
    """Print them, each with its length."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for number, example in enumerate(examples, start=1):
        console.rule(f"example {number}: {len(example.ids)} tokens, {sum(example.mask)} of them labels", align="left")
        console.print(show_chat(example, tokenizer))


def show_chat(example: Encoded, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Text of an example for rich's console, labels in bold green; a line break that is a label shows as ↵ too.

    Special tokens are shown; what would act on a terminal is escaped.
    """
    shown, start, before = Text(), 0, ""
    for is_label, run in itertools.groupby(example.mask):
        start += len(list(run))
        # From the beginning each time: some tokenizers drop a blank at the beginning of what they decode.
        decoded = tokenizer.decode(example.ids[:start], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece = printable(decoded[len(before) :])
        shown.append(piece.replace("\n", "↵\n") if is_label else piece, "bold green" if is_label else "dim")
        before = decoded
    return shown
