"""What is refused before a run starts: reward functions that cannot be called, and another base than before."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from grpo.config import GRPOConfig, change
from grpo.models.hf_folder import weights_checksum
from grpo.rewards.pool import EPISODE_COLUMNS
from grpo.run.saved import Saved, begin_to_read, warn_of_secrets
from grpo.run.scorer import check_functions
from grpo.run.start import Start, note_models

FILE = """
def scored(completions, **columns):
    return [1.0] * len(completions)


class Silent:
    def reset(self, **row):
        pass

    def reply(self, text):
        return None
"""


def test_a_secret_that_the_folder_would_keep_is_named(capsys):
    options = {"judge.py:Judge": {"url": "https://me:123@host"}}
    warn_of_secrets(change(GRPOConfig(), {"reward.options": options}))
    assert "warning: reward.options holds what looks like a secret" in capsys.readouterr().out
    warn_of_secrets(GRPOConfig())
    assert not capsys.readouterr().out


def test_a_column_that_rewards_would_get_otherwise_is_refused(tmp_path):
    """Except the prompt's and the one that names a row's environment, which others read too."""
    mine = tmp_path / "mine.py"
    mine.write_text(FILE)
    alone = change(GRPOConfig(), {"reward.functions": {f"{mine}:scored": 1.0}})
    with_environment = change(alone, {"environment.name": f"{mine}:Silent"})
    for name in EPISODE_COLUMNS:
        check_functions(change(alone, {"data.columns": {name: name}}))
        with pytest.raises(ValueError, match=f"has {name}, but with an environment .* --data.columns my_{name} {name}"):
            check_functions(change(with_environment, {"data.columns": {name: name}}))
        with pytest.raises(ValueError, match=f"has {name}, but"):
            check_functions(change(with_environment, {"data.row": "a.py:f"}), [{"prompt": "", name: ""}])
    check_functions(change(with_environment, {"data.prompt_column": "messages"}))
    with pytest.raises(ValueError, match="has completion_ids, but"):
        check_functions(change(alone, {"data.columns": {"completion_ids": "ids"}}))


def test_a_checksum_is_of_the_weights_and_not_of_their_files(tmp_path):
    a, b = torch.rand(2, 3), torch.rand(4)

    def checksum(*files: dict[str, torch.Tensor]) -> str:
        for number, tensors in enumerate(files):
            save_file(tensors, tmp_path / f"model-{number}.safetensors", {"format": "pt"})
        return weights_checksum(str(tmp_path))

    whole = checksum({"a": a, "b": b})
    assert checksum({"b": b}, {"a": a}) == whole
    others = ({"a": a.bfloat16()}, {"a": a.T.contiguous()}, {"c": a}, {"a": -a})
    assert len({whole, *(checksum({"b": b}, other) for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("changes", "checked"),
    [
        ({"trainer.lora_rank": 4, "algorithm.kl_coef": 0.0}, ["model.path"]),
        ({"algorithm.kl_coef": 0.01}, ["model.path"]),
        ({"algorithm.kl_coef": 0.01, "model.reference_path": "other"}, ["model.reference_path"]),
        ({"algorithm.kl_coef": 0.01, "algorithm.reference_interval": 5}, []),  # it is in the checkpoint
        ({"algorithm.kl_coef": 0.0}, []),
        ({"algorithm.kl_coef": 0.0, "reward.model": "a reward model"}, ["reward.model"]),
    ],
)
def test_other_weights_than_the_checkpoint_relies_on_are_refused(changes, checked, monkeypatch):
    """A path stays the same while the files in it change, so a run would go on with another base, and nobody knew."""
    monkeypatch.setattr("grpo.models.hf_folder.resolve_folder", lambda path, scores=False: path)
    monkeypatch.setattr("grpo.models.hf_folder.weights_checksum", lambda folder: f"of {folder}")
    config = change(GRPOConfig(), changes)

    def note(weights: str, state: dict) -> dict[str, dict[str, str]]:
        saved = Saved(None, state, begin_to_read(config, state))
        scorer = SimpleNamespace(config=change(config, {"reward.model": weights if config.reward.model else ""}))
        note_models(config, Start(saved, SimpleNamespace(folder=weights), weights, scorer=scorer))
        return saved.read.facts

    state = {"step": 7, "read": note("old", {})}
    assert list(state["read"]["weights"]) == [f"the weights of {name}" for name in checked]
    assert note("old", state) == state["read"]
    refused = (
        pytest.raises(ValueError, match=f"weights of {checked[0]}: .* old -> .* new") if checked else nullcontext()
    )
    with refused:
        note("new", state)
