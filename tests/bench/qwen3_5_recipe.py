"""The recipe of qwen3_5.py's whole runs: the tiny one of the end-to-end tests, without the tuning of vLLM's kernels."""

from collections.abc import Callable
from typing import Any

import triton

from tests.e2e.tiny import config

__all__ = ["config"]


def take_first_kernels() -> None:
    """Have the first variant of each of vLLM's Triton kernels taken. Call it before vLLM is imported.

    For prompts of this family vLLM compiles and times 88 variants of six kernels, one after the other.
    """
    autotune = triton.autotune

    def first_only(configs: list[triton.Config], *arguments: Any, **options: Any) -> Callable[..., Any]:
        return autotune(configs[:1], *arguments, **options)

    triton.autotune = first_only


take_first_kernels()
