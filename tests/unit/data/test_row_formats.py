"""Five formats that rows come in, in the schema of their data sets, by flags alone; from JSON lines and as a table."""

import json
import pathlib

import datasets
import pytest

from configs.examples.toys import trained_tokenizer
from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import load
from grpo.data.prepare import load_chat_sources, load_sources, texts_of, usable_chats, usable_prompts
from grpo.data.streams import ChatStream, PromptStream
from grpo.rewards.builtin import math_reward

FORMATS = pathlib.Path(__file__).parent / "row_formats"
ROOT = pathlib.Path(__file__).parents[3]
# As a model with tools writes them: what is called, what came back, what there is.
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GSM8K = ["--reward.answer-format", "hashes"]
DAPO = ["--data.prompt-column", "prompt", "--data.answer-column", "reward_model.ground_truth"]
OPENR1 = ["--data.prompt-column", "problem", "--reward.answer-format", "boxed"]
TOOLS = ["--data.prompt-column", "messages.:-1", "--data.tools-column", "tools"]
ALPACA = (
    "def rows(row):\n"
    "    prompt = row['instruction'] + ('\\n\\n' + row['input'] if row['input'] else '')\n"
    "    return {'prompt': prompt, 'completion': row['output'], 'answer': row['output']}\n"
)


@pytest.fixture(params=["jsonl", "parquet"])
def data_set(request, tmp_path):
    """The file of a format, as it is or as a table, in which every row has every entry of every other row."""

    def path_of(name: str) -> str:
        path = FORMATS / f"{name}.jsonl"
        if request.param == "jsonl":
            return str(path)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / f"{name}.parquet"))
        return str(tmp_path / f"{name}.parquet")

    return path_of


def tokenizer_of(sources):
    tokenizer = trained_tokenizer(texts_of(sources), vocab_size=300)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def prompts_of(path: str, *flags: str):
    """The prompts of three rows as GRPO gets them, and their texts with special tokens."""
    fixed = ["--data.path", path, "--data.no-shuffle", "--data.system-prompt", "Be brief.", "--prompts-per-step", "3"]
    fixed += ["--data.max-prompt-tokens", "3000"]
    config = load(GRPOConfig, str(ROOT / "configs/qwen3_1_7b_gsm8k.py"), [*fixed, *flags])
    tokenizer = tokenizer_of(sources := load_sources(config.data))
    prompts = PromptStream(usable_prompts(sources, config, tokenizer), config).draw(3)
    return prompts, [tokenizer.decode(prompt.ids) for prompt in prompts], config


def chats_of(path: str, *flags: str) -> list[tuple[str, str]]:
    """What comes before the first label, and the labels, of three rows as SFT gets them."""
    fixed = ["--data.path", path, "--data.no-shuffle", "--sequences-per-step", "3", "--max-sequence-tokens", "4000"]
    config = load(SFTConfig, str(ROOT / "configs/toy_sft.py"), [*fixed, *flags])
    tokenizer = tokenizer_of(sources := load_chat_sources(config))
    chats = []
    for chat in ChatStream(usable_chats(sources, config, tokenizer), config).draw(3):
        labels = [token for token, is_label in zip(chat.ids, chat.mask, strict=True) if is_label]
        chats.append((tokenizer.decode(chat.ids[: chat.mask.index(True)]), tokenizer.decode(labels)))
    return chats


def test_gsm8k(data_set):
    prompts, texts, _ = prompts_of(data_set("gsm8k"), *GSM8K)
    assert texts[0] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nAnn has 3 boxes of 4 pens. How many pens has she?<|im_end|>\n<|im_start|>assistant\n"
    )
    answers = [prompt.columns["answer"] for prompt in prompts]
    given = ["<answer>12</answer>", "<answer>75</answer>", "<answer>1199</answer>"]
    assert math_reward(given, answer=answers) == [1.0, 1.0, 0.0]
    completion = chats_of(data_set("gsm8k"), "--completion-column", "answer")[1][1]
    assert completion == "150 / 2 = <<150/2=75>>75\n#### 75<|im_end|>"


def test_dapo_math(data_set):
    prompts, texts, _ = prompts_of(data_set("dapo_math"), *DAPO)
    assert [prompt.columns["answer"] for prompt in prompts] == ["36", "-7", "32"]
    assert prompts[0].content == prompts[0].columns["prompt"]
    assert prompts[0].content[0]["role"] == "user"
    assert texts[1].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSolve the following math")
    assert texts[1].endswith(
        'Remember to put your answer on its own line after "Answer:".<|im_end|>\n<|im_start|>assistant\n'
    )


def test_openr1_math(data_set):
    prompts, texts, config = prompts_of(data_set("openr1_math"), *OPENR1, "--data.columns", "kind", "problem_type")
    assert texts[1].endswith("user\nA square has area 16. Find its perimeter.<|im_end|>\n<|im_start|>assistant\n")
    assert prompts[0].columns == {
        "problem": "Compute $\\frac{1}{2} + \\frac{1}{3}$.",
        "answer": "\\frac{5}{6}",
        "kind": "Algebra",
    }
    answers = {"answer": [prompts[0].columns["answer"]], "answer_format": config.reward.answer_format}
    assert math_reward(["so \\boxed{5/6}"], **answers) == [1.0]
    flags = ["--data.prompt-column", "messages.0.content", "--completion-column", "messages.-1.content"]
    prompt, completion = chats_of(data_set("openr1_math"), *flags)[2]
    assert prompt.endswith("user\nFind the remainder of $7^2$ divided by 5.<|im_end|>\n<|im_start|>assistant\n")
    assert completion == "<think>\n49 = 9 * 5 + 4.\n</think>\n\nThe answer is \\boxed{4}.<|im_end|>"


def test_alpaca(data_set, tmp_path):
    (tmp_path / "alpaca.py").write_text(ALPACA)
    own = ["--data.row", f"{tmp_path}/alpaca.py:rows"]
    prompts, texts, _ = prompts_of(data_set("alpaca"), *own)
    assert texts[1].endswith(
        "user\nSort these numbers from small to large.\n\n3, 1, 2<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompts[1].columns == {"completion": "1, 2, 3", "answer": "1, 2, 3"}
    assert chats_of(data_set("alpaca"), *own) == chats_of(data_set("alpaca"))  # of itself
    prompt, completion = chats_of(data_set("alpaca"))[0]
    assert "Give the capital of France.<|im_end|>" in prompt
    assert completion == "The capital of France is Paris.<|im_end|>"


def test_chats_with_tools(data_set):
    flags = [*TOOLS, "--data.answer-column", "messages.-1.content"]
    prompts, texts, _ = prompts_of(data_set("tool_chats"), *flags)
    first, second, third = texts
    assert first.count("<|im_start|>system") == 1 and "Use the functions that you have." in first  # brings its own
    assert "Be brief." not in first and "Be brief." in second
    assert '<call>{"name": "get_weather", "arguments": {"city": "Oslo"}}<|im_end|>' in first
    assert '<|im_start|>tool\n{"sky": "clear", "celsius": 4}<|im_end|>\n<|im_start|>assistant\n' in first
    assert first.count("<tool>") == 2 and second.count("<tool>") == 1 and third.count("<tool>") == 0
    assert '"properties": {"a": {' in second and "city" not in second and "null" not in "".join(texts)
    assert [prompt.columns["answer"] for prompt in prompts] == ["Clear, at 4 degrees.", "16.5", "Hello!"]
    assert [message["role"] for message in prompts[1].content] == ["user", "assistant", "tool"]


def test_chats_with_tools_as_they_are(data_set):
    """SFT needs no flags: tools are found, and every turn of the assistant's is learned, calls included."""
    chats = chats_of(data_set("tool_chats"))
    prompt, labels = chats[0]
    assert prompt.count("<tool>") == 2 and prompt.endswith("<|im_start|>assistant\n")
    call = '<call>{"name": "get_weather", "arguments": {"city": "Oslo"}}<|im_end|>'
    assert labels == f"{call}Clear, at 4 degrees.<|im_end|>"
    path = [*TOOLS, "--completion-column", "messages.-1.content"]
    for flags in (["--train-on", "last"], [*path, "--train-on", "last"]):
        completions = [labels for _, labels in chats_of(data_set("tool_chats"), *flags)]
        assert completions == ["Clear, at 4 degrees.<|im_end|>", "16.5<|im_end|>", "Hello!<|im_end|>"]
    assert chats_of(data_set("tool_chats"), *path) == chats
