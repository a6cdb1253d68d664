"""What is refused before a run starts: reward functions that cannot be called, and another base than before."""

import pathlib
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from configs.examples import toys
from configs.examples.toys import addition_tokenizer
from grpo.config import GRPOConfig, change
from grpo.models.hf_folder import weights_checksum
from grpo.rewards.pool import EPISODE_COLUMNS
from grpo.run.saved import Saved, begin_to_read, warn_of_secrets
from grpo.run.scorer import check_functions
from grpo.run.start import Start, note_weights
from tests.tiny_models import SMALL

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


def test_a_column_that_rewards_would_get_otherwise_is_refused(tmp_path: pathlib.Path):
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two models of one shape, with other weights."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = addition_tokenizer()
    made = [toys.make_model(folder / str(seed), tokenizer, seed, SMALL) for seed in (0, 1)]
    return str(made[0]), str(made[1])


def test_a_checksum_is_of_the_weights_and_not_of_their_files(folders: tuple[str, str], tmp_path: pathlib.Path):
    tensors = load_file(f"{folders[0]}/model.safetensors")
    names = sorted(tensors)
    for part, some in enumerate((names[1:], names[:1])):
        save_file({name: tensors[name] for name in some}, tmp_path / f"model-{part}.safetensors", {"format": "pt"})
    assert weights_checksum(str(tmp_path)) == weights_checksum(folders[0]) != weights_checksum(folders[1])
    name = names[0]
    changed = (
        {name: tensors[name].bfloat16()},
        {name: tensors[name].T.contiguous()},
        {"another name": tensors[name]},
    )
    checksums = {weights_checksum(folders[0])}
    for part in changed:
        save_file(part, tmp_path / "model-1.safetensors")
        checksums.add(weights_checksum(str(tmp_path)))
    assert len(checksums) == 1 + len(changed)


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
def test_other_weights_than_the_checkpoint_relies_on_are_refused(folders, changes, checked, monkeypatch):
    """A path stays the same while the files in it change, so a run would go on with another base, and nobody knew."""
    monkeypatch.setattr("grpo.models.hf_folder.resolve_folder", lambda path, scores=False: path)
    config = change(GRPOConfig(), changes)

    def note(folder: str, state: dict) -> dict[str, dict[str, str]]:
        saved = Saved(None, state, begin_to_read(config, state))
        reward_model = folder if config.reward.model else ""
        note_weights(config, Start(saved, SimpleNamespace(folder=folder), folder, reward_model=reward_model))
        return saved.read.facts

    state = {"step": 7, "read": note(folders[0], {})}
    assert list(state["read"]["weights"]) == [f"the weights of {name}" for name in checked]
    assert note(folders[0], state) == state["read"]
    if not checked:
        note(folders[1], state)
        return
    message = (
        f"weights of {checked[0]}: checksum {weights_checksum(folders[0])} -> checksum {weights_checksum(folders[1])}"
    )
    with pytest.raises(ValueError, match=message):
        note(folders[1], state)
