"""A trained model at Hugging Face's hub: its repository before the run, its files and card afterwards."""

from pathlib import Path

import httpx
from huggingface_hub import HfApi

from grpo.config.fields import ModelConfig
from grpo.models.hf_folder import name_and_revision
from grpo.text import reason_of

# Parameters of an earlier upload. Those in other pieces would stay beside the new one, and be loaded in its place.
PARAMETER_FILES = ("model*.safetensors", "model.safetensors.index.json")
# ValueError for a name or a card that the hub refuses, RuntimeError for a large file that does not arrive
HUB_ERRORS = (httpx.HTTPError, ValueError, RuntimeError, OSError)


def open_repository(name: str) -> str:
    """Return the whole name of the model repository `name`; if there is none, make a private one.

    Raises ValueError, with what to do, if nothing can be uploaded there from this machine.
    """
    api = HfApi()
    try:
        repository = api.create_repo(name, private=True, exist_ok=True).repo_id
        api.auth_check(repository, write=True)
    except HUB_ERRORS as error:
        raise ValueError(
            f"checkpoint.push_to_hub={name} cannot be written to ({reason_of(error)}); log in with `hf auth login` or "
            "set HF_TOKEN, to a token that may write, check the name, the network and HF_HUB_OFFLINE, or drop the field"
        ) from error
    return repository


def push(
    run_dir: str,
    repository: str,
    model: ModelConfig,
    recipe: str,
) -> str:
    """Upload a run's exported folder with a card, in place of parameters that are there.

    model: what was trained. recipe: the config's text, without secrets, for the card. Returns a line that says where
    the folder is, or why not and what to do.
    """
    folder = Path(run_dir) / "model"
    card = model_card(repository, model, recipe)
    (folder / "README.md").write_text(card, "utf-8")
    try:
        commit = HfApi().upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Trained with PlainRL",
            delete_patterns=list(PARAMETER_FILES),
        )
    except HUB_ERRORS as error:
        cause = error.__cause__ or error
        return f"warning: {folder} was not uploaded ({reason_of(cause)}); try `hf upload {repository} {folder} .`"
    return f"uploaded {folder}: {commit.repo_url}"


def model_card(repository: str, model: ModelConfig, recipe: str) -> str:
    """Write a model's card: its base and the recipe."""
    facts = ["library_name: transformers", "tags: [plainrl]"]
    if not model.is_built and not Path(model.path).exists():  # the hub refuses a base that it does not know
        name, _ = name_and_revision(model.path)
        facts.append(f"base_model: {name}")
    return "\n\n".join(
        [
            "\n".join(["---", *facts, "---"]),
            f"# {repository}",
            f"Trained from `{model.path}` with PlainRL. The recipe:\n\n```python\n{recipe.strip()}\n```\n",
        ]
    )
