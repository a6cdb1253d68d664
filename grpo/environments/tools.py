"""What the model may call: a user's functions and the public methods of a user's class, their schemas, and one call.

Whatever the model can have caused is told to it: an unknown tool, wrong arguments, a tool that raises. What it cannot
have caused, as a server that is down, is raised as `Lost`. It imports little, because worker processes import it.
"""

import asyncio
import contextlib
import errno
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo.config import EnvironmentConfig
from grpo.config.user_files import load_function, near_miss
from grpo.environments.builtin import calculator, python_tool
from grpo.environments.calls import Call
from grpo.text import one_line
from grpo.workers.programs import ProgramError
from grpo.workers.worker import Failure

# Methods of a class that are no tools, though public, and that it need not have -> what the run calls them with.
CALLED_WITH = {"reply": ("a text",), "get_reward": (), "get_info": (), "close": ()}
# Errors that say something about the machine or the network, and nothing about the call.
OUTAGES = (ConnectionError, TimeoutError, ProgramError)
OUTAGE_NUMBERS = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM}
OUTAGE_NUMBERS |= {errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT}


class Lost(Failure):
    """Something failed that the policy cannot have caused: the rollout has no reward and is left out of the loss."""


@dataclass(frozen=True)
class Toolbox:
    """All tools of a run, and the class whose objects hold a rollout's state."""

    functions: Mapping[str, Callable]
    """Tools without a state, by their names."""
    kind: type | None = None
    """The class; None if there are functions only."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with which an object is made."""

    @property
    def name(self) -> str:
        """The class's, or `tools`."""
        return self.kind.__name__ if self.kind else "tools"

    @functools.cached_property
    def methods(self) -> dict[str, Callable]:
        """The class's tools, in TRL's order, by name."""
        public = [name for name in dir(self.kind) if not name.startswith("_") and name not in ("reset", *CALLED_WITH)]
        return {name: getattr(self.kind, name) for name in public if inspect.isroutine(getattr(self.kind, name))}

    @property
    def tools(self) -> dict[str, Callable]:
        """All of them, methods as the class has them."""
        return {**self.functions, **self.methods}

    @property
    def has_reply(self) -> bool:
        """Whether it answers turns without calls too."""
        return hasattr(self.kind, "reply")

    @property
    def has_reward(self) -> bool:
        """Whether its objects tell a reward."""
        return hasattr(self.kind, "get_reward")

    @functools.cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as a chat template gets them, JSON schemas. Raises ValueError for what cannot be told to a model.

        Loads transformers, which worker processes do without.
        """
        from transformers.utils import get_json_schema

        schemas = []
        for name, function in self.tools.items():
            try:
                schemas.append(get_json_schema(function))
                arguments = schemas[-1]["function"]["parameters"]["properties"]
                inspect.signature(function).bind_partial(**arguments)  # a model gives each by its name
            except Exception as error:  # that library has own ones, and raises others for odd type hints
                own = "; a method that is no tool begins with _" if name in self.methods else ""
                raise ValueError(f"tool {name}: {one_line(str(error))}{own}") from error
        return schemas

    def factory(self) -> Any:
        """The object of one rollout."""
        return self.kind(**self.options)

    def reset_arguments(self, row: Mapping[str, Any], seed: int, rollout: int) -> dict[str, Any]:
        """What `reset` gets: the row's columns that it takes, all with **row, and those facts of the run it names."""
        known = dict(list(inspect.signature(self.kind.reset).parameters.items())[1:])
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        columns = {name: value for name, value in row.items() if takes_all or name in known}
        return columns | {name: value for name, value in (("seed", seed), ("rollout", rollout)) if name in known}

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError if `reset` needs a column that rows do not have."""
        if self.kind is None:
            return
        try:
            inspect.signature(self.kind.reset).bind(None, **self.reset_arguments(dict.fromkeys(columns), 0, 0))
        except TypeError as error:
            raise ValueError(
                f"{self.name}.reset does not take rows with the columns {', '.join(columns) or 'none'}: {error}; name "
                "columns with --data.columns NAME COLUMN, or give its argument a default"
            ) from error


def load_toolboxes(config: EnvironmentConfig) -> dict[str, Toolbox]:
    """The functions that a config names, with each of its classes, checked; the only toolbox has an empty name.

    Raises ValueError for what cannot be used, and why.
    """
    built_ins = {"calculator": calculator, "python": python_tool(config)}
    functions = []
    for spec in config.tools:
        what = "environment.tools" if ":" in spec else f"environment.tools (built in: {', '.join(built_ins)})"
        functions.append(built_ins.get(spec) or load_function(spec, what))
        if not inspect.isroutine(functions[-1]):
            raise ValueError(f"environment.tools {spec} is no function; write def ..., and a class as environment.name")
    by_name = {function.__name__: function for function in functions}
    found = {name: _of_class(spec, config, by_name) for name, spec in config.all_classes.items()}
    found = found or {"": Toolbox(by_name)}
    for toolbox in found.values():
        names = [*(function.__name__ for function in functions), *toolbox.methods]
        if twice := [name for name in toolbox.tools if names.count(name) > 1]:
            raise ValueError(f"two tools of a class and environment.tools are called {twice[0]}; rename one")
    return found


def _of_class(spec: str, config: EnvironmentConfig, functions: Mapping[str, Callable]) -> Toolbox:
    """The toolbox of a user's class. Raises ValueError for one that cannot be played with."""
    where = "environment.classes" if config.classes else "environment.name"
    kind = load_function(spec, where)
    if not inspect.isclass(kind):
        raise ValueError(f"{where} {spec} is no class; write functions as environment.tools")
    toolbox = Toolbox(functions, kind, config.options)
    if not callable(getattr(kind, "reset", None)):
        raise ValueError(f"class {kind.__name__} has no method reset, which begins an episode")
    if not toolbox.tools and not toolbox.has_reply:
        raise ValueError(
            f"class {kind.__name__} can answer nothing; give it a public method, which is a tool, or reply"
        )
    what = f"class {kind.__name__} does not take environment.options {config.options}"
    try:
        inspect.signature(kind).bind(**config.options)
        for name, given in CALLED_WITH.items():
            what = f"{kind.__name__}.{name} is no tool here, and is called with {', '.join(given) or 'no arguments'}"
            inspect.signature(getattr(kind, name, lambda *_: None)).bind(None, *given)
    except TypeError as error:
        raise ValueError(f"{what}: {error}") from error
    return toolbox


# ---------------------------------------------------------------------------------------------------------------------
# One call
# ---------------------------------------------------------------------------------------------------------------------


def run_call(toolbox: Toolbox, environment: Any, call: Call) -> tuple[str, Literal["ok", "bad", "error"]]:
    """What a call answers, and how it went: bad is a call that fits no tool, error one whose tool raised.

    environment: the rollout's object, None without a class. Raises Lost for an outage, and MemoryError.
    """
    if call.name not in toolbox.tools:
        names = ", ".join(toolbox.tools) or "none"
        return f"There is no tool {call.name!r}{near_miss(call.name, toolbox.tools)}. Tools: {names}.", "bad"
    function = toolbox.functions.get(call.name) or getattr(environment, call.name)
    signature, hints = inspect.signature(function), typing.get_type_hints(function)
    arguments = _by_name(call.arguments, next(iter(signature.parameters), ""), hints)
    try:
        signature.bind(**arguments)
        for name, value in arguments.items():
            if not _fits(value, hints.get(name)):
                raise TypeError(f"{name} cannot be {json.dumps(value)[:100]}")
    except TypeError as error:
        return f"{call.name}: {error}. It is {call.name}{signature}", "bad"
    try:
        return _as_text(awaited(function(**arguments))), "ok"
    except (MemoryError, Lost):
        raise
    except (Exception, SystemExit) as error:  # whatever a user's tool may raise
        if is_outage(error):
            raise Lost(f"{call.name}: {in_words(error)}") from error
        return in_words(error), "error"


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The process's own, the same for all calls: a client that one of them opened belongs to it."""
    return asyncio.new_event_loop()


def awaited(result: Any) -> Any:
    """What a user's function or method returned; of an async one, once it is done."""
    return _loop().run_until_complete(result) if inspect.isawaitable(result) else result


def _as_text(result: Any) -> str:
    """A tool's result as the model reads it: text, JSON, or the parts of a message that are text."""
    parts = result if isinstance(result, list) else []
    if parts and all(isinstance(part, dict) and part.get("type") in ("text", "image") for part in parts):
        if any(part["type"] == "image" for part in parts):
            raise Lost("a tool answered with an image, which these models do not read; answer with text")
        return "".join(part["text"] for part in parts)
    is_json = isinstance(result, dict | list)
    return json.dumps(result, ensure_ascii=False, default=str) if is_json else str(result)


def is_outage(error: BaseException | None) -> bool:
    """Whether an error, or one that it follows from, says something about the machine or the network alone."""
    while error is not None:
        is_number = isinstance(error, OSError) and error.errno in OUTAGE_NUMBERS
        if isinstance(error, OUTAGES) or is_number or getattr(error, "infrastructure", False) is True:
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def in_words(error: BaseException) -> str:
    """`KeyError: 'x'`, or the kind alone."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _by_name(arguments: dict[str, Any] | str, first: str, hints: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name. A text is that of the `first`, read as JSON where that is no text; empty without a first."""
    if isinstance(arguments, dict):
        return arguments
    if hints.get(first) is not str:
        with contextlib.suppress(ValueError, RecursionError):
            return {first: json.loads(arguments)}
    return {first: arguments} if first or arguments else {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is what a type hint says; hints of other types hold for everything."""
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Literal:
        return value in parts
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if kind in (list, tuple):
        return isinstance(value, list) and (kind is tuple or not parts or all(_fits(v, parts[0]) for v in value))
    if kind in (int, float):  # True is an int to Python
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind) if kind in (str, bool, dict, type(None)) else True
