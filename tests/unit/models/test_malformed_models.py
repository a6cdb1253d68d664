"""Model folders that cannot be used: one line before anything is loaded, which names the folder and what is wrong."""

import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.examples import toys
from grpo.config import DataConfig, GRPOConfig, ModelConfig
from grpo.models.hf_folder import stop_token_ids
from grpo.run.inputs import open_model_folder
from grpo.watch.failures import BadInput, refuse_bad_input
from tests.tiny_models import SMALL

MOST_CHARACTERS = 1500  # of a message


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("good") / "model"
    return toys.make_model(folder, toys.addition_tokenizer(), 0, SMALL | {"max_position_embeddings": 2048})


@pytest.fixture
def folder(good: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of it to be spoiled."""
    return shutil.copytree(good, tmp_path / "model")


def open_folder(folder: pathlib.Path, **data) -> None:
    """What the driver does with it at the start of a run."""
    fields = DataConfig(path="configs/examples/toys.py:addition", system_prompt="", max_prompt_tokens=100, **data)
    config = GRPOConfig(model=ModelConfig(path=str(folder)), data=fields)
    with refuse_bad_input():
        _, tokenizer = open_model_folder(config)
        stop_token_ids(str(folder), tokenizer)


def refusal(folder: pathlib.Path, **data) -> str:
    with pytest.raises(BadInput) as refused:
        open_folder(folder, **data)
    message = str(refused.value)
    assert str(folder) in message and "\n" not in message and len(message) < MOST_CHARACTERS, message
    return message


def test_the_folder_that_the_others_are_copies_of(good: pathlib.Path):
    open_folder(good)


# ---- files that are not what they should be -------------------------------------------------------------------------

GARBAGE = {
    "nothing": b"",
    "NUL bytes": bytes(1000),
    "no UTF-8": b"\xff\xfe\xfa",
    "half of it": None,
    "a list": b"[]",
    "a number": b"3",
    "text": b'"text"',
    "null": b"null",
    "deep nesting": b'{"a": ' + b"[" * 100_000,
    "a page of HTML": b"<!DOCTYPE html><html><body>404</body></html>",
    "a pointer of git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
}
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "generation_config.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", GARBAGE)
def test_a_file_of_something_else(name: str, what: str, folder: pathlib.Path):
    path = folder / name
    content = GARBAGE[what]
    if content is None:
        content = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(content)
    assert name in refusal(folder)


def set_config(**changes):
    def spoil(folder: pathlib.Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def cut_weights(folder: pathlib.Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TENSOR = "model.layers.1.mlp.up_proj.weight"


def set_tensors(change: Callable[[dict[str, torch.Tensor]], object]):
    def spoil(folder: pathlib.Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def add_eos(folder: pathlib.Path) -> None:
    """A token more, without a row for it."""
    tokenizer = toys.addition_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(folder)


# name: (how to spoil the folder, what is said)
SPOILED = {
    "width as text": (set_config(hidden_size="64"), "hidden_size"),
    "width of nothing": (set_config(hidden_size=None), "hidden_size"),
    "width of 0": (set_config(hidden_size=0), "hidden_size"),
    "negative width": (set_config(hidden_size=-64), "hidden_size"),
    "a fraction of a layer": (set_config(num_hidden_layers=1.5), "num_hidden_layers"),
    "no layer": (set_config(num_hidden_layers=0), "num_hidden_layers"),
    "no heads": (set_config(num_attention_heads=0), "num_attention_heads"),
    "no key-value heads": (set_config(num_key_value_heads=0), "num_key_value_heads"),
    "heads that do not divide": (set_config(num_key_value_heads=3), "num_key_value_heads"),
    "no vocabulary": (set_config(vocab_size=0), "vocab_size"),
    "vocabulary as text": (set_config(vocab_size="many"), "vocab_size"),
    "positions as text": (set_config(max_position_embeddings="512"), "max_position_embeddings"),
    "positions of nothing": (set_config(max_position_embeddings=None), "max_position_embeddings"),
    "a list as model_type": (set_config(model_type=["qwen3"]), "['qwen3'] model"),
    "no model_type": (set_config(model_type=None), "None"),
    "architectures as text": (set_config(architectures=3), "architectures"),
    "rotary positions as text": (set_config(rope_parameters="yarn"), "rope_parameters"),
    "rotary positions unheard of": (set_config(rope_parameters={"rope_type": "x", "rope_theta": 1e4}), "rope_type"),
    "quantization as text": (set_config(quantization_config="int4"), "quantization_config"),
    "an activation unheard of": (set_config(hidden_act="magic"), "hidden_act"),
    "a smaller vocabulary than the tokenizer's": (set_config(vocab_size=8), "and by config.json 8 x 64"),
    "a tensor of another shape": (
        set_config(intermediate_size=128),
        "down_proj.weight is 64 x 96, and by config.json 64 x 128",
    ),
    "a tensor missing": (set_tensors(lambda tensors: tensors.pop(TENSOR)), f"lack 1 tensors of .* {TENSOR}"),
    "another head beside a tied embedding": (
        set_tensors(lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1})),
        f"has an {HEAD} that differs from {EMBEDDING}.*set tie_word_embeddings to false",
    ),
    "an end of texts that is no token": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [1, 99]}'),
        "generation_config.json: eos_token_id has 99, beyond the model's vocab_size=32",
    ),
    "an EOS that the embedding has no row for": (
        add_eos,
        "the eos_token '<end>' (32), beyond the model's vocab_size=32",
    ),
    "a tensor of NaN": (set_tensors(lambda tensors: tensors[TENSOR].fill_(float("nan"))), f"{TENSOR} holds NaN"),
    "weights without the last byte": (cut_weights, "model.safetensors"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_folder_with_one_thing_wrong(name: str, folder: pathlib.Path):
    spoil, said = SPOILED[name]
    spoil(folder)
    assert re.search(re.escape(said).replace(r"\.\*", ".*"), refusal(folder))


def test_tensors_that_are_not_read_are_named(folder: pathlib.Path, capsys):
    bias, computed = "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.rotary_emb.inv_freq"
    more = {bias: torch.ones(64), computed: torch.ones(8)}
    set_tensors(lambda tensors: tensors.update(more | {HEAD: tensors[EMBEDDING].clone()}))(folder)
    open_folder(folder)
    told = [line for line in capsys.readouterr().out.splitlines() if "tensors" in line]
    assert told == [
        f"warning: 1 tensors of {folder} belong to no weight of config.json's model: {bias}; they are not read, and an "
        "export lacks them"
    ]


def test_a_tensor_in_the_files_of_two_saves(folder: pathlib.Path):
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    message = refusal(folder)
    assert "in model-00001-of-00001.safetensors and in model.safetensors" in message, message


# ---- chat templates -------------------------------------------------------------------------------------------------

TEMPLATES = {
    "a tag that does not end": "{% for m in messages %}{{ m.content }}",
    "an expression that does not end": "{{ messages[0].content",
    "an unknown tag": "{% magic %}{{ messages[0].content }}",
    "an unknown filter": "{{ messages[0].content | magic }}",
    "an error of its own": "{{ raise_exception('never\nany chat') }}",
    "a name that is not there": "{{ messages[0].content + nothing.at.all }}",
    "a division by zero": "{{ messages[0].content }}{{ 1 / 0 }}",
    "a text and a number": "{{ messages[0].content + 1 }}",
    "a list that is too short": "{{ messages[7].content.x }}",
    "nested loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}"
    "{% endfor %}{% endfor %}{% endfor %}{{ messages[0].content }}",
    "a text without end": "{{ messages[0].content * 10**10 }}",
    "a number without end": "{{ messages[0].content }}{{ 9 ** (9 ** 9) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}{{ messages[0].content }}",
    "a way to Python": "{{ messages[0].content.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
    "an include": "{% include '/etc/passwd' %}{{ messages[0].content }}",
    "the prompt left out": "a constant",
    "nothing": "{{ '' }}",
    "a million characters": "{{ messages[0].content }}{{ 'a' * 2000000 }}",
}


# The others start a process each, which imports transformers
QUICK = ("an unknown filter", "an error of its own", "the prompt left out")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TEMPLATES]
)
def test_a_chat_template_that_fails(name: str, folder: pathlib.Path):
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    assert "chat template" in refusal(folder)


@pytest.mark.parametrize("content", [b"\xff\xfe{{ messages }}", b"\0\0\0\0"])
def test_a_template_file_of_something_else(content: bytes, good: pathlib.Path, tmp_path: pathlib.Path):
    path = tmp_path / "mine.jinja"
    path.write_bytes(content)
    with pytest.raises(BadInput, match="mine.jinja") as refused:
        open_folder(good, prompt_template=str(path))
    assert "\n" not in str(refused.value)
