"""Toy tasks, tokenizers and models: what the rest of the tests build on."""

import json
import pathlib
import random

import pytest
import torch

from configs.examples import toys
from grpo.data import initial_model

torch.set_num_threads(1)

TOYS = "configs/examples/toys.py"
TEXTS = ["Natalia sold 48/2 = 24 clips in May.", "She sold 48+24 = 72 clips altogether in April and May.\n#### 72"] * 3
MESSAGES = [{"role": "system", "content": "Think first."}, {"role": "user", "content": "70+98"}]


@pytest.fixture(scope="module")
def addition_tokenizer():
    return toys.addition_tokenizer()


@pytest.fixture(scope="module")
def text_tokenizer():
    return toys.trained_tokenizer(TEXTS, vocab_size=300)


def test_addition_row_by_hand():
    assert toys.addition_row(70, 98) == {
        "question": "70+98",
        "answer": "168",
        "completion": "<think>088;796;</think><answer>168</answer>",
    }
    assert toys.addition_row(10, 10)["completion"] == "<think>000;112;</think><answer>20</answer>"
    # 9 + 1 = 10, then 9 + 0 + 1 twice
    assert toys.addition_row(999, 1)["completion"] == "<think>910;900;900;</think><answer>1000</answer>"


def test_addition_rows_are_right_distinct_disjoint_and_fixed():
    state = random.getstate()
    train, test = toys.addition("train"), toys.addition("test")
    assert random.getstate() == state
    assert (len(train), len(test)) == (50_000, 2_000)
    pairs = [[*map(int, row["question"].split("+"))] for row in train + test]
    assert len(set(map(tuple, pairs))) == 52_000 and all(10 <= number <= 999 for pair in pairs for number in pair)
    assert [int(row["answer"]) for row in train + test] == list(map(sum, pairs))
    # 98+70 in the test split would give 70+98 in the train split away
    known = {frozenset(pair) for pair in pairs[:50_000]}
    assert not any(frozenset(pair) in known for pair in pairs[50_000:])
    # every last digit is held out about equally often
    assert min(sum(row["answer"].endswith(str(digit)) for row in test) for digit in range(10)) > 150
    assert test == toys.addition("test")
    assert [row["question"] for row in test[:2]] == ["848+753", "260+646"]  # the same on every machine


def test_a_model_from_a_function_and_one_that_cannot_be_built(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def model(folder, texts, seed):\n    return 1 / 0\n\ndef addition_model(folder): pass\n"
    )
    with pytest.raises(ValueError, match=f"model.path {tmp_path}/mine.py:model raised ZeroDivisionError"):
        initial_model.build_model(f"{tmp_path}/mine.py:model", tmp_path, [], seed=0)
    with pytest.raises(ValueError, match="no function 'chess'; functions there: model, addition_model"):
        initial_model.build_model(f"{tmp_path}/mine.py:chess", tmp_path, [], seed=0)
    assert initial_model.build_model("some/model", "unused", [], seed=0) == "some/model"


def test_addition_tokenizer_has_one_token_per_character(addition_tokenizer):
    text = "70+98=<think>088;796;</think><answer>168</answer>"
    ids = addition_tokenizer.encode(text)
    assert len(addition_tokenizer) == 32 and len(ids) == len("70+98=088;796;168") + 4
    assert addition_tokenizer.decode(ids) == text
    assert addition_tokenizer.convert_ids_to_tokens(addition_tokenizer.encode("7é")) == ["7", "<unk>"]


@pytest.mark.parametrize("name", ["addition_tokenizer", "text_tokenizer"])
def test_tags_are_single_tokens_that_decode_keeps(name, request):
    tokenizer = request.getfixturevalue(name)
    for tag in toys.TAGS:
        (token,) = tokenizer.encode(tag)
        assert tokenizer.decode([token, tokenizer.eos_token_id], skip_special_tokens=True) == tag
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert {tokenizer.eos_token_id, tokenizer.pad_token_id} <= set(tokenizer.all_special_ids)


def test_model_folder_loads_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(5)
    state = torch.get_rng_state()
    folder = pathlib.Path(initial_model.build_model(f"{TOYS}:addition_model", tmp_path / "a", [], seed=3))
    assert torch.equal(torch.get_rng_state(), state)

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    # per layer: q and o 128 x 128, k and v 128 x 64, 3 x 128 x 384, norms 128 + 128 + 32 + 32
    per_layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 320
    assert model.num_parameters() == 4 * per_layer + 32 * 128 + 128 and model.dtype == torch.float32
    assert len(tokenizer) == model.config.vocab_size == 32
    for text in ("config.json", "generation_config.json"):
        ids = json.loads((folder / text).read_text())
        assert (ids["eos_token_id"], ids["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == "70+98="


def test_weights_follow_from_the_seed(tmp_path, addition_tokenizer):
    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}

    def weights(folder, seed):
        return (toys.make_model(tmp_path / folder, addition_tokenizer, seed, small) / "model.safetensors").read_bytes()

    first = weights("a", 0)
    torch.manual_seed(99)
    assert weights("b", 0) == first and weights("c", 1) != first


def test_gsm8k_model_brings_a_tokenizer_trained_on_its_rows(tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    folder = initial_model.build_model(f"{TOYS}:gsm8k_model", tmp_path, TEXTS[:2], seed=0)
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    assert config.max_position_embeddings == 2048 and config.vocab_size == len(tokenizer) <= 2048
    assert tokenizer.decode(tokenizer.encode(TEXTS[1])) == TEXTS[1]
