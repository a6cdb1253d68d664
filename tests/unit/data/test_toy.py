"""Toy tasks, tokenizers and models: what the rest of the tests build on."""

import pathlib

import pytest
import torch

from configs.examples import toys
from grpo.data import initial_model

torch.set_num_threads(1)

TOYS = "configs/examples/toys.py"
TEXTS = ["Natalia sold 48/2 = 24 clips in May.", "She sold 48+24 = 72 clips altogether in April and May.\n#### 72"] * 3


def test_addition_rows_are_right_distinct_disjoint_and_fixed():
    train, test = toys.addition("train"), toys.addition("test")
    pairs = [[*map(int, row["question"].split("+"))] for row in train + test]
    assert len(set(map(tuple, pairs))) == 52_000 and all(10 <= number <= 999 for pair in pairs for number in pair)
    assert [int(row["answer"]) for row in train + test] == list(map(sum, pairs))
    # 98+70 in the test split would give 70+98 in the train split away
    known = {frozenset(pair) for pair in pairs[:50_000]}
    assert len(test) == 2_000 and not any(frozenset(pair) in known for pair in pairs[50_000:])
    assert [row["question"] for row in test[:2]] == ["848+753", "260+646"]  # the same on every machine


def test_a_model_from_a_function_and_one_that_cannot_be_built(tmp_path):
    (tmp_path / "mine.py").write_text("def model(folder, texts, seed):\n    return 1 / 0\n")
    with pytest.raises(ValueError, match=f"model.path {tmp_path}/mine.py:model raised ZeroDivisionError"):
        initial_model.build_model(f"{tmp_path}/mine.py:model", tmp_path, [], seed=0)
    with pytest.raises(ValueError, match="no function 'chess'; functions there: model"):
        initial_model.build_model(f"{tmp_path}/mine.py:chess", tmp_path, [], seed=0)
    assert initial_model.build_model("some/model", "unused", [], seed=0) == "some/model"


def test_model_folders_load_in_transformers_and_follow_from_the_seed(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def build(folder: str, seed: int) -> pathlib.Path:
        return pathlib.Path(initial_model.build_model(f"{TOYS}:addition_model", tmp_path / folder, TEXTS[:2], seed))

    state = torch.get_rng_state()
    folder, same, other = build("a", 3), build("b", 3), build("c", 4)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [(f / "model.safetensors").read_bytes() for f in (folder, same, other)]
    assert weights[0] == weights[1] != weights[2]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size == 32 and model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    messages = [{"role": "system", "content": "Think first."}, {"role": "user", "content": "70+98"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "70+98="
