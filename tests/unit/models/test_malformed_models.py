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
from grpo.run.policy import read_policy
from grpo.watch.failures import BadInput, refuse_bad_input
from tests.tiny_models import SMALL

MOST_CHARACTERS = 1500  # of a message


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("good") / "model"
    return toys.make_model(folder, toys.addition_tokenizer(), 0, SMALL | {"max_position_embeddings": 2048})


@pytest.fixture
def folder(good, tmp_path) -> pathlib.Path:
    """A copy of it to be spoiled."""
    return shutil.copytree(good, tmp_path / "model")


def open_folder(folder: pathlib.Path, **data) -> None:
    """What the driver does with it at the start of a run."""
    fields = DataConfig(path="configs/examples/toys.py:addition", system_prompt="", max_prompt_tokens=100, **data)
    config = GRPOConfig(model=ModelConfig(path=str(folder)), data=fields)
    with refuse_bad_input():
        tokenizer = read_policy(config).tokenizer
        stop_token_ids(str(folder), tokenizer)


def refusal(folder: pathlib.Path, **data) -> str:
    with pytest.raises(BadInput) as refused:
        open_folder(folder, **data)
    message = str(refused.value)
    assert str(folder) in message and "\n" not in message and len(message) < MOST_CHARACTERS, message
    return message


def test_the_folder_that_the_others_are_copies_of(good):
    open_folder(good)


# ---- files that are not what they should be -------------------------------------------------------------------------

GARBAGE = {
    "nothing": b"",
    "no UTF-8": b"\xff\xfe\xfa",
    "half of it": None,
    "a list": b"[]",
    "deep nesting": b'{"a": ' + b"[" * 100_000,
    "a page of HTML": b"<!DOCTYPE html><html><body>404</body></html>",
    "a pointer of git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
}
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "generation_config.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", GARBAGE)
def test_a_file_of_something_else(name, what, folder):
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


def set_numbers(value: float):
    """Put a value behind the first row of a tensor."""
    return set_tensors(lambda tensors: tensors[TENSOR][3].fill_(value))


def set_dtype(dtype: torch.dtype):
    return set_tensors(lambda tensors: tensors.update({TENSOR: tensors[TENSOR].to(dtype)}))


def put_a_pipe(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def set_endless_expression(folder: pathlib.Path) -> None:
    """One that goes back without end over a word, for which the library in Rust panics."""
    table = json.loads((folder / "tokenizer.json").read_text())
    pattern = {"Regex": r"((\w|_)+)+\z(?<=b)"}
    table["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(table))


def add_eos(folder: pathlib.Path) -> None:
    """A token more, without a row for it."""
    tokenizer = toys.addition_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(folder)


# name: (how to spoil the folder, what is said)
SPOILED = {
    "width as text": (set_config(hidden_size="64"), "hidden_size"),
    "a fraction of a layer": (set_config(num_hidden_layers=1.5), "num_hidden_layers"),
    "heads that do not divide": (set_config(num_key_value_heads=3), "num_key_value_heads"),
    "positions as text": (set_config(max_position_embeddings="512"), "max_position_embeddings"),
    "a list as model_type": (set_config(model_type=["qwen3"]), "['qwen3'] model"),
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
    "NaN": (set_numbers(float("nan")), f"{TENSOR} holds NaN"),
    "an infinite weight": (set_numbers(-float("inf")), f"{TENSOR} holds NaN or infinite values"),
    "whole numbers": (set_dtype(torch.int8), f"{TENSOR} has dtype I8"),
    "8-bit floats": (set_dtype(torch.float8_e4m3fn), f"{TENSOR} has dtype F8_E4M3"),
    "a pipe as weights": (put_a_pipe, "model.safetensors is not a file"),
    "an endless expression": (set_endless_expression, "PanicException"),
    "more layers than tensors": (set_config(num_hidden_layers=900, layer_types=None), "has num_hidden_layers=900"),
    "a model within the model": (set_config(text_config={}), "text_config"),
    "layers without end": (set_config(num_hidden_layers=10**8, layer_types=None), "num_hidden_layers is 100000000"),
    "positions without end": (set_config(max_position_embeddings=10**13), "max_position_embeddings is 1000"),
    "no heads": (set_config(num_key_value_heads=0), "num_key_value_heads is 0"),
    "NaN in a norm": (set_config(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
    "frequencies without end": (set_config(rope_parameters={"rope_theta": 0}), "'rope_theta': 0"),
    "a text as number": (set_config(rope_parameters={"rope_theta": "10000"}), "describes no model"),
    "weights without the last byte": (cut_weights, "model.safetensors"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_folder_with_one_thing_wrong(name, folder):
    spoil, said = SPOILED[name]
    spoil(folder)
    assert re.search(re.escape(said).replace(r"\.\*", ".*"), refusal(folder))


def test_tensors_that_are_not_read_are_named(folder, capsys):
    bias, computed = "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.rotary_emb.inv_freq"
    more = {bias: torch.ones(64), computed: torch.ones(8)}
    set_tensors(lambda tensors: tensors.update(more | {HEAD: tensors[EMBEDDING].clone()}))(folder)
    open_folder(folder)
    told = [line for line in capsys.readouterr().out.splitlines() if "tensors" in line]
    assert told == [
        f"warning: 1 tensors of {folder} belong to no weight of config.json's model, such as {bias}; they are not "
        "read, and an export lacks them"
    ]


def test_a_tensor_in_the_files_of_two_saves(folder):
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    message = refusal(folder)
    assert "in model-00001-of-00001.safetensors and in model.safetensors" in message, message


# ---- chat templates -------------------------------------------------------------------------------------------------

# More are in tests/unit/data/test_chat.py
TEMPLATES = {
    "an unknown filter": "{{ messages[0].content | magic }}",
    "the prompt left out": "a constant",
    "a way to Python": "{{ messages[0].content.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
    "an include": "{% include '/etc/passwd' %}{{ messages[0].content }}",
}
# It starts a process, which imports transformers
SLOW = ("an include",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in TEMPLATES]
)
def test_a_chat_template_that_fails(name, folder):
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    assert "chat template" in refusal(folder)


@pytest.mark.parametrize("content", [b"\xff\xfe{{ messages }}", b"\0\0\0\0"])
def test_a_template_file_of_something_else(content, good, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_bytes(content)
    with pytest.raises(BadInput, match="mine.jinja") as refused:
        open_folder(good, prompt_template=str(path))
    assert "\n" not in str(refused.value)
