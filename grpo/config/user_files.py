"""The user's own Python files: functions named `path/file.py:function` in a config, and recipes."""

import difflib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from grpo.config.values import fits, settings

# In a text, as Python writes it: `path/file.py:function` with anything behind it, a chat template, a command's script
_NAMES_FILE = re.compile(r"""['" ](?=([^'"]+?\.(?:py(?=:\w)|(?:jinja|py|sh|ya?ml|toml)(?=['" ]))))""")


def load_function(spec: str, what: str) -> Callable:
    """Return the function or class that `spec` (`path/file.py:function`) names. Its file runs only once.

    Error messages begin with `what` the function is for, such as "loss". Raises ValueError if there is no such
    function, or if the file raises when it runs; then with the line and the cause.
    """
    file, _, name = spec.rpartition(":")
    path = os.path.abspath(file)
    if not file.endswith(".py") or not name:
        raise ValueError(f"{what} {spec!r} names no function in a file; write path/file.py:function")
    if not pathlib.Path(file).is_file():
        raise ValueError(f"{what} file {path} does not exist; give a path from the folder the run starts in")
    try:
        module = sys.modules.get(_module_name(file)) or run_file(file)
    except (Exception, SystemExit) as error:  # whatever a user's file may raise
        raise ValueError(f"{what} file {path}{cause_and_line(error, file)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        public = [key for key in own if not key.startswith("_")] or ["none"]
        raise ValueError(f"{what} file {file} has no function {name!r}; functions there: {', '.join(public)}")
    return function


def check_options(function: Callable, options: Mapping[str, Any], what: str, where: str, facts: Iterable = ()) -> None:
    """Compare options with a function's signature: they must be arguments with a default or behind a `*`.

    Messages name the function as `what`, such as "loss grpo", and the field with the options as `where`. `facts` are
    arguments that the run fills in; they are not suggested. Raises ValueError for an unknown option, and for a value of
    another type than its annotation, if that is bool, int, float or str.
    """
    if not isinstance(options, Mapping):
        raise ValueError(f"{where} is {options!r}; write a table such as '{{\"tolerance\": 0.01}}'")
    arguments = optional_arguments(function)
    for option, value in options.items():
        if option not in arguments:
            near = near_miss(option, [name for name in arguments if name not in facts])
            raise ValueError(
                f"{what} has no option {option!r}{near}; its options (arguments with a default or behind a *) are: "
                f"{', '.join(arguments) or 'none'}"
            )
        kind = arguments[option].annotation
        if kind in (bool, int, float, str) and not fits(value, kind):
            raise ValueError(f"{where}: {option} is {value!r} ({type(value).__name__}), not {kind.__name__}")


def optional_arguments(function: Callable) -> dict[str, inspect.Parameter]:
    """Return a function's arguments that have a default or stand behind a `*`."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY or p.default is not p.empty}


def near_miss(name: str, names: Iterable[str]) -> str:
    """Write ` (did you mean tokens?)` if one of the names is similar, behind its last dot, else nothing."""
    by_last_part = {name.rpartition(".")[2]: name for name in names}
    _, _, last_part = name.rpartition(".")
    for close in difflib.get_close_matches(last_part, by_last_part, n=1):
        return f" (did you mean {by_last_part[close]}?)"
    return ""


def run_file(file: str) -> ModuleType:
    """Run a Python file as a module, which replaces the module of an earlier run. Raises whatever the file raises.

    The file may import its neighbours: its folder is searched last, now and whenever one of its functions imports.
    """
    folder = os.path.dirname(os.path.abspath(file))
    if folder not in sys.path:
        sys.path.append(folder)
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


def own_files(config: Any) -> dict[str, str]:
    """Return the texts of the user's files that a config names, and of modules beside them, by the files' names.

    These are files of functions, chat templates and what an agent's command names. Modules from the folder of such a
    file are those that were imported so far. A file with the name of another one gets its folder's name in front.
    """
    paths: dict[str, None] = {}
    for path in _NAMES_FILE.findall(repr(settings(config))):
        if os.path.isfile(path):
            paths[os.path.abspath(path)] = None
    folders = {os.path.dirname(path) for path in paths}
    for module in [*sys.modules.values()]:
        path = getattr(module, "__file__", None)
        if path and os.path.dirname(path) in folders and os.path.isfile(path):
            paths[path] = None
    texts = {}
    for path in map(pathlib.Path, paths):
        name = path.name
        folder = path.parent
        while name in texts:
            name = f"{folder.name}-{name}"
            folder = folder.parent
        texts[name] = path.read_text("utf-8", errors="replace")
    return texts


def cause_and_line(error: BaseException, file: str) -> str:
    """Write what a file raised while it ran, and the line if it is one of the file's, as `, line 12: KeyError: 'x'`."""
    path = os.path.abspath(file)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    words = str(error)
    if isinstance(error, SyntaxError) and error.filename == path:  # else its words name the file
        words = error.msg
        lines.append(error.lineno)
    if type(error) is not ValueError:
        words = f"{type(error).__name__}: {words}".removesuffix(": ")
    line = f", line {lines[-1]}" if lines else ""
    return f"{line}: {' '.join(words.split())}"


def _module_name(file: str) -> str:
    return f"user_file {os.path.realpath(file)}"
