"""The user's own Python files: functions named `path/file.py:function` in a config, and recipes.

Layer 0: the standard library only. What a function must take and return is checked where it is used.
"""

import importlib.util
import inspect
import os
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType


def load_function(spec: str, what: str) -> Callable:
    """The function that `spec` (`path/file.py:function`) names; its file runs once, however many functions are taken.

    Args:
        what: what the function is for, e.g. "loss"; error messages begin with it.

    Raises:
        ValueError: `spec` is not of that form, the file does not exist or has no such function.
        Whatever the file raises when it runs.
    """
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name:
        raise ValueError(f"{what} {spec!r} names no function in a file; write path/file.py:function")
    if not pathlib.Path(file).is_file():
        raise ValueError(
            f"{what} file {os.path.abspath(file)} does not exist; give a path that holds from the folder the run "
            "starts in"
        )
    module = sys.modules.get(_module_name(file)) or run_file(file)
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ValueError(f"{what} file {file} has no function {name!r}; functions there: {', '.join(there) or 'none'}")
    return function


def run_file(file: str) -> ModuleType:
    """Run a Python file as a module, which replaces that of an earlier run; raises whatever the file raises."""
    name = _module_name(file)
    spec = importlib.util.spec_from_file_location(name, os.path.abspath(file))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module must not be found by the next call
        raise
    return module


def _module_name(file: str) -> str:
    return f"user_file {os.path.realpath(file)}"
