"""A trained model at Hugging Face's hub."""

from collections.abc import Iterator
from typing import Any


def problems(config: Any) -> Iterator[str]:
    """Yield that nothing is there to upload."""
    if not config.checkpoint.export:
        yield "checkpoint.push_to_hub uploads what checkpoint.export writes; set that, or drop the first"


def open_repository(config: Any) -> str:
    """Return the whole name of the repository, made if need be. Raises ValueError if it cannot be written to."""
    from grpo.features.hub import upload

    return upload.open_repository(config.checkpoint.push_to_hub)


def push(config: Any, repository: str) -> str:
    """Upload the exported folder with a card. Returns a line that says where it is, or why not."""
    from grpo.config.recipes import as_recipe
    from grpo.features.hub import upload
    from grpo.text import without_secrets

    shown = without_secrets(config)
    return upload.push(config.run_dir, repository, shown.model, as_recipe(shown))
