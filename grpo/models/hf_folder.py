"""Hugging Face model folders, before anything is loaded: find or download one, refuse what cannot be trained.

A broken file is named before it is loaded: a download that was broken off, a page of HTML or a pointer of git-lfs in
place of a file, a tensor that is missing or has another shape than config.json says.
"""

import contextlib
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import huggingface_hub
import torch
import torch.distributed as dist
import transformers
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from grpo.config import TrainerConfig
from grpo.config.checks import check_model_path
from grpo.data.chat import open_tokenizer
from grpo.models.experts import by_expert
from grpo.models.families import (
    SCORES,
    SEES,
    WRITES,
    empty_policy,
    families,
    family_of,
    gives_scores,
    has_experts,
    has_states,
    unsupported_fields,
)
from grpo.text import one_line, printable, shorten

# What an export copies, besides config.json, from the folder that training started from: the files of a tokenizer, and
# of what prepares images for a model that sees some.
# They are listed by name, so that no code, pickles or other files that lie there are copied.
TABLES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
COPIED_FILES = (*TABLES, "tokenizer.model", "vocab.txt", "merges.txt", "chat_template.jinja")
# Numbers of config.json, and the most that is read: more would take any time and memory before anything is compared
COUNTS = ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "num_attention_heads", "num_key_value_heads")
COUNTS += ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
MOST = dict.fromkeys(COUNTS, 2**19) | {"num_hidden_layers": 1000, "max_position_embeddings": 2**24}
MORE_TEMPLATES = "additional_chat_templates/*.jinja"

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Dtypes of weights, as .safetensors files name them
FLOATS = ("F32", "F16", "BF16")
# Ending of tensors that some older checkpoints contain although they follow from config.json
COMPUTED = ".rotary_emb.inv_freq"
SHOWN_TENSORS = 5
SHOWN_CHARACTERS = 300  # of a library's message
WAY_OUT = "copy or download it again"
CHECKED_ROWS = 4  # of each tensor, for a checksum
# Files of a hub model. The unwanted ones are the weights again, in layouts that vLLM would prefer to Hugging Face's.
WANTED_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
UNWANTED_FILES = ["consolidated*", "params.json", "original/*"]


@dataclass(frozen=True)
class ChatForm:
    """What a model learned about chats, in addition to the folder that training started from."""

    template: str = ""
    """The chat template, if it differs from the folder's."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end its replies."""


def resolve_folder(path: str, scores: bool = False) -> str:
    """Return a local folder as it is, and for a hub name the folder it was downloaded to.

    scores: it must be a reward model, see `read_hf_config`. Raises FileNotFoundError with the way out, and ValueError
    for a hub model that cannot be trained, before its weights are downloaded.
    """
    check_model_path(path)
    folder = pathlib.Path(path)
    if not folder.is_dir():
        config_folder = _download(path, ["config.json", "adapter_config.json"])
        check_model_path(config_folder)
        read_hf_config(config_folder, scores)
        return _download(path, WANTED_FILES)
    if not (folder / "tokenizer_config.json").is_file():
        raise FileNotFoundError(
            f"model folder {folder.resolve()} has no tokenizer_config.json; it must be a Hugging Face folder"
        )
    return str(folder)


def has_config_alone(path: str) -> bool:
    """Say whether a local folder has a config.json, which is enough for arithmetic, but no weights or no tokenizer."""
    folder = pathlib.Path(path)
    is_whole = any(folder.glob("*.safetensors")) and (folder / "tokenizer_config.json").is_file()
    return (folder / "config.json").is_file() and not is_whole


def name_and_revision(path: str) -> tuple[str, str]:
    """Split NAME@REVISION of the hub. The revision is empty if there is none, and for the path of a folder.

    >>> name_and_revision("Qwen/Qwen3-0.6B@main")
    ('Qwen/Qwen3-0.6B', 'main')
    """
    if pathlib.Path(path).is_dir():
        return path, ""
    name, _, revision = path.partition("@")
    return name, revision


def _download(path: str, files: list[str]) -> str:
    """Download these files of NAME[@REVISION] and return their folder. Raises FileNotFoundError if that fails."""
    name, revision = name_and_revision(path)
    try:
        return huggingface_hub.snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=files,
            ignore_patterns=UNWANTED_FILES,
        )
    except (OSError, HFValidationError) as error:
        raise FileNotFoundError(
            f"{path} is neither a local folder nor a hub model that could be downloaded ({type(error).__name__}); "
            "check the name, the network, HF_HUB_OFFLINE and, for gated models, your hub token"
        ) from error


def fetch_folder(
    path: str,
    control: dist.ProcessGroup,
    scores: bool = False,
) -> str:
    """Call `resolve_folder` on every rank. A node's first rank downloads before the others. Collective on `control`."""
    if os.environ["LOCAL_RANK"] == "0":
        resolve_folder(path, scores)
    dist.barrier(group=control)
    return resolve_folder(path, scores)


def check_folder(folder: str, scores: bool = False) -> transformers.PretrainedConfig:
    """Refuse a model that cannot be loaded, before it is loaded. Returns its config.json.

    Raises FileNotFoundError if there are no weights, ValueError for broken files, and for those that an export could
    not copy (`copied_files`).
    """
    config = read_hf_config(folder, scores)
    for file in copied_files(folder):
        if file.name in TABLES:
            read_table(file)
    check_weights(pathlib.Path(folder), config)
    return config


def check_lengths(
    folder: str,
    config: transformers.PretrainedConfig,
    max_sequence_tokens: int,
    tensor_parallel: int,
) -> None:
    """Refuse a model that is too short for the configured lengths, or that `tensor_parallel` ranks cannot share.

    Only its config.json is needed. Raises ValueError with the numbers.
    """
    if max_sequence_tokens > config.max_position_embeddings:
        raise ValueError(
            f"sequences of up to {max_sequence_tokens} tokens do not fit into {folder}, which has "
            f"{config.max_position_embeddings} positions (max_position_embeddings); lower --data.max-prompt-tokens or "
            "--generator.max-completion-tokens, in SFT --max-sequence-tokens"
        )
    if has_states(config) and tensor_parallel > 1:
        raise ValueError(
            f"{folder} has gated delta nets, which are not split: tensor_parallel={tensor_parallel} must be 1, of "
            "trainers, references and generators; more trainer ranks share its weights by FSDP"
        )
    if config.num_key_value_heads % tensor_parallel or config.vocab_size % tensor_parallel:
        raise ValueError(
            f"{folder} has {config.num_key_value_heads} key-value heads and {config.vocab_size} vocabulary entries; "
            f"tensor_parallel={tensor_parallel} must divide both"
        )


def check_trainer(
    folder: str,
    config: transformers.PretrainedConfig,
    trainer: TrainerConfig,
) -> None:
    """Refuse a model that the trainer's ranks cannot share, or its optimizer not update.

    Only its config.json is needed. Raises ValueError with the numbers.
    """
    heads = config.num_attention_heads
    num_experts = config.num_experts if has_experts(config) else 0
    spread = trainer.expert_parallel
    refused = {
        "context_parallel=1: its gated delta nets have states that go through a whole row": (
            trainer.context_parallel > 1 and has_states(config)
        ),
        f"context_parallel x trainer.tensor_parallel to divide its {heads} heads, not {trainer.ranks_of_a_row}": (
            trainer.context_parallel > 1 and heads % trainer.ranks_of_a_row
        ),
        f"expert_parallel to divide its {num_experts} experts, not {spread}": (
            spread > 1 and (not num_experts or num_experts % spread)
        ),
        f"optimizer=adamw: Muon updates single matrices, and its {num_experts} experts are stacked": (
            trainer.optimizer == "muon" and num_experts
        ),
    }
    for need, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"{folder} needs trainer.{need}")


def copied_files(folder: str | pathlib.Path) -> list[pathlib.Path]:
    """List the files of a model folder that an export copies, by the names in COPIED_FILES and MORE_TEMPLATES.

    A link may lead into the folder itself, or from the hub cache's snapshots/REVISION/ to its blobs/. Raises
    ValueError for others: an exported model is given away, and must not contain a private file.
    """
    folder = pathlib.Path(folder)
    homes = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        homes.append(folder.resolve().parents[1] / "blobs")
    named = [folder / name for name in COPIED_FILES]
    named += sorted(folder.glob(MORE_TEMPLATES))
    files = [file for file in named if file.is_file()]
    for file in files:
        target = file.resolve()
        if not any(target.is_relative_to(home) for home in homes):
            raise ValueError(
                f"{file} is a link to {target}, which is not in the model's folder; put a copy of it there"
            )
    return files


def check_vocabulary(
    folder: str,
    tokenizer: transformers.PreTrainedTokenizerBase,
    scores: bool = False,
) -> None:
    """Refuse a tokenizer with more tokens than the embedding has rows, except for tokens that were added.

    Added tokens beyond the embedding are refused here if they end a completion. A data row with others is refused when
    it is read.
    """
    rows = read_hf_config(folder, scores).vocab_size
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"the tokenizer of {folder} has {tokenizer.vocab_size} tokens and the model vocab_size={rows}; bring the "
            "tokenizer of this model"
        )
    if tokenizer.eos_token_id >= rows:
        raise ValueError(
            f"the tokenizer of {folder} has the eos_token {tokenizer.eos_token!r} ({tokenizer.eos_token_id}), beyond "
            f"the model's vocab_size={rows}; bring the tokenizer of this model, or give its embedding more rows"
        )
    unknown = [token for token in stop_token_ids(folder, tokenizer) if token >= rows]
    if unknown:
        raise ValueError(
            f"{folder}/generation_config.json: eos_token_id has {unknown[0]}, beyond the model's vocab_size={rows}; "
            "correct it (without that file, in config.json)"
        )


def check_reference(
    folder: str,
    policy_folder: str,
    tokenizer: transformers.PreTrainedTokenizerBase,
) -> None:
    """Refuse a reference, or teacher, whose token ids differ from those of the policy's `tokenizer`.

    It must have every token of the policy under the same id, and an embedding row for every id that the policy can
    sample. Raises ValueError with the first token that differs.
    """
    ours = tokenizer.get_vocab()
    theirs = open_tokenizer(folder).get_vocab()
    different = [token for token, index in ours.items() if theirs.get(token) != index]
    if different:
        first = min(different, key=ours.get)
        raise ValueError(
            f"reference {folder} has another vocabulary than {policy_folder}: {len(different)} of {len(ours)} tokens, "
            f"the first is {first!r}, which is {ours[first]} and there {theirs.get(first, 'missing')}; take a model of "
            "the policy's family"
        )
    rows = read_hf_config(policy_folder).vocab_size
    their_rows = read_hf_config(folder).vocab_size
    if their_rows < rows:
        raise ValueError(
            f"reference {folder} has {their_rows} vocabulary entries and {policy_folder} {rows}; it must have at least "
            "as many, because the policy may sample any of them"
        )


def stop_token_ids(
    folder: str,
    tokenizer: transformers.PreTrainedTokenizerBase,
    more: Iterable[int] = (),
) -> list[int]:
    """List the tokens that end a completion: the tokenizer's EOS, `served_end_ids`, and `more`.

    Raises ValueError if one of `more` is not in the vocabulary, and what `served_end_ids` raises.
    """
    unknown = [token for token in more if token >= len(tokenizer)]
    if unknown:
        raise ValueError(f"generator.stop_token_ids: {unknown} are not among the {len(tokenizer)} tokens of {folder}")
    return sorted({tokenizer.eos_token_id, *served_end_ids(folder), *more})


def served_end_ids(folder: str | pathlib.Path) -> set[int]:
    """Return the tokens at which transformers ends a reply: those of generation_config.json, else of config.json.

    The tokenizer's EOS is not among them unless the file says so. Raises ValueError for something that is no token id.
    """
    files = [pathlib.Path(folder, name) for name in ("generation_config.json", "config.json")]
    file = next(filter(pathlib.Path.is_file, files), None)
    eos = read_table(file).get("eos_token_id") if file else None
    if eos is None:
        return set()
    named = eos if isinstance(eos, list) else [eos]
    if not all(type(token) is int for token in named):
        raise ValueError(f"{file}: eos_token_id is {eos!r}, not a token id or a list of them")
    return set(named)


def read_hf_config(folder: str, scores: bool = False) -> transformers.PretrainedConfig:
    """Read config.json and refuse what this project cannot train. Raises ValueError naming the field and the reason.

    scores: it must be a reward model, which is a sequence classifier with one output, instead of a language model.
    """
    path = pathlib.Path(folder) / "config.json"
    raw = read_table(path)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in families():  # first, since transformers' message is vaguer
        message = f"{folder} is a {model_type} model; only {', '.join(families())} models are supported"
        if "text_config" in raw:
            message += "; its part that reads text may be one of them, if you save it as a folder (docs/models.md)"
        raise ValueError(message)
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        architectures = [architectures]
    if scores and not architectures:
        architectures = ["nothing"]
    head = "head that scores" if scores else "language model head"
    ending = SCORES if scores else WRITES
    sees = "text_config" in raw and not scores
    for name in architectures:
        if not str(name).endswith((ending, SEES) if sees else ending):
            raise ValueError(f"{folder}: {name} in architectures has no {head}; use a ...{ending}")
    if raw.get("quantization_config") or raw.get("compression_config"):  # first: transformers fails on some of them
        raise ValueError(
            f"{folder}: quantized weights cannot be trained; use the checkpoint in bfloat16 that they were made from, "
            "whose config.json has no quantization_config"
        )
    for table in (raw, raw.get("text_config") or {}):
        for name, most in MOST.items():
            if isinstance(table.get(name), int) and not 1 <= table[name] <= most:
                raise ValueError(f"{path}: {name} is {table[name]}, not from 1 to {most:,}; {WAY_OUT}")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (StrictDataclassError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"{path} cannot be read: {shorten(one_line(str(error)), SHOWN_CHARACTERS)}") from error
    if sees:  # its part that reads text is trained
        if not isinstance(config.text_config, transformers.PretrainedConfig):
            raise ValueError(f"{path}: text_config is not for a {model_type} model; take it out, or {WAY_OUT}")
        ties_head = config.tie_word_embeddings  # what its part says is not read, neither by transformers nor by vLLM
        raw = raw["text_config"]
        config = config.text_config
        config.model_type = model_type
        config.tie_word_embeddings = ties_head
    if config.model_type != model_type:
        raise ValueError(
            f"{folder}: transformers reads a {model_type} model with layer_types as {config.model_type}, which is not "
            "supported; if all of its layers have the same sliding_window, take layer_types out of config.json"
        )
    heads = config.num_attention_heads
    key_value_heads = config.num_key_value_heads
    if heads % key_value_heads:
        raise ValueError(
            f"{path}: num_attention_heads={heads} is not a multiple of num_key_value_heads={key_value_heads}; {WAY_OUT}"
        )
    if scores and config.num_labels != 1:
        raise ValueError(
            f"{folder} has {config.num_labels} outputs (num_labels, id2label); a reward model must have 1, its score"
        )
    for reason in unsupported_fields(raw, config):
        raise ValueError(f"{folder}: {reason}")
    return config


# ---------------------------------------------------------------------------------------------------------------------
# The files as they lie on disk


def read_table(path: pathlib.Path) -> dict[str, Any]:
    """Read the JSON object that a file holds. Raises ValueError that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); {WAY_OUT}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a JSON object; {WAY_OUT}")
    return content


def check_weights(folder: pathlib.Path, config: transformers.PretrainedConfig) -> None:
    """Check that the weights are whole files with all tensors of config.json's model.

    Prints which tensors do not belong to that model, except those that an export carries along. Raises
    FileNotFoundError if there are no weights, ValueError if a tensor is missing, lies in two files, has another shape,
    a dtype that is not in FLOATS or values that are not finite, a head differs from the embedding that it is tied to,
    or a file is broken. All weights are read, which takes 0.2 s of a core for each GB besides the disk's time.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"model folder {folder} has no .safetensors files; other formats are not read")
    num_tensors = 0
    for file in files:
        with _opened(file) as tensors:
            num_tensors += len(tensors.keys())
    num_experts = getattr(config, "num_experts", None) or 1
    if config.num_hidden_layers * num_experts > num_tensors:  # before they are built
        raise ValueError(
            f"{folder}/config.json has num_hidden_layers={config.num_hidden_layers} of {num_experts} experts each, and "
            f"the .safetensors files only {num_tensors} tensors; bring the config.json of these weights"
        )
    expected = tensors_of(config)
    missing = dict(expected)
    found = {}  # the file of each tensor that is read
    carried = family_of(config).carried
    unread = {}  # the file of each other tensor
    for file in files:
        is_unwanted = any(file.match(pattern) for pattern in UNWANTED_FILES)
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 it is no dict
                if name.startswith(carried):
                    continue
                if name in found:  # trainer and vLLM would each take one, and not always the same
                    raise ValueError(
                        f"{folder} has {name} in {found[name].name} and in {file.name}, as after two saves; remove the "
                        "files of one (model.safetensors.index.json has the names of its own)"
                    )
                if name in missing:
                    found[name] = file
                    _check_tensor(
                        f"{file}: {name}",
                        name,
                        tensors,
                        missing.pop(name),
                    )
                elif name not in expected and not name.endswith(COMPUTED) and not is_unwanted:
                    unread[name] = file
    if missing:
        raise ValueError(
            f"the .safetensors files of {folder} lack {len(missing)} tensors of config.json's model, the first is "
            f"{min(missing)}; {WAY_OUT}"
        )
    if HEAD in unread and not gives_scores(config):  # config.json ties it to the embedding
        head = _read_tensors([unread.pop(HEAD)], HEAD)[HEAD]
        embedding = next(name for name in expected if name.endswith(EMBEDDING.removeprefix("model.")))
        if not torch.equal(head, _read_tensors(files, embedding)[embedding]):
            raise ValueError(
                f"{folder} has an {HEAD} that differs from {embedding}, and config.json ties them; set "
                "tie_word_embeddings to false in it to train both, or take the head out of the file to train without it"
            )
    if unread:
        names = ", ".join(sorted(unread)[:SHOWN_TENSORS])
        message = f"{len(unread)} tensors of {folder} belong to no weight of config.json's model, such as {names}"
        print(printable(f"warning: {message}; they are not read, and an export lacks them"), flush=True)


def weights_checksum(folder: str) -> str:
    """Return a checksum of each tensor's name, dtype, shape and rows from its middle.

    So other weights under the same name are noticed; a change of a few other rows may not be. Reading all of them would
    take as long as loading. How tensors are spread over files does not matter. The folder must be checked.
    """
    facts = {}
    for file in pathlib.Path(folder).glob("*.safetensors"):
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 it is no dict
                tensor = tensors.get_slice(name)
                shape = tensor.get_shape()
                middle = shape[0] // 2 if shape else 0
                rows = tensor[middle : middle + CHECKED_ROWS] if shape else tensors.get_tensor(name)
                facts[name] = (tensor.get_dtype(), shape, zlib.crc32(rows.double().numpy().tobytes()))
    return f"{zlib.crc32(repr(sorted(facts.items())).encode()):08x}"


def carried_tensors(folder: str) -> dict[str, Tensor]:
    """Read the tensors of a folder that are not trained, and that an export carries along."""
    carried = family_of(read_hf_config(folder)).carried
    return _read_tensors(sorted(pathlib.Path(folder).glob("*.safetensors")), carried)


def _read_tensors(files: Iterable[pathlib.Path], beginnings: str | tuple[str, ...]) -> dict[str, Tensor]:
    """Read the tensors whose names begin like one of these."""
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(beginnings)]  # noqa: SIM118 it is no dict
            found |= {name: tensors.get_tensor(name) for name in names}
    return found


def tensors_of(config: transformers.PretrainedConfig) -> dict[str, torch.Size]:
    """Return name and shape of each tensor that a folder must have, from the model's module without memory."""
    module = empty_policy(config)
    names = family_of(config).names(module.config)
    shapes = {}
    for stacked_name, stacked in names.to_hf(module.state_dict()).items():
        for name, part in by_expert(stacked_name, stacked):
            shapes[name] = part.shape
    return shapes


@contextlib.contextmanager
def _opened(file: pathlib.Path) -> Iterator[safe_open]:
    """Open a .safetensors file. Raises ValueError that names it if it is broken, or no file, as a pipe."""
    if not file.is_file():
        raise ValueError(f"{file} is not a file, and no link to one; {WAY_OUT}")
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole .safetensors file ({error}); {WAY_OUT}") from error


def _check_tensor(
    label: str,
    name: str,
    tensors: safe_open,
    expected: torch.Size,
) -> None:
    """Refuse a weight of another shape, of a dtype that is not in FLOATS, or with values that are not finite."""
    lazy = tensors.get_slice(name)
    dtype = lazy.get_dtype()
    if lazy.get_shape() != list(expected):
        found = " x ".join(map(str, lazy.get_shape()))
        wanted = " x ".join(map(str, expected))
        raise ValueError(f"{label} is {found}, and by config.json {wanted}; bring the config.json of these weights")
    if dtype not in FLOATS:
        raise ValueError(
            f"{label} has dtype {dtype}, not one of {', '.join(FLOATS)}; quantized weights cannot be trained, so use "
            "the checkpoint that they were made from"
        )
    smallest, largest = tensors.get_tensor(name).aminmax()  # NaN if there is one; a tenth of the time of `isfinite`
    if not (smallest.isfinite() and largest.isfinite()):
        raise ValueError(f"{label} holds NaN or infinite values; {WAY_OUT}")
