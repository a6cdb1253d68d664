"""Base models: a prompt template in place of the chat template that their tokenizer lacks."""

import json
import pathlib

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from configs.examples.toys import make_model, trained_tokenizer
from grpo.config import DataConfig
from grpo.data.chat import check_template, load_tokenizer
from tests.tiny_models import KINDS, SMALL
from tests.unit.data.test_data import encode_prompt

WORDS = ["<bos>", "<eos>", "<unk>", "Q:", "A:", "add", "one", "system", "{question}", "{system_prompt}", "be", "brief"]


def data(template: str, system_prompt: str = "", **fields) -> DataConfig:
    return DataConfig(prompt_template=template, system_prompt=system_prompt, **fields)


@pytest.fixture
def base(tmp_path) -> str:
    """Folder of a tokenizer of words that begins every text with <bos> and has no chat template."""
    return save_base(tmp_path / "base", "<bos> $A")


def save_base(folder: pathlib.Path, pattern: str) -> str:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("<bos>", 0), ("<eos>", 1)]
    backend.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=special)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return str(folder)


def encoded(folder: str, config: DataConfig, text: str) -> str:
    """The prompt's tokens as words."""
    return " ".join(WORDS[token] for token in encode_prompt(load_tokenizer(folder, config), config, text))


def test_text_template(base, tmp_path):
    """A question is never taken for a placeholder, and a text that the tokenizer would close stays open."""
    assert encoded(base, data("Q: {question} A:"), "add one") == "<bos> Q: add one A:"
    with_system = data("{system_prompt} Q: {question} A:", "be brief")
    wanted = "<bos> be brief Q: {system_prompt} {question} A:"
    assert encoded(base, with_system, "{system_prompt} {question}") == wanted
    closing = save_base(tmp_path / "closing", "<bos> $A <eos>")
    assert encoded(closing, data("Q: {question} A:"), "add one") == "<bos> Q: add one A:"


def test_jinja_template(base, tmp_path):
    """It may write the question alone, or the messages; a beginning of the text it writes itself."""
    short, long = tmp_path / "short.jinja", tmp_path / "long.jinja"
    short.write_text("{{ bos_token }} Q: {{ question }} A:")
    long.write_text("{% for m in messages %}{{ m.role if m.role == 'system' }} {{ m.content }} {% endfor %}{{ end }}")
    assert encoded(base, data(str(short)), "add one") == "<bos> Q: add one A:"
    config = data(str(long), "be brief", chat_template_kwargs={"end": "A:"})
    assert encoded(base, config, "add one") == "system be brief add one A:"


def test_templates_that_cannot_be_used(base, tmp_path):
    with pytest.raises(ValueError, match="has no chat template; .* --data.prompt-template 'Question: {question} Answe"):
        load_tokenizer(base)
    with pytest.raises(ValueError, match=r"file .*/none\.jinja cannot be read"):
        load_tokenizer(base, data(str(tmp_path / "none.jinja")))
    for text, message in {
        "Q: A:": r"leaves the prompt out; .*, or as \{\{ question \}\}",
        "{% for %}": "TemplateSyntaxError",
        "{{ raise_exception('only users') }}": "TemplateError: only users",
    }.items():
        (tmp_path / "bad.jinja").write_text(text)
        config = data(str(tmp_path / "bad.jinja"))
        with pytest.raises(ValueError, match=message):
            check_template(load_tokenizer(base, config), config)


def test_the_tokenizer_is_that_of_tokenizer_json(tmp_path):
    """A Llama with another vocabulary than Llama's, as R1-Distill has: its class's name misleads."""
    tokenizer = trained_tokenizer(["How many apples are left?"] * 4, 300)
    folder = make_model(tmp_path / "r1", tokenizer, 0, SMALL | KINDS["llama3"])
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}))
    text = "How many apples are left?"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    loaded = load_tokenizer(str(folder))
    assert loaded(text)["input_ids"] == ids
    assert loaded.decode(ids) == text
    assert loaded.chat_template == tokenizer.chat_template and loaded.eos_token == "<|im_end|>"
