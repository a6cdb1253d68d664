"""Examples of SFT on the console, with their labels in colour."""

import itertools
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from grpo.data.chat import token_texts
from grpo.data.encode import Encoded
from grpo.text import printable


def print_examples(examples: Iterable[Encoded], tokenizer: PreTrainedTokenizerBase) -> None:
    """Print examples of SFT as the model sees them, each with its length and its labels in colour."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for number, example in enumerate(examples, start=1):
        sizes = f"{len(example.ids)} tokens, {sum(example.mask)} of them labels"
        console.rule(f"example {number}: {sizes}", align="left")
        console.print(show_chat(example, tokenizer))


def show_chat(example: Encoded, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Return an example as text for rich's console, with labels in bold green and ↵ at line breaks that are labels.

    Special tokens are shown; characters that would act on a terminal are escaped.
    """
    colored = Text()
    texts = iter(token_texts(tokenizer, example.ids))
    for is_label, run in itertools.groupby(example.mask):
        piece = printable("".join(next(texts) for _ in run))
        if is_label:
            colored.append(piece.replace("\n", "↵\n"), "bold green")
        else:
            colored.append(piece, "dim")
    return colored
