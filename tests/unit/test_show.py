"""Examples as they are printed: labels in colour, nothing that acts on a terminal."""

import io

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo.config import DataConfig
from grpo.data import toy
from grpo.data.show import LABEL_STYLE, OTHER_STYLE, show_chat
from grpo.data.turns import encode_chat

MESSAGES = [{"role": "user", "content": "数?\x1b[2J"}, {"role": "assistant", "content": "学:\n[bold]2[/bold]"}]


def pieces(text) -> list[tuple[str, str]]:
    return [(text.plain[span.start : span.end], span.style) for span in text.spans]


def test_labels_are_in_colour_and_the_rest_is_dim():
    tokenizer = toy.trained_tokenizer(["words"], 300)
    shown = show_chat(*encode_chat(tokenizer, DataConfig(system_prompt=""), MESSAGES, "last", 1000), tokenizer)
    assert pieces(shown) == [
        ("<|im_start|>user\n数?\\x1b[2J<|im_end|>\n<|im_start|>assistant\n", OTHER_STYLE),
        ("学:↵\n[bold]2[/bold]<|im_end|>", LABEL_STYLE),
        ("\n", OTHER_STYLE),
    ]


def test_on_a_terminal_and_in_a_file():
    tokenizer = toy.trained_tokenizer(["words"], 300)
    shown = show_chat(*encode_chat(tokenizer, DataConfig(system_prompt=""), MESSAGES, "last", 1000), tokenizer)
    for is_terminal, expected in (
        (True, "\x1b[1;32m[bold]2[/bold]<|im_end|>\x1b[0m"),
        (False, "\n[bold]2[/bold]<|im_e"),
    ):
        file = io.StringIO()
        Console(file=file, force_terminal=is_terminal, color_system="standard" if is_terminal else None).print(shown)
        assert expected in file.getvalue()
        assert ("\x1b" in file.getvalue()) == is_terminal and "\x1b[2J" not in file.getvalue()


def test_blanks_that_a_tokenizer_drops_at_the_beginning_of_a_text_stay():
    backend = Tokenizer(models.BPE({"▁a": 0, "▁": 1, "a": 2, "b": 3, "▁b": 4}, merges=[("▁", "a"), ("▁", "b")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([4]) == "b"  # the blank is dropped
    assert pieces(show_chat([0, 4, 0], [False, True, True], tokenizer)) == [("a", OTHER_STYLE), (" b a", LABEL_STYLE)]


def test_a_mask_of_another_example_is_refused():
    with pytest.raises(ValueError, match="2 tokens and 1 entries in the mask"):
        show_chat([1, 2], [True], toy.addition_tokenizer())
    assert show_chat([], [], toy.addition_tokenizer()).plain == ""
