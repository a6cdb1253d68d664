"""Where compiled code is kept."""

import os

import pytest
import torch

from grpo.libraries import CACHE_VARIABLE, CACHES, keep_caches
from grpo.models import attention
from grpo.roles.engine import vllm_engine

ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
OWN_VARIABLES = (*CACHES, CACHE_VARIABLE, ENABLED)


@pytest.fixture
def environment(monkeypatch, tmp_path) -> pytest.MonkeyPatch:
    """None of the variables set, and a home of its own."""
    for name in OWN_VARIABLES:
        monkeypatch.setenv(name, "")  # so that what is set later is undone, too
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return monkeypatch


def test_default_is_in_the_users_cache(environment, tmp_path):
    keep_caches()
    folder = f"{tmp_path}/home/.cache/grpo"
    assert {os.environ[name] for name in CACHES} == {f"{folder}/{part}" for part in CACHES.values()}
    assert os.environ[ENABLED] == "1"


def test_one_folder_for_all_except_where_a_librarys_own_variable_is_set(environment, tmp_path):
    environment.setenv(CACHE_VARIABLE, str(tmp_path / "mine"))
    environment.setenv("VLLM_CACHE_ROOT", "/elsewhere")
    environment.setenv(ENABLED, "0")
    keep_caches()
    assert os.environ["TRITON_CACHE_DIR"] == f"{tmp_path}/mine/triton"
    assert os.environ["VLLM_CACHE_ROOT"] == "/elsewhere" and os.environ[ENABLED] == "0"


def test_flash_attentions_cache_is_one_for_each_gpu_and_kind(monkeypatch, tmp_path):
    """Its preparing kernels are not found by the kind that they were compiled for."""
    variable = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delenv(variable, raising=False)
    attention.keep_kernels_apart()
    assert variable not in os.environ
    monkeypatch.setenv(variable, str(tmp_path))
    attention.keep_kernels_apart()
    assert os.environ[variable] == str(tmp_path / "sm90-gpu3")


def test_vllms_cache_is_one_for_each_gpu(monkeypatch, tmp_path):
    """Code that vLLM compiled on one GPU of a host fails on another, and it does not look which one it was."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    for _ in range(2):  # an engine asks again
        vllm_engine._set_environment(torch.device("cuda", 3))
        assert os.environ["VLLM_CACHE_ROOT"] == str(tmp_path / "gpu3")
