"""The files of a model folder as they lie on disk: broken ones are named before anything of them is loaded.

A download that was broken off, a page of HTML or a pointer of git-lfs in place of a file, and a config.json whose
numbers cannot be. Left out: whether the weights are those of the architecture, beyond the shape of the embedding;
loading finds out.
"""

import json
import pathlib
from collections.abc import Iterable
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open

# Fields of config.json that count something; some may be absent, or None where they follow from others
COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
MAY_BE_NONE = ("num_key_value_heads", "head_dim")
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
WAY_OUT = "copy or download it again"


def read_table(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises ValueError that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); {WAY_OUT}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a JSON object; {WAY_OUT}")
    return content


def read_raw_config(folder: str | pathlib.Path) -> dict[str, Any]:
    """config.json as it stands. Raises ValueError for fields that are not what such a file has, with their values."""
    path = pathlib.Path(folder) / "config.json"
    raw = read_table(path)
    for name in COUNTS:
        value = raw.get(name, 1)
        if (type(value) is not int or value < 1) and not (value is None and name in MAY_BE_NONE):
            raise ValueError(f"{path}: {name} is {value!r}, not a whole number above 0; {WAY_OUT}")
    for name, kinds in (("architectures", list), ("quantization_config", dict), ("compression_config", dict)):
        if not isinstance(raw.get(name), kinds | None):
            raise ValueError(f"{path}: {name} is {raw[name]!r}, not a {kinds.__name__}; {WAY_OUT}")
    heads, key_value_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if heads and key_value_heads and heads % key_value_heads:
        raise ValueError(
            f"{path}: num_attention_heads={heads} is not a multiple of num_key_value_heads={key_value_heads}; {WAY_OUT}"
        )
    return raw


def check_tables(folder: str | pathlib.Path, names: Iterable[str]) -> None:
    """Those of the JSON files that are there hold a JSON object each. Raises ValueError that names the first other."""
    for name in names:
        if (pathlib.Path(folder) / name).is_file():
            read_table(pathlib.Path(folder) / name)


def check_weights(folder: str | pathlib.Path, config: transformers.PretrainedConfig) -> None:
    """Look at the headers of the weights: whole files, all that the index names, an embedding as config.json says.

    Raises FileNotFoundError if there are none or one is missing, ValueError for one that is broken.
    """
    folder = pathlib.Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"model folder {folder} has no .safetensors files; other formats are not read")
    if (folder / INDEX).is_file():
        places = read_table(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
            raise ValueError(f"{folder / INDEX} has no weight_map with the files of the weights; {WAY_OUT}")
        if missing := sorted({name for name in places.values() if not (folder / name).is_file()}):
            raise FileNotFoundError(
                f"model folder {folder} has no {', '.join(missing[:3])}{' ..' if missing[3:] else ''}, which {INDEX} "
                f"names; {WAY_OUT}"
            )
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                shape = tensors.get_slice(EMBEDDING).get_shape() if EMBEDDING in tensors.keys() else None  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole .safetensors file ({error}); {WAY_OUT}") from error
        if shape and shape != [config.vocab_size, config.hidden_size]:
            raise ValueError(
                f"{file}: {EMBEDDING} is {' x '.join(map(str, shape))}, and by config.json vocab_size x hidden_size is "
                f"{config.vocab_size} x {config.hidden_size}; bring the config.json of these weights"
            )
