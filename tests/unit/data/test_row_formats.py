"""Five formats that rows come in, in the schema of their data sets, by flags alone; from JSON lines and as a table."""

import itertools
import pathlib

import datasets
import pytest

from configs.examples.toys import trained_tokenizer
from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import load
from grpo.data.encode import Encoder
from grpo.data.prepare import encode_sources, load_chat_sources, load_sources, texts_of
from tests import ROOT, read_lines
from tests.torchrun import words_of

FORMATS = pathlib.Path(__file__).parent / "row_formats"
# As a model with tools writes them: what is called, what came back, what there is.
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GSM8K = "--reward.answer-format hashes"
DAPO = "--data.prompt-column prompt --data.answer-column reward_model.ground_truth"
OPENR1 = "--data.prompt-column problem --reward.answer-format boxed --data.columns kind problem_type"
TOOLS = "--data.prompt-column messages.:-1 --data.tools-column tools"
CALL = '<call>{"name": "get_weather", "arguments": {"city": "Oslo"}}'


@pytest.fixture(params=["jsonl", "parquet"])
def data_set(request, tmp_path):
    """The file of a format, as it is or as a table, in which every row has every entry of every other row."""

    def path_of(name: str) -> str:
        path = FORMATS / f"{name}.jsonl"
        if request.param == "jsonl":
            return str(path)
        datasets.Dataset.from_list(read_lines(path)).to_parquet(str(tmp_path / f"{name}.parquet"))
        return str(tmp_path / f"{name}.parquet")

    return path_of


def tokenizer_of(sources):
    tokenizer = trained_tokenizer(texts_of(sources), vocab_size=300)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def config_of(kind: type, recipe: str, path: str, flags: str):
    fixed = ["--data.system-prompt", "Be brief.", f"--data.path {path} --data.no-shuffle"]
    return load(kind, str(ROOT / "configs" / recipe), words_of(fixed) + flags.split())


def prompts_of(path: str, flags: str):
    """The prompts of three rows as GRPO gets them, and their texts with special tokens."""
    data = config_of(GRPOConfig, "qwen3_1_7b_gsm8k.py", path, flags).data
    tokenizer = tokenizer_of(sources := load_sources(data))
    (rows,) = encode_sources(sources, Encoder(tokenizer, data, 3000))
    prompts = [rows.prompt(row, row) for row in range(3)]
    return prompts, [tokenizer.decode(prompt.ids) for prompt in prompts]


def chats_of(path: str, flags: str) -> list[tuple[str, str]]:
    """What comes before the first label, and the labels, of three rows as SFT gets them."""
    config = config_of(SFTConfig, "toy_sft.py", path, flags)
    tokenizer = tokenizer_of(sources := load_chat_sources(config.data, config.row_format, config.completion_column))
    (rows,) = encode_sources(sources, Encoder(tokenizer, config.data, 4000, config.train_on))
    chats = []
    for chat in map(rows.get, range(3)):
        labels = tokenizer.decode(list(itertools.compress(chat.ids, chat.mask)))
        chats.append((tokenizer.decode(chat.ids[: chat.mask.index(True)]), labels))
    return chats


GIVEN = "--data.answer-column messages.-1.content"
COMPLETION = "--completion-column messages.-1.content"
FIRST_AND_LAST = f"--data.prompt-column messages.0.content {COMPLETION}"
# data set, flags, which of three rows: how its prompt ends, and the columns that rewards get
PROMPTS = [
    ("gsm8k", GSM8K, 1, "How many km does it go in 1 hour?", {"answer": "150 / 2 = <<150/2=75>>75\n#### 75"}),
    ("dapo_math", DAPO, 1, 'Remember to put your answer on its own line after "Answer:".', {"answer": "-7"}),
    (
        "openr1_math",
        OPENR1,
        0,
        "Compute $\\frac{1}{2} + \\frac{1}{3}$.",
        {"answer": "\\frac{5}{6}", "kind": "Algebra"},
    ),
]
# data set, flags, which of three rows: how what comes before the first label ends, and the labels
CHATS = [
    ("gsm8k", "--completion-column answer", 1, "", "150 / 2 = <<150/2=75>>75\n#### 75"),
    (
        "openr1_math",
        FIRST_AND_LAST,
        2,
        "user\nFind the remainder of $7^2$ divided by 5.<|im_end|>\n",
        "<think>\n49 = 9 * 5 + 4.\n</think>\n\nThe answer is \\boxed{4}.",
    ),
    ("alpaca", "", 0, "Give the capital of France.<|im_end|>\n", "The capital of France is Paris."),
    # without flags: tools are found, and every turn of the assistant's is learned, calls included
    ("tool_chats", "", 0, "", CALL + "<|im_end|>Clear, at 4 degrees."),
    (
        "tool_chats",
        f"{TOOLS} {COMPLETION}",
        0,
        "",
        CALL + "<|im_end|>Clear, at 4 degrees.",
    ),
    ("tool_chats", "--train-on last", 1, "", "16.5"),
    ("tool_chats", f"{TOOLS} {COMPLETION} --train-on last", 2, "", "Hello!"),
]


@pytest.mark.parametrize(("name", "flags", "row", "end", "columns"), PROMPTS)
def test_prompts_of_formats(data_set, name, flags, row, end, columns):
    prompts, texts = prompts_of(data_set(name), flags)
    assert texts[row].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert texts[row].endswith(f"{end}<|im_end|>\n<|im_start|>assistant\n")
    assert columns.items() <= prompts[row].columns.items()


@pytest.mark.parametrize(("name", "flags", "row", "end", "labels"), CHATS)
def test_chats_of_five_formats(data_set, name, flags, row, end, labels):
    before, found = chats_of(data_set(name), flags)[row]
    assert before.endswith(f"{end}<|im_start|>assistant\n") and found == f"{labels}<|im_end|>"


def test_chats_with_tools(data_set):
    prompts, texts = prompts_of(data_set("tool_chats"), f"{TOOLS} {GIVEN}")
    first, second, third = texts
    assert first.count("<|im_start|>system") == 1 and "Use the functions that you have." in first  # brings its own
    assert "Be brief." not in first and f"{CALL}<|im_end|>" in first
    assert '<|im_start|>tool\n{"sky": "clear", "celsius": 4}<|im_end|>\n<|im_start|>assistant\n' in first
    assert [text.count("<tool>") for text in texts] == [2, 1, 0]
    assert '"properties": {"a": {' in second and "city" not in second and "null" not in "".join(texts)
    assert [prompt.columns["answer"] for prompt in prompts] == ["Clear, at 4 degrees.", "16.5", "Hello!"]
    assert [message["role"] for message in prompts[1].content] == ["user", "assistant", "tool"]
