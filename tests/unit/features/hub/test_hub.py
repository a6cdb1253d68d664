"""`checkpoint.push_to_hub` with the real client of the hub, against a small server of the test's own."""

import contextlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from grpo.config import CheckpointConfig, ModelConfig, RewardConfig, SFTConfig
from grpo.config.checks import validate
from grpo.features import hub as feature
from grpo.features.hub import push
from grpo.features.hub.upload import open_repository
from grpo.run import session
from tests.hub import OWNER, hub_server  # noqa: F401

UPLOADED = SFTConfig(checkpoint=CheckpointConfig(push_to_hub="sums"))


def test_a_finished_run_is_uploaded_although_ctrl_c_came_in_its_last_step(monkeypatch, capsys):
    @contextlib.contextmanager
    def watched(roles, deadline_minutes):
        yield SimpleNamespace(exit_if_interrupted=lambda: sys.exit(130))

    def finished(*arguments):
        return SimpleNamespace(repository="me/model", is_exported=True, saver=None)

    monkeypatch.setattr(session, "watched", watched)
    monkeypatch.setattr(session, "Session", finished)
    monkeypatch.setattr(feature, "push", lambda config, repository: f"uploaded to {repository}")
    monkeypatch.setattr(session, "setup_roles", lambda *arguments, **options: SimpleNamespace(name="trainer"))
    with pytest.raises(SystemExit) as ended:
        session.run(UPLOADED, "train_sft.py", None, lambda config, session: None)
    assert ended.value.code == 130 and "uploaded to me/model" in capsys.readouterr().out


def test_nothing_to_upload_is_refused():
    with pytest.raises(ValueError, match="push_to_hub uploads what checkpoint.export writes"):
        validate(replace(UPLOADED, checkpoint=CheckpointConfig(push_to_hub="sums", export=False)))


@pytest.fixture
def config(tmp_path) -> SFTConfig:
    """Of a run that is over: an exported folder, a recipe."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    options = {"judge.py:Judge": {"x-api-key": "it's ours", "tokens": 256}, "b.py:b": {"url": "http://me:ours@host"}}
    return SFTConfig(
        run_dir=str(tmp_path),
        model=ModelConfig(path="someone/base@v2"),
        reward=RewardConfig(options=options),
        checkpoint=CheckpointConfig(push_to_hub="sums"),
    )


def test_the_exported_folder_and_a_card_reach_a_private_repository(hub, config, tmp_path):
    repository = open_repository("sums")
    assert repository == f"{OWNER}/sums"
    assert [(made["name"], made["visibility"]) for made in hub.created] == [("sums", "private")]
    assert f"{hub.url}/{OWNER}/sums" in push(config, repository)
    assert hub.files.keys() == {"README.md", "config.json", "model.safetensors"}
    assert hub.files["model.safetensors"] == b"weights"
    card = hub.files["README.md"].decode()
    assert "config = c.SFTConfig(\n" in card and "base_model: someone/base\n" in card
    shown = "{'judge.py:Judge': {'x-api-key': '...', 'tokens': 256}, 'b.py:b': {'url': 'http://...@host'}}"
    assert f"options={shown}" in card and "ours" not in card


def test_weights_of_an_earlier_upload_do_not_stay(hub, config):
    """Those in pieces, whose index vLLM would follow; another's files stay."""
    earlier = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    hub.files = dict.fromkeys([*earlier, "notes.md", "adapter_model.safetensors"], b"earlier")
    push(config, f"{OWNER}/sums")
    kept = {"notes.md", "adapter_model.safetensors"}
    assert hub.files.keys() == {"README.md", "config.json", "model.safetensors", *kept}


@pytest.mark.parametrize("refused", ["/api/repos/create", "/auth-check"])
def test_what_may_not_be_written_is_refused_before_the_run(hub, refused):
    """Neither a new repository of others, nor one that exists and is theirs."""
    hub.refuses = refused
    with pytest.raises(ValueError, match="push_to_hub=other/sums cannot be written.*HF_TOKEN"):
        open_repository("other/sums")


def test_without_a_network_it_is_refused_before_the_run(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nobody listens there, nor will
    with pytest.raises(ValueError, match="push_to_hub=sums cannot be written.*the network"):
        open_repository("sums")


@pytest.mark.parametrize("refused", ["/commit/", "/validate-yaml"])
def test_an_upload_that_fails_says_how_to_try_again(hub, config, tmp_path, refused):
    hub.refuses = refused
    line = push(config, "somebody/sums")
    assert line.startswith("warning: ") and f"hf upload somebody/sums {tmp_path}/model" in line
