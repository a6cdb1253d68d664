"""What a user's functions and classes become: tools with schemas, calls and their answers, refusals in one line."""

import errno
import pathlib
import subprocess
import sys

import pytest

from grpo.config import EnvironmentConfig
from grpo.config.user_files import load_function
from grpo.features.environments.calls import ToolCall
from grpo.features.environments.tools import Lost, Toolbox, load_toolboxes, run_call
from tests import ROOT

GUESS = f"{ROOT}/configs/examples/guess.py:Guess"
CALCULATOR = f"{ROOT}/configs/examples/calculator.py"
LOOK = 'def look(place: str) -> str:\n    """Look.\n\n    Args:\n        place: Where.\n    """\n'
ENVIRONMENT = "class Mine:\n    def reset(self, **row):\n        pass\n"


def load_toolbox(config: EnvironmentConfig) -> Toolbox:
    """The only one."""
    (toolbox,) = load_toolboxes(config).values()
    return toolbox


def toolbox_of(tmp_path: pathlib.Path, code: str, *, tools: tuple[str, ...] = (), **fields) -> Toolbox:
    """With {here} in tools and name for a file of this code."""
    (tmp_path / "mine.py").write_text(code)
    name, *tools = (spec.replace("{here}", f"{tmp_path}/mine.py") for spec in (fields.pop("name", ""), *tools))
    return load_toolbox(EnvironmentConfig(name=name, tools=tuple(tools), **fields))


def test_the_example_of_a_guess():
    toolbox = load_toolbox(EnvironmentConfig(name=GUESS))
    game = toolbox.kind(**toolbox.options)
    arguments = toolbox.reset_arguments({"high": 4, "question": "?"}, seed=7, rollout=2)
    assert arguments == {"high": 4, "question": "?", "seed": 7}
    assert game.reset(**arguments) == "I think of a number from 1 to 4. Guess it."
    answers = [run_call(toolbox, game, ToolCall("guess", {"value": number})) for number in (1, 2, 3, 4)]
    assert ("Right.", "ok") in answers and (game.done, game.get_reward()) == (True, 1.0)
    assert (toolbox.name, toolbox.has_reply, toolbox.has_reward) == ("Guess", False, True)
    (schema,) = toolbox.schemas
    assert schema["function"]["name"] == "guess" and schema["function"]["parameters"]["required"] == ["value"]


def test_the_example_of_functions():
    toolbox = load_toolbox(EnvironmentConfig(tools=(f"{CALCULATOR}:multiply", f"{CALCULATOR}:calculate")))
    assert (toolbox.name, toolbox.kind, list(toolbox.tools)) == ("tools", None, ["multiply", "calculate"])
    assert run_call(toolbox, None, ToolCall("multiply", {"a": 1.5, "b": 4})) == ("6.0", "ok")
    said, how = run_call(toolbox, None, ToolCall("calculate", {"expression": "2*3"}))
    assert said.startswith("6\n") and "boxed" in said and how == "ok"


def test_a_class_as_others_write_them(tmp_path):
    """Inherited and static methods are tools too, in the order of their names; private ones and attributes are none."""
    code = (
        "class Base:\n    def reset(self):\n        return None\n"
        '    def wait(self) -> str:\n        """Wait."""\n        return "waited"\n'
        "class Mine(Base):\n    done = False\n    max_turns = 3\n"
        "    def __init__(self, depth: int = 1):\n        self.depth = depth\n"
        '    @staticmethod\n    def add(a: int, b: int = 1):\n        """Add.\n\n        Args:\n'
        '            a: One.\n            b: Other.\n        """\n        return a + b\n'
        "    def reply(self, text):\n        return text\n    def close(self):\n        pass\n"
        "    def get_info(self):\n        return {}\n    def _private(self):\n        pass\n"
    )
    toolbox = toolbox_of(tmp_path, code, name="{here}:Mine", options={"depth": 4})
    assert list(toolbox.tools) == ["add", "wait"] and toolbox.has_reply and not toolbox.has_reward
    mine = toolbox.kind(**toolbox.options)
    assert mine.depth == 4 and toolbox.reset_arguments({"a": 1}, 2, 3) == {}
    assert run_call(toolbox, mine, ToolCall("wait", {})) == ("waited", "ok")
    assert run_call(toolbox, mine, ToolCall("add", {"a": 2})) == ("3", "ok")


REPLY = ENVIRONMENT + "    def reply(self, text):\n        pass"
MINE = {"name": "{here}:Mine"}


@pytest.mark.parametrize(
    "code, fields, words",
    [
        (LOOK, {"tools": ("{here}:lok",)}, r"\(built in: .*\) .* no function 'lok'; .* look"),
        (ENVIRONMENT + "    def look(self):\n        'Look.'", MINE | {"tools": ("{here}:look",)}, "two tools .* look"),
        (LOOK, {"name": "{here}:look"}, "look is no class; write functions as environment.tools"),
        (ENVIRONMENT, {"tools": ("{here}:Mine",)}, "a class as environment.name"),
        ("class Mine:\n    pass", MINE, "no method reset"),
        (ENVIRONMENT, MINE, "Mine can answer nothing; give it a public method"),
        (ENVIRONMENT + "    def act(self, x):\n        'Act.'", MINE, "act: .*x is missing a type .*begins with _"),
        (LOOK.replace("(place", "(*place"), {"tools": ("{here}:look",)}, "look: .*unexpected keyword argument 'place'"),
        ("def f(x: 'Nothing'):\n    'F.'", {"tools": ("{here}:f",)}, "tool f: .*'Nothing' is not defined"),
        (REPLY, MINE | {"options": {"depth": 3}}, "environment.options {'depth': 3}: .*unexpected"),
        (REPLY.replace("text", "mail, text"), MINE, "Mine.reply is no tool here, .* with a text: missing .*'text'"),
        ("1 / 0", MINE, "environment.name file .*, line 1: ZeroDivisionError"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, code, fields, words):
    if fields.get("tools") and "name" in fields:
        code = LOOK + code
    with pytest.raises(ValueError, match=words) as refused:
        _ = toolbox_of(tmp_path, code, **fields).schemas
    assert "\n" not in str(refused.value)


def test_a_column_that_reset_needs(tmp_path):
    code = "class Mine:\n    def reset(self, board, seed, size=3):\n        pass\n"
    code += "    def reply(self, text):\n        pass\n"
    toolbox = toolbox_of(tmp_path, code, name="{here}:Mine")
    toolbox.check_columns(["board"])
    assert toolbox.reset_arguments({"board": 1, "other": 2}, 3, 4) == {"board": 1, "seed": 3}
    with pytest.raises(ValueError, match="columns: boards .*--data.columns.*: missing .* 'board'"):
        toolbox.check_columns(["boards"])


CALLED = (
    "from typing import Literal\n"
    "def look(place: str, times: int = 1, far: bool | None = None, how: Literal['up', 'down'] = 'up', "
    "among: list[float] = ()) -> str:\n    'Look.'\n"
    "    if place == 'nowhere':\n        raise KeyError(place)\n"
    "    return {'seen': [place, times, far, how, *among]}\n"
)


@pytest.mark.parametrize(
    "name, arguments, answer, kind",
    [
        ("look", {"place": "é", "far": None, "among": [1, 2.5]}, '{"seen": ["é", 1, null, "up", 1, 2.5]}', "ok"),
        ("look", {"place": "a", "times": None, "how": None, "among": None}, '{"seen": ["a", 1, null, "up"]}', "ok"),
        ("lok", {}, "There is no tool 'lok' (did you mean look?). Tools: look.", "bad"),
        ("look", {}, "look: missing a required argument: 'place'. It is look(place: str, times: int = 1, far: ", "bad"),
        ("look", {"place": "a", "color": 1}, "look: got an unexpected keyword argument 'color'. ", "bad"),
        ("look", {"place": 1}, "look: place cannot be 1. ", "bad"),
        ("look", {"place": "a", "times": True}, "look: times cannot be true. ", "bad"),
        ("look", {"place": "a", "how": "left"}, 'look: how cannot be "left". ', "bad"),
        ("look", {"place": "a", "among": ["x"]}, 'look: among cannot be ["x"]. ', "bad"),
        ("look", {"place": "nowhere"}, "KeyError: 'nowhere'", "error"),
    ],
)  # fmt: skip
def test_what_a_call_answers(tmp_path, name, arguments, answer, kind):
    toolbox = toolbox_of(tmp_path, CALLED, tools=("{here}:look",))
    said, how = run_call(toolbox, None, ToolCall(name, arguments))
    assert (said[: len(answer)], how) == (answer, kind)


@pytest.mark.parametrize(
    "error, is_lost",
    [
        ("Lost('the server is down')", True),
        ("ConnectionResetError()", True),
        (f"OSError({errno.ENOSPC}, 'disk full')", True),
        (f"OSError({errno.ETIMEDOUT}, 'the connection')", True),
        ("ExceptionGroup('all tasks', [ValueError(), ConnectionResetError()])", True),
        (f"OSError({errno.ECONNREFUSED}, 'a port that the call names')", False),
        ("socket.gaierror(socket.EAI_AGAIN, 'a host that the call names')", False),
        ("TimeoutError('of the tool itself')", False),
        ("asyncio.CancelledError()", False),
        (f"OSError({errno.EMFILE}, 'files that calls have opened')", False),
        ("FileNotFoundError('what the model named')", False),
        ("SystemExit(503)", False),
    ],
)
def test_what_the_policy_cannot_have_caused(tmp_path, error, is_lost):
    """Also behind another error, which a client's library raises in its place."""
    body = "import asyncio, socket\nfrom grpo.features.environments.tools import Lost\n"
    body += f"def f():\n    'F.'\n    raise {error}\n"
    body += "def g():\n    'G.'\n    try:\n        f()\n    except BaseException:\n        raise ValueError('x')\n"
    toolbox = toolbox_of(tmp_path, body, tools=("{here}:f", "{here}:g"))
    for name in "fg":
        if is_lost:
            with pytest.raises(Lost):
                run_call(toolbox, None, ToolCall(name, {}))
        else:
            assert run_call(toolbox, None, ToolCall(name, {}))[1] == "error"


def test_memory_that_runs_out_is_left_to_the_worker(tmp_path):
    toolbox = toolbox_of(tmp_path, "def f():\n    'F.'\n    raise MemoryError", tools=("{here}:f",))
    with pytest.raises(MemoryError):
        run_call(toolbox, None, ToolCall("f", {}))


@pytest.mark.parametrize(
    "expression, answer",
    [
        ("-12*(3+4) // 5", "-17"), ("7/2 - 1_0.5e1", "-101.5"), ("0.1+0.2", "0.3"), ("1/3", "0.333333333333"),
        ("6×7÷2 % 4", "1"), ("2**-2", "0.25"), ("1/0", "division by zero"), ("9**9**9**9", "the exponent must be"),
        ("(" * 300 + "1" + ")" * 300, "the expression has 601 characters, more than 500"),
        ("(" * 240 + "1" + ")" * 240, "this is no expression of numbers"),
        ("*".join(["9e99"] * 99), "the number has too many"), ("a.b()", "only numbers, + - * / // % ** and"),
    ],
)  # fmt: skip
def test_the_calculator_of_the_examples(expression, answer):
    calculator = load_function(f"{CALCULATOR}:calculator", "tool")
    try:
        said = calculator(expression)
    except ValueError as error:
        assert str(error).startswith(answer)
    else:
        assert said == answer


def test_workers_load_no_large_library():
    program = "import sys, grpo.features.environments.tools as tools\nfrom grpo.config import EnvironmentConfig as E\n"
    program += f"tools.load_toolboxes(E(name={GUESS!r}))\n"
    program += "print([m for m in ('torch', 'transformers', 'vllm', 'jinja2') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr
