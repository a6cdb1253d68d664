"""What the model may call: a user's functions and the public methods of a user's class, their schemas, and one call.

Whatever the model can have caused is told to it: an unknown tool, wrong arguments, a tool that raises. What it cannot
have caused, as a server that is down, is raised as `Lost`. It imports little, because worker processes import it.
"""

import asyncio
import errno
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo.config import EnvironmentConfig
from grpo.config.user_files import load_function, near_miss
from grpo.environments.builtin import calculator, python_tool
from grpo.environments.calls import Call
from grpo.workers.programs import ProgramError
from grpo.workers.worker import Failure

BUILT_INS = ("calculator", "python")
# Public methods of a class that are no tools.
NOT_TOOLS = ("reset", "reply", "get_reward", "get_info", "close")
# Those of them that a class need not have -> what the run calls them with.
CALLED_WITH = {"reply": ("a text",), "get_reward": (), "get_info": (), "close": ()}
# What the run can tell `reset` beside the row.
RUN_FACTS = ("seed", "rollout")
# Errors that say something about the machine or the network, and nothing about the call.
OUTAGES = (ConnectionError, TimeoutError, ProgramError)
OUTAGE_NUMBERS = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM}
OUTAGE_NUMBERS |= {errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT}


class Lost(Failure):
    """Something failed that the policy cannot have caused: the rollout has no reward and is left out of the loss."""


@dataclass(frozen=True)
class Tool:
    """A function, or a method of the class, that the model may call."""

    function: Callable
    """As the class has it, if it is a method."""
    parameters: dict[str, inspect.Parameter]
    """Without `self`."""
    hints: dict[str, Any]
    is_method: bool = False


@dataclass(frozen=True)
class Toolbox:
    """All tools of a run, and the class whose objects hold a rollout's state."""

    name: str
    """The class's, or `tools`."""
    factory: Callable[[], Any] | None = None
    """Makes the object of one rollout; None if there are functions only."""
    tools: dict[str, Tool] = field(default_factory=dict)
    reset_parameters: dict[str, inspect.Parameter] = field(default_factory=dict)
    has_reply: bool = False
    """It answers turns without calls too."""
    has_reward: bool = False

    @functools.cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as a chat template gets them, JSON schemas. Raises ValueError for a docstring that lacks something.

        Loads transformers, which worker processes do without.
        """
        from transformers.utils import get_json_schema

        schemas = []
        for name, tool in self.tools.items():
            try:
                schemas.append(get_json_schema(tool.function))
            except Exception as error:  # that library has own ones, and raises others for odd type hints
                raise ValueError(f"tool {name}: {' '.join(str(error).split())}") from error
        return schemas

    def reset_arguments(self, row: dict[str, Any], seed: int, rollout: int) -> dict[str, Any]:
        """What `reset` gets: the row's columns that it takes, all with **row, and those RUN_FACTS that it names."""
        known = self.reset_parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        columns = {name: value for name, value in row.items() if takes_all or name in known}
        facts = dict(zip(RUN_FACTS, (seed, rollout), strict=True))
        return columns | {name: value for name, value in facts.items() if name in known}

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError if `reset` needs a column that rows do not have."""
        for name, parameter in self.reset_parameters.items():
            if parameter.default is parameter.empty and _is_named(parameter) and name not in (*columns, *RUN_FACTS):
                raise ValueError(
                    f"{self.name}.reset needs {name!r}{near_miss(name, columns)}, and rows have {', '.join(columns)}; "
                    f"name the column with --data.columns {name} COLUMN, or give the argument a default"
                )


def load_toolboxes(config: EnvironmentConfig) -> dict[str, Toolbox]:
    """The functions that a config names, with each of its classes, checked; the only toolbox has an empty name.

    Raises ValueError for what cannot be used, and why.
    """
    tools: dict[str, Tool] = {}
    for spec in config.tools:
        built_in = {"calculator": calculator, "python": python_tool(config)}.get(spec)
        function = built_in or _load(spec, "environment.tools")
        if inspect.isclass(function):
            raise ValueError(f"environment.tools {spec} is a class; write it as environment.name")
        if not inspect.isroutine(function):
            raise ValueError(f"environment.tools {spec} is {type(function).__name__} and no function; write def ...")
        _add(tools, function.__name__, _tool(function, spec))
    where = "environment.classes" if config.classes else "environment.name"
    found = {name: _of_class(spec, where, config, dict(tools)) for name, spec in config.all_classes.items()}
    found = found or {"": Toolbox("tools", tools=tools)}
    lacking = {}
    if not any(toolbox.tools for toolbox in found.values()):
        lacking = dict.fromkeys(("calls", "reply_as"), "no tools")
    if config.all_classes and not any(toolbox.has_reward for toolbox in found.values()):
        lacking["weight"] = "no get_reward"
    for name, what in lacking.items():
        if (value := getattr(config, name)) != getattr(EnvironmentConfig, name):
            names = " and ".join(toolbox.name for toolbox in found.values())
            raise ValueError(f"environment.{name}={value!r} does nothing: {names} has {what}; drop it")
    return found


def _load(spec: str, where: str) -> Any:
    if ":" not in spec:
        raise ValueError(
            f"{where} has no {spec!r}{near_miss(spec, BUILT_INS)}; built-in tools are {', '.join(BUILT_INS)}, your own "
            "are written path/file.py:function"
        )
    return load_function(spec, where)


def _of_class(spec: str, where: str, config: EnvironmentConfig, tools: dict[str, Tool]) -> Toolbox:
    """The toolbox of a user's class; its methods are added to `tools`."""
    if not inspect.isclass(kind := _load(spec, where)):
        raise ValueError(f"{where} {spec} is no class; write functions as environment.tools")
    if not callable(getattr(kind, "reset", None)):
        raise ValueError(
            f"class {kind.__name__} has no method reset, which begins an episode; write reset(self, **row)"
        )
    try:
        inspect.signature(kind).bind(**config.options)
    except TypeError as error:
        known = ", ".join(inspect.signature(kind).parameters) or "none"
        raise ValueError(
            f"class {kind.__name__} does not take environment.options {config.options}: {error}; its arguments: {known}"
        ) from error
    for name, given in CALLED_WITH.items():
        try:
            inspect.signature(getattr(kind, name, lambda *_: None)).bind(None, *given)
        except TypeError as error:
            raise ValueError(
                f"{kind.__name__}.{name} is no tool here: the run calls it with {', '.join(given) or 'no arguments'}, "
                f"which it does not take ({error}); give a tool another name"
            ) from error
    for name in dir(kind):  # in TRL's order, by name
        if not name.startswith("_") and name not in NOT_TOOLS and inspect.isroutine(method := getattr(kind, name)):
            is_bound = inspect.ismethod(method) or isinstance(inspect.getattr_static(kind, name), staticmethod)
            _add(tools, name, _tool(method, f"{kind.__name__}.{name}", is_method=True, skip=not is_bound))
    if not tools and not hasattr(kind, "reply"):
        raise ValueError(
            f"class {kind.__name__} can answer nothing; give it a public method, which is a tool, or reply(self, text)"
        )
    return Toolbox(
        name=kind.__name__,
        factory=functools.partial(kind, **config.options),
        tools=tools,
        reset_parameters=dict(list(inspect.signature(kind.reset).parameters.items())[1:]),
        has_reply=hasattr(kind, "reply"),
        has_reward=hasattr(kind, "get_reward"),
    )


def _tool(function: Callable, what: str, is_method: bool = False, skip: bool = False) -> Tool:
    """A tool, if it can be described to a model. skip: its first argument is `self`."""
    parameters = dict(list(inspect.signature(function).parameters.items())[skip:])
    own = "; a method that is no tool begins with _" if is_method else ""
    for name, parameter in parameters.items():
        if not _is_named(parameter):
            raise ValueError(f"tool {what} takes {parameter}; name each argument, so that a model can{own}")
        if parameter.annotation is parameter.empty:
            raise ValueError(f"tool {what} has no type hint for {name}; write {name}: str or the like{own}")
    if not (function.__doc__ or "").strip():
        raise ValueError(f"tool {what} has no docstring, from which the model learns what it does{own}")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # a hint may be any expression
        raise ValueError(f"tool {what} has a type hint that means nothing here: {in_words(error)}") from error
    return Tool(function, parameters, hints, is_method)


def _add(tools: dict[str, Tool], name: str, tool: Tool) -> None:
    if name in tools:
        raise ValueError(f"two tools of a class and environment.tools are called {name}; rename one")
    tools[name] = tool


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


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
    tool = toolbox.tools[call.name]
    arguments = _named(tool, call.arguments)
    if wrong := _wrong(tool, arguments):
        known = ", ".join(f"{name} ({_hint(tool.hints[name])})" for name in tool.parameters) or "none"
        return f"{call.name}: {wrong}. Its arguments: {known}.", "bad"
    function = getattr(environment, call.name) if tool.is_method else tool.function
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


def _named(tool: Tool, arguments: dict[str, Any] | str) -> dict[str, Any]:
    """Arguments by name. A text is the first one; where that is no text, it is read as JSON."""
    if isinstance(arguments, dict):
        return arguments
    name = next(iter(tool.parameters), None)
    if name is None:
        return {"": arguments} if arguments else {}
    if tool.hints[name] is not str:
        try:
            return {name: json.loads(arguments)}
        except (ValueError, RecursionError):
            pass
    return {name: arguments}


def _wrong(tool: Tool, arguments: dict[str, Any]) -> str:
    """What is wrong with the arguments of a call, empty if nothing."""
    for name in arguments:
        if name not in tool.parameters:
            return f"it takes no argument {name!r}{near_miss(name, tool.parameters)}"
    for name, parameter in tool.parameters.items():
        if name not in arguments:
            if parameter.default is parameter.empty:
                return f"the argument {name!r} is missing"
        elif not _fits(arguments[name], tool.hints[name]):
            return f"{name} must be {_hint(tool.hints[name])}, and is {json.dumps(arguments[name])[:100]}"
    return ""


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is what a type hint says; hints of other types hold for everything."""
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is typing.Annotated:
        return _fits(value, parts[0])
    if kind is Literal:
        return value in parts
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if kind in (list, tuple):
        return isinstance(value, list) and (kind is tuple or not parts or all(_fits(v, parts[0]) for v in value))
    if kind in (int, float):  # True is an int to Python
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind) if kind in (str, bool, dict, type(None)) else True


def _hint(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
