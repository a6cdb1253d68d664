"""Tokenizers and chat templates: what is refused, what is said of them, and prompts of any length."""

import random
import resource

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from configs.examples import toys
from grpo.config import DataConfig
from grpo.data import chat
from grpo.data.chat import check_template, detokenize, look_at_prompt
from grpo.data.encode import Encoder, RowStatus
from grpo.data.rows import row_reader
from tests.unit.chat_templates import MISTRAL, QWEN3, THINKER

PLAIN = "{{ messages[0]['content'] }}"
CONFIG = DataConfig(system_prompt="")


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    tokenizer = toys.addition_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_template_that_raises_is_refused_in_one_line():
    for template, said in {
        "{{ 'a' * 10**15 }}": "MemoryError",
        "{{ raise_exception('System role\x1b[2J not supported') }}": r"TemplateError: System role\x1b[2J not supported",
    }.items():
        with pytest.raises(ValueError, match="^the chat template of .*; correct it, .* use another model$") as refused:
            check_template(tokenizer_with(template), CONFIG)
        assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "template", [toys.CHAT_TEMPLATE, "{{ eos_token }}{{ 1 / (level - 1) }}{{ messages[-1].content }}"]
)
def test_good_templates_pass(template):
    arguments = {"level": 2, "chat_template": template}  # which takes the place of the model's own
    check_template(tokenizer_with("{{ undefined.entry }}"), DataConfig(chat_template_kwargs=arguments))


def test_a_prompt_of_20_mb_is_tokenized_in_part():
    """Tokenized, it took 51 s and 6.6 GB. The longest of the 32 tokens, </answer>, has 9 characters."""
    text = "1+1=" * 5_000_000
    data = DataConfig(system_prompt="")
    encoder = Encoder(tokenizer_with(PLAIN), data, 512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (found,) = encoder.encode([{"question": text, "answer": "1"}], row_reader(data))
    assert (found.status, found.num_tokens) == (RowStatus.TOO_LONG, 36882)  # of its first 4098 x 9 characters
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


@pytest.mark.parametrize("cleans_up", [False, True])
def test_texts_are_those_of_decode(cleans_up):
    tokenizer = toys.trained_tokenizer(["It 's a text , with spaces .", "And another one !"] * 9, 300)
    tokenizer.clean_up_tokenization_spaces = cleans_up
    draw = random.Random(0)
    sequences = [[draw.randrange(len(tokenizer)) for _ in range(length)] for length in (0, 1, 2, 30, 200)]
    assert detokenize(tokenizer, sequences) == [tokenizer.decode(ids, skip_special_tokens=False) for ids in sequences]
    assert detokenize(tokenizer, []) == []


# template, fields of the data, (the thought that the prompt opens, what is said)
PROMPTS = [
    (QWEN3, {}, "", ""),
    (THINKER, {}, "<think>\n", "prompts open <think>; reward functions get it"),
    (QWEN3, {"chat_template_kwargs": {"enable_thinking": False}}, "", ""),
    (MISTRAL, {}, "", "warning: the chat template of  drops data.system_prompt"),
    (MISTRAL, {"system_prompt": "?"}, "", "warning: the chat template of  drops data.system_prompt"),
    (MISTRAL, {"system_prompt": ""}, "", ""),
    (QWEN3, {"system_prompt": "Be brief.\n\n  Think. "}, "", ""),
    (QWEN3, {"prompt_template": "{question} <think>"}, "<think>", "prompts open <think>"),
]


@pytest.mark.parametrize(("template", "fields", "opened", "said"), PROMPTS)
def test_what_prompts_have_or_lack_is_said(template, fields, opened, said):
    found, notes = look_at_prompt(tokenizer_with(template), DataConfig(**fields))
    assert found == opened and len(notes) == bool(said)
    assert all(note.startswith(said) for note in notes)


DATED = "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_template_that_writes_the_date_writes_the_same_on_every_day():
    tokenizer = tokenizer_with(DATED)
    text, _ = chat.render(tokenizer, DataConfig(), [{"role": "user", "content": "q"}], opening=True)
    assert text.endswith("26 Jul 2024q")


@pytest.mark.parametrize(("begins", "is_warned"), [("", True), ("{{ bos_token }}", False)])
def test_a_template_of_ones_own_without_bos_is_warned_of(begins, is_warned, tmp_path, capsys):
    """Gemma, for one, writes nonsense without it."""
    file = tmp_path / "own.jinja"
    file.write_text(f"{begins}{QWEN3}")
    tokenizer = tokenizer_with(file.read_text())
    tokenizer.bos_token = "<s>"
    bos = [("<s>", tokenizer.bos_token_id)]
    processor = processors.TemplateProcessing(single="<s> $A", special_tokens=bos)
    tokenizer.backend_tokenizer.post_processor = processor
    check_template(tokenizer, DataConfig(prompt_template=str(file)))
    assert ("own.jinja does not begin with <s>" in capsys.readouterr().out) is is_warned
    check_template(tokenizer, DataConfig())  # who made the model decided
    assert not capsys.readouterr().out
