"""Examples as they are printed: labels in colour, nothing that acts on a terminal."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from configs.examples import toys
from grpo.config import DataConfig
from grpo.data.encode import Encoded
from grpo.data.rows import Example
from grpo.data.turns import tokenize, write_example
from grpo.features.show.examples import show_chat

MESSAGES = [{"role": "user", "content": "数?\x1b[2J"}, {"role": "assistant", "content": "学:\n[bold]2[/bold]"}]


def pieces(text) -> list[tuple[str, str]]:
    return [(text.plain[span.start : span.end], span.style) for span in text.spans]


def test_labels_are_in_colour_and_the_rest_is_dim():
    tokenizer = toys.trained_tokenizer(["words"], 300)
    written = write_example(tokenizer, DataConfig(system_prompt=""), Example(chat=MESSAGES), "last")
    ((ids, mask),) = tokenize(tokenizer, [written])
    shown = show_chat(Encoded(ids=ids, mask=mask), tokenizer)
    assert pieces(shown) == [
        ("<|im_start|>user\n数?\\x1b[2J<|im_end|>\n<|im_start|>assistant\n", "dim"),
        ("学:↵\n[bold]2[/bold]<|im_end|>", "bold green"),
        ("\n", "dim"),
    ]


def test_blanks_that_a_tokenizer_drops_at_the_beginning_of_a_text_stay():
    backend = Tokenizer(models.BPE({"▁a": 0, "▁": 1, "a": 2, "b": 3, "▁b": 4}, merges=[("▁", "a"), ("▁", "b")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([4]) == "b"  # the blank is dropped
    assert pieces(show_chat(Encoded(ids=[0, 4, 0], mask=[False, True, True]), tokenizer)) == [
        ("a", "dim"),
        (" b a", "bold green"),
    ]
