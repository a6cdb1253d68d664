"""The user's own functions, named `path/file.py:function` in a config.

Layer 0: the standard library only. What the function must take and return is checked where it is used.
"""

import importlib.util
import inspect
import pathlib
import sys
from collections.abc import Callable, Mapping
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
    module = _load_file(file, what)
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ValueError(f"{what} file {file} has no function {name!r}; functions there: {', '.join(there) or 'none'}")
    return function


def check_options(function: Callable, options: Mapping[str, object], what: str, where: str) -> None:
    """Refuse options that are not keyword-only arguments of `function`.

    Args:
        what: the function as messages name it, e.g. "loss grpo".
        where: the config field that the options come from.

    Raises:
        ValueError: it names the unknown option and those that there are.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise ValueError(f"{where}: {what} has no option {name!r}; its options: {', '.join(known) or 'none'}")


def _load_file(file: str, what: str) -> ModuleType:
    path = pathlib.Path(file)
    if not path.is_file():
        raise ValueError(
            f"{what} file {path.absolute()} does not exist; give a path that holds from the folder the run starts in"
        )
    module_name = f"user_file {path.resolve()}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]  # half a module must not be found by the next call
        raise
    return module
