"""What the model may call: functions and methods of the user, their schemas, and how one call is carried out.

Whatever the model can have caused becomes an answer that it reads: an unknown tool, wrong arguments, a tool that
raises. What it cannot have caused, such as a server that is down, is raised as `Lost`. Worker processes import this
module, so it imports little.
"""

import asyncio
import contextlib
import errno
import functools
import gc
import inspect
import json
import socket
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo import features
from grpo.config import EnvironmentConfig
from grpo.config.user_files import load_function, near_miss
from grpo.config.values import fits
from grpo.features.environments.calls import Arguments, ToolCall
from grpo.text import one_line, reason_of
from grpo.workers import worker
from grpo.workers.worker import Lost

# Optional public methods of a class that are not tools -> what the run calls them with
OPTIONAL_METHODS = {
    "reply": ["a text"],
    "get_reward": [],
    "get_info": [],
    "close": [],
}
# Errors of the system that are outages, beside a connection that breaks off. A call may have chosen an address that is
# not there or refuses, and may have used up what this process alone has: its memory and its descriptors.
OUTAGE_NUMBERS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENFILE,
    errno.EAGAIN,  # no more processes
    errno.EIO,
    errno.ENETDOWN,
    errno.ETIMEDOUT,
}


@dataclass(frozen=True)
class Toolbox:
    """The tools of a run, together with the class whose objects hold the state of a rollout."""

    functions: Mapping[str, Callable]
    """Tools without a state, by name."""
    kind: type | None = None
    """The class. None if there are only functions."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for making an object of the class."""

    @property
    def name(self) -> str:
        """Name of the class, or `tools`."""
        return self.kind.__name__ if self.kind else "tools"

    @functools.cached_property
    def methods(self) -> dict[str, Callable]:
        """Public methods of the class, which are tools, by name and in TRL's order."""
        methods = {}
        for name, method in inspect.getmembers(self.kind, inspect.isroutine):
            if name not in ("reset", *OPTIONAL_METHODS) and not name.startswith("_"):
                methods[name] = method
        return methods

    @property
    def tools(self) -> dict[str, Callable]:
        """Table of functions and methods, by name. Methods are not bound to an object."""
        return {**self.functions, **self.methods}

    @property
    def has_reply(self) -> bool:
        """True if turns without a call get an answer too."""
        return hasattr(self.kind, "reply")

    @property
    def has_reward(self) -> bool:
        """True if an object of the class gives a reward."""
        return hasattr(self.kind, "get_reward")

    @functools.cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools, for the chat template. Raises ValueError for a tool that has none.

        This loads transformers, which worker processes do not need.
        """
        from transformers.utils import get_json_schema

        schemas = []
        for name, function in self.tools.items():
            try:
                schema = get_json_schema(function)
                arguments = schema["function"]["parameters"]["properties"]
                inspect.signature(function).bind_partial(**arguments)  # a model gives every argument by name
            except Exception as error:  # the library has its own, and raises others for odd type hints
                hint = "; a method that is no tool begins with _" if name in self.methods else ""
                raise ValueError(f"tool {name}: {one_line(str(error))}{hint}") from error
            schemas.append(schema)
        return schemas

    def reset_arguments(
        self,
        row: Mapping[str, Any],
        seed: int,
        rollout: int,
    ) -> Arguments:
        """Choose what `reset` gets: the columns that it names or, with `**row`, all; `seed` and `rollout` if named."""
        parameters = inspect.signature(self.kind.reset).parameters
        named = list(parameters)[1:]
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        arguments = {name: value for name, value in row.items() if takes_all or name in named}
        if "seed" in named:
            arguments["seed"] = seed
        if "rollout" in named:
            arguments["rollout"] = rollout
        return arguments

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError if `reset` needs a column that the rows do not have."""
        if self.kind is None:
            return
        names = ", ".join(columns) or "none, as without a recipe"
        what = (
            f"{self.name}.reset cannot be called with the rows' columns: {names} (name others with "
            "--data.columns NAME COLUMN, or give the argument a default)"
        )
        row = dict.fromkeys(columns)
        arguments = self.reset_arguments(row, seed=0, rollout=0)
        _check_call(self.kind.reset, what, [None], arguments)


def load_toolboxes(config: EnvironmentConfig) -> dict[str, Toolbox]:
    """Load and check the functions and classes of a config. Returns a toolbox for each class, by environment name.

    If there is only one, its name is empty. Raises ValueError, with the reason, for what cannot be used.
    """
    built_ins = features.offers("TOOLS")
    functions = []
    for spec in config.tools:
        if spec in built_ins:
            function = built_ins[spec](config)
        else:
            function = load_function(spec, f"environment.tools (built in: {', '.join(built_ins) or 'none'})")
        if not inspect.isroutine(function):
            raise ValueError(f"environment.tools {spec} is no function; write def ..., and a class as environment.name")
        functions.append(function)
    function_names = [function.__name__ for function in functions]
    by_name = {function.__name__: function for function in functions}
    toolboxes = {name: _load_class(spec, config, by_name) for name, spec in config.all_classes.items()}
    if not toolboxes:
        toolboxes[""] = Toolbox(by_name)
    for toolbox in toolboxes.values():
        names = [*function_names, *toolbox.methods]
        for name in toolbox.tools:
            if names.count(name) > 1:
                raise ValueError(f"two tools of a class and environment.tools are called {name}; rename one")
    return toolboxes


def _load_class(
    spec: str,
    config: EnvironmentConfig,
    functions: Mapping[str, Callable],
) -> Toolbox:
    """Load a class of the user and check it. Raises ValueError if it cannot be an environment."""
    kind = load_function(spec, "environment.name")
    if not inspect.isclass(kind):
        raise ValueError(f"environment.name {spec} is no class; write functions as environment.tools")
    toolbox = Toolbox(functions, kind, config.options)
    if not callable(getattr(kind, "reset", None)):
        raise ValueError(f"class {kind.__name__} has no method reset, which begins an episode")
    if not toolbox.tools and not toolbox.has_reply:
        raise ValueError(
            f"class {kind.__name__} can answer nothing; give it a public method, which is a tool, or reply"
        )
    _check_call(kind, f"class {kind.__name__} does not take environment.options {config.options}", [], config.options)
    for name, arguments in OPTIONAL_METHODS.items():
        method = getattr(kind, name, None)
        if method:
            given = ", ".join(arguments) or "no arguments"
            what = f"{kind.__name__}.{name} is no tool here, and is called with {given}"
            _check_call(method, what, [None, *arguments], {})
    return toolbox


def _check_call(
    function: Callable,
    what: str,
    arguments: list[Any],
    named: Mapping[str, Any],
) -> None:
    """Raise ValueError, with `what` and the reason, if a function does not take these arguments."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        raise ValueError(f"{what}: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# One call
# ---------------------------------------------------------------------------------------------------------------------


def run_call(
    toolbox: Toolbox,
    environment: Any,
    call: ToolCall,
) -> tuple[str, Literal["ok", "bad", "error"]]:
    """Carry out a call. Returns its answer, and how it went: `bad` if it fits no tool, `error` if the tool raised.

    environment: the object of the rollout, None without a class. Raises Lost for an outage, and MemoryError.
    """
    if call.name not in toolbox.tools:
        hint = near_miss(call.name, toolbox.tools)
        names = ", ".join(toolbox.tools) or "none"
        return f"There is no tool {call.name!r}{hint}. Tools: {names}.", "bad"
    function = toolbox.functions.get(call.name) or getattr(environment, call.name)
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function)
    arguments = dict(call.arguments)
    for name, value in call.arguments.items():  # some models write null for what they leave out
        parameter = signature.parameters.get(name)
        has_default = parameter is not None and parameter.default is not parameter.empty
        if value is None and has_default and not _has_type(value, hints.get(name)):
            del arguments[name]
    try:
        signature.bind(**arguments)
        for name, value in arguments.items():
            if not _has_type(value, hints.get(name)):
                raise TypeError(f"{name} cannot be {json.dumps(value)[:100]}")
    except TypeError as error:
        return f"{call.name}: {error}. It is {call.name}{signature}", "bad"
    try:
        result = await_result(function(**arguments))
        return _as_text(result), "ok"
    except (MemoryError, Lost):
        raise
    except BaseException as error:  # a tool of the user may raise anything, CancelledError too
        if is_outage(error):
            raise Lost(f"{call.name}: {reason_of(error)}") from error
        return reason_of(error), "error"


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process. All calls share it: a client works only in the loop that opened it.

    It also runs until the next call comes, because a client has things to do meanwhile, such as to answer pings. It
    does so on the main thread, where alone signals can be handled.
    """
    worker.wait = _wait_in_loop
    return asyncio.new_event_loop()


def _wait_in_loop(connection: socket.socket) -> None:
    """Let the tasks that calls have left go on until there is something to read."""
    loop = _event_loop()
    readable = asyncio.Event()
    # a task of the user may raise SystemExit, or close the loop; whoever reads then waits too
    with contextlib.suppress(BaseException):
        loop.add_reader(connection, readable.set)
        loop.run_until_complete(readable.wait())
    loop.remove_reader(connection)


def free_clients() -> None:
    """Free what an episode has left, such as an open client, while no call runs.

    If Python frees a client during a later call, its socket is closed, and a new socket may get the same number. A
    client of openai then closes itself in the running loop, by that number, and the new socket never hears anything.
    """
    if _event_loop.cache_info().currsize:
        gc.collect()


def await_result(result: Any) -> Any:
    """Return the result of a function of the user. An async function is run to its end first."""
    if inspect.isawaitable(result):
        return _event_loop().run_until_complete(result)
    return result


def _as_text(result: Any) -> str:
    """Write a result of a tool as the model reads it: as text, as JSON, or as the text parts of a message."""
    if not isinstance(result, dict | list):
        return str(result)
    if isinstance(result, list):
        kinds = {isinstance(part, dict) and part.get("type") for part in result}
        if "image" in kinds:
            raise TypeError("it is an image, which this model cannot read")
        if kinds == {"text"}:
            return "".join(part["text"] for part in result)
    return json.dumps(result, ensure_ascii=False, default=str)


def is_outage(error: BaseException | None) -> bool:
    """Decide whether the machine or the network caused an error, or an error that it follows from.

    A timeout that the user's code sets itself is none: it has no number of the system.
    """
    while error is not None:
        is_broken_off = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
        has_number = isinstance(error, OSError) and error.errno in OUTAGE_NUMBERS
        has_one = isinstance(error, BaseExceptionGroup) and any(map(is_outage, error.exceptions))
        if is_broken_off or has_number or has_one or isinstance(error, Lost):
            return True
        if error.__suppress_context__:
            error = error.__cause__
        else:
            error = error.__cause__ or error.__context__
    return False


def _has_type(value: Any, hint: Any) -> bool:
    """Check that a JSON value has the type of a hint. Hints that JSON has no values for allow every value."""
    kind = typing.get_origin(hint) or hint
    parts = typing.get_args(hint)
    if kind in (Literal, int, float):
        return fits(value, hint)
    if kind in (typing.Union, types.UnionType):
        return any(_has_type(value, part) for part in parts)
    if kind in (list, tuple):
        item_hint = parts[0] if kind is list and parts else None
        return isinstance(value, list) and all(_has_type(item, item_hint) for item in value)
    if kind in (str, bool, dict, type(None)):
        return isinstance(value, kind)
    return True
