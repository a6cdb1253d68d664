"""A model that a user's function makes from nothing, which `model.path` names: configs/examples/toys.py has some."""

from collections.abc import Iterable
from pathlib import Path

from grpo.config.user_files import load_function
from grpo.config.values import names_function
from grpo.text import reason_of


def build_model(path: str, run_dir: str | Path, texts: Iterable[str], seed: int) -> str:
    """Have the user's function `path` (`path/file.py:function`) write `initial_model` in the run folder, and return it.

    The function gets that folder, `texts` (those of the data) and `seed`. Any other path is returned as it is. Raises
    ValueError with the reason if the function raises, and what `load_function` raises.
    """
    if not names_function(path):
        return path
    function = load_function(path, "model.path")
    folder = str(Path(run_dir) / "initial_model")
    try:
        function(folder, texts, seed)
    except Exception as error:  # whatever a user's function may raise
        raise ValueError(f"model.path {path} raised {reason_of(error)}; correct the function") from error
    return folder
