"""Hugging Face model folders, before anything is loaded: find or download one, refuse what cannot be trained.

The driver uses it at the start of a run, so it does without torchtitan, whose import takes seconds.
"""

import os
import pathlib

import torch.distributed as dist
import transformers

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # the ones whose frequencies do not change with the length


def resolve_folder(path: str) -> str:
    """A local folder as it is, a hub name as the folder it was downloaded to; FileNotFoundError says the way out."""
    folder = pathlib.Path(path)
    if folder.is_dir():
        for needed in ("config.json", "tokenizer_config.json"):
            if not (folder / needed).is_file():
                raise FileNotFoundError(
                    f"model folder {folder.resolve()} has no {needed}; it must be a Hugging Face folder"
                )
        return str(folder)
    if (
        path.startswith((".", "/", "~"))
        or path.count("/") != 1
        or (folder.parent.is_dir() and path.startswith("runs/"))
    ):
        raise FileNotFoundError(f"model folder {folder.absolute()} does not exist")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return huggingface_hub.snapshot_download(
            path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{path} is neither a local folder nor a hub model that could be downloaded ({type(error).__name__}); "
            "check the name, the network, HF_HUB_OFFLINE and, for gated models, your hub token"
        ) from error


def fetch_folder(path: str, control: dist.ProcessGroup) -> str:
    """`resolve_folder` on every node: its first rank downloads, the others then find it. Collective over `control`."""
    if os.environ["LOCAL_RANK"] == "0":
        resolve_folder(path)
    dist.barrier(group=control)
    return resolve_folder(path)


def check_folder(folder: str, max_sequence_tokens: int, tensor_parallel: int) -> None:
    """Refuse a model that cannot be loaded or is too short for the configured lengths, before it is loaded.

    Raises FileNotFoundError if there are no weights, ValueError with the numbers for what does not fit.
    """
    config = read_hf_config(folder)
    if not list(pathlib.Path(folder).glob("*.safetensors")):
        raise FileNotFoundError(f"model folder {folder} has no .safetensors files")
    if max_sequence_tokens > config.max_position_embeddings:
        raise ValueError(
            f"prompts and completions of up to {max_sequence_tokens} tokens do not fit into {folder}, which has "
            f"{config.max_position_embeddings} positions (max_position_embeddings); lower --data.max-prompt-tokens or "
            "--generator.max-completion-tokens"
        )
    if config.num_key_value_heads % tensor_parallel or config.vocab_size % tensor_parallel:
        raise ValueError(
            f"{folder} has {config.num_key_value_heads} key-value heads and {config.vocab_size} vocabulary entries; "
            f"tensor_parallel={tensor_parallel} must divide both"
        )


def check_reference(folder: str, policy_folder: str, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Refuse a reference, or teacher, that would read other tokens than the policy's `tokenizer` writes.

    It must have every token of the policy under the same id, and a row for every id that the policy can sample. Raises
    ValueError with the first token that differs.
    """
    ours, theirs = tokenizer.get_vocab(), transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    different = [token for token, index in ours.items() if theirs.get(token) != index]
    if different:
        first = min(different, key=ours.get)
        raise ValueError(
            f"reference {folder} has another vocabulary than {policy_folder}: {len(different)} of {len(ours)} tokens, "
            f"the first is {first!r}, which is {ours[first]} and there {theirs.get(first, 'missing')}; take a model of "
            "the policy's family"
        )
    rows, their_rows = read_hf_config(policy_folder).vocab_size, read_hf_config(folder).vocab_size
    if their_rows < rows:
        raise ValueError(
            f"reference {folder} has {their_rows} vocabulary entries and {policy_folder} {rows}; it must have at least "
            "as many, because the policy may sample any of them"
        )


def stop_token_ids(folder: str, tokenizer: transformers.PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a completion: the tokenizer's EOS and those of generation_config.json."""
    ids = {tokenizer.eos_token_id}
    if (pathlib.Path(folder) / "generation_config.json").is_file():
        more = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
        ids |= set(more if isinstance(more, list) else [] if more is None else [more])
    return sorted(ids)


def read_hf_config(folder: str) -> transformers.PretrainedConfig:
    """Read config.json and refuse what this project cannot train. Raises ValueError naming the field."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if config.model_type not in ("qwen3", "llama"):
        raise ValueError(f"{folder} is a {config.model_type} model; dense qwen3 and llama models are supported")
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{folder}: rope_type {rope_type} is not supported, only {', '.join(ROPE_TYPES)}")
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise ValueError(f"{folder}: attention_bias and mlp_bias are not supported; these models have none")
    return config
