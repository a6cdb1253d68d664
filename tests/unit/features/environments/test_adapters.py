"""The example environments that carry other libraries' ones, each with a small package of that library's interface.

And the one that carries agents of OpenAI's interface, with its real client, a shell script, and what goes wrong.
"""

import contextlib
import os
import pathlib
import shutil
import sys
import textwrap

import pytest

from grpo.config import EnvironmentConfig
from grpo.features.environments.host import EnvironmentHost
from grpo.features.environments.tools import load_toolboxes
from tests import ROOT
from tests.unit.features.environments.conversations import call, played, say

EXAMPLES = ROOT / "configs" / "examples"
# A walk from 0 to 2, drawn with a colour; with render_mode None, the position is the observation, and text the action.
GYMNASIUM = """
    class Walk:
        def __init__(self, render_mode, start=0):
            self.render_mode, self.start = render_mode, start

        def reset(self, seed=None):
            self.at = self.start + seed % 2
            return self.seen(), {}

        def step(self, action):
            self.at += {0: -1, 1: 1, "on": 1}[action]
            return self.seen(), self.at / 2, self.at == 2, self.at < 0, {}

        def seen(self):
            return self.at if self.render_mode else f"at {self.at}"

        def render(self):
            return "\\n" + "".join(f"\\x1b[41m{n}\\x1b[0m" if n == self.at else str(n) for n in range(3)) + "\\n"

        def close(self):
            self.at = None

    def make(game, render_mode, **arguments):
        return {"Walk-v0": Walk}[game](render_mode, **arguments)
"""
OPENENV = """
    from dataclasses import dataclass

    @dataclass
    class StepResult:
        observation: dict
        reward: float | None = None
        done: bool = False

    class GenericEnvClient:
        def __init__(self, base_url):
            self.url = base_url

        def sync(self):
            return self

        def reset(self, seed=None):
            if self.url == "http://gone":
                raise ConnectionError("nobody is there")
            self.number = seed
            return StepResult({"text": "Which?", "tries": 0})

        def step(self, action):
            if action["guess"] in ("odd", "gone"):
                raise {"odd": RuntimeError, "gone": EOFError}[action["guess"]]()
            right = action["guess"] == str(self.number)
            return StepResult({"text": "Yes." if right else "No.", "tries": 1}, 0.5 if right else None, right)

        def close(self):
            self.url = None
"""


@pytest.fixture
def plays(tmp_path, monkeypatch):
    """Plays an episode of an example: replies to `reset` and to turns, and what `finish` says."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in (("gymnasium", GYMNASIUM), ("openenv/core", OPENENV)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text(textwrap.dedent(code))

    def play(example: str, options: dict, seed: int, *turns: str) -> list[dict]:
        config = EnvironmentConfig(name=f"{EXAMPLES}/{example}", options=options)
        _ = [toolbox.schemas for toolbox in load_toolboxes(config).values()]
        with contextlib.closing(EnvironmentHost(config, "hermes", 1)) as host:
            return played(host, {}, *turns, seed=seed)

    yield play
    for name in ("gymnasium", "openenv", "openenv.core"):
        sys.modules.pop(name, None)


def test_a_game_of_gymnasium(plays):
    options = {"game": "Walk-v0", "task": "Walk to 2.", "actions": ["back", "on"], "arguments": {"start": 0}}
    begun, wrong, first, last, told = plays(
        "gymnasium_text.py:TextGame",
        options,
        2,
        call("act", action="up"),
        call("act", action="on"),
        call("act", action="on"),
    )
    assert begun["text"] == "Walk to 2.\n\n[0]12\n\nActions: back, on."
    assert wrong["answers"] == ["ValueError: the actions are back, on"] and wrong["counts"]["tool_errors"] == 1
    assert first["answers"] == ["0[1]2"] and not first["ended"]
    assert last["answers"] == ["01[2]\nThe game is over."] and last["ended"] and told["reward"] == 1.5
    options = {"game": "Walk-v0", "task": "Walk.", "render_mode": None}  # whose actions and observations are text
    begun, only, told = plays("gymnasium_text.py:TextGame", options, 1, call("act", action="on"))
    assert (begun["text"], only["answers"]) == ("Walk.\n\nat 1", ["at 2\nThe game is over."])


def test_a_server_of_openenv(plays):
    options = {"url": "http://here", "action": "guess", "observation": "text"}
    begun, first, last, told = plays("openenv_client.py:Remote", options, 7, "4", "<think>7?</think>\n7")
    assert (begun["text"], first["answers"], first["ended"]) == ("Which?", ["No."], False)
    assert (last["answers"], last["ended"], told["reward"]) == (["Yes."], True, 0.5)
    begun, only, _ = plays("openenv_client.py:Remote", options | {"observation": "", "task": "Guess."}, 7, "7")
    assert begun["text"] == 'Guess.\n\n{"text": "Which?", "tries": 0}' and "Yes." in only["answers"][0]
    gone, _ = plays("openenv_client.py:Remote", {"url": "http://gone"}, 7)
    assert gone["kind"] == "lost" and "nobody is there" in gone["failed"]
    for word, kind in (("odd", "hung"), ("gone", "lost")):  # a word that the server refuses is the policy's
        assert plays("openenv_client.py:Remote", options, 7, word)[1]["kind"] == kind


# ---- An agent of OpenAI's interface ---------------------------------------------------------------------------------

CURL = """
ask() {
  curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $1" -d "$2" -o answer.json
}
cat > row.json
good='{"model": "m", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]}'
ask sk-of-another "$good"
ask "$OPENAI_API_KEY" '{"messages": [{"role": "user", "content": "?"}], "tools": [{}]}'
ask "$OPENAI_API_KEY" '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}'
ask "$OPENAI_API_KEY" "$good"
grep -c '"content": "Yes."' answer.json
"""
# Says that it lives, asks, and does what its word says
STUBBORN = """
import json, os, sys, time, urllib.request
open("pids", "a").write(f"{os.getpid()}\\n")
def ask(*messages):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"messages": [{"role": "user", "content": text} for text in messages]}).encode()
    return urllib.request.urlopen(urllib.request.Request(url, body, headers))
ask("first")
while sys.argv[1] == "stays":
    try:
        ask("again")
    except OSError:
        time.sleep(0.01)
if sys.argv[1] == "edits":
    ask("edited", "second")
if sys.argv[1] == "crashes":
    sys.exit(3)
"""


@pytest.fixture
def agents(tmp_path, monkeypatch):
    """Starts the environments of an agent in one process: a command in its own folder, or the example's own."""
    pytest.importorskip("openai")  # comes with vLLM
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    (tmp_path / "curl.sh").write_text(CURL)
    with contextlib.ExitStack() as stack:

        def start(agent: str) -> EnvironmentHost:
            config = EnvironmentConfig(name=f"{EXAMPLES}/openai_agent.py:Agent", options={"agent": agent})
            return stack.enter_context(contextlib.closing(EnvironmentHost(config, "", 1)))

        yield start


def cut_off(host: EnvironmentHost, episode: int) -> dict:
    """Play an episode whose first turn runs out of tokens."""
    say(host, episode, "reset", {}, 0, 0, "")
    assert say(host, episode, "turn", "and so on and", False, "", True)["ended"]
    return say(host, episode, "finish")


def test_an_agent_of_the_openai_client_and_one_of_curl(agents):
    begun, first, last, told = played(agents(""), {"question": "A number?"}, "4", " 7 ")
    assert (begun["text"], first["answers"], first["role"]) == ("A number?", ["Another one?"], "user")
    assert last["ended"] and told["reward"] == 1.0
    assert played(agents(""), {}, "4", "4")[-1]["reward"] == 0.0
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    begun, only, told = played(agents("bash curl.sh"), {"a": 1}, "Yes.")
    assert begun["text"] == "Be brief.\n\nHello?" and only["ended"] and told["reward"] == 1.0
    assert pathlib.Path("row.json").read_text() == '{"seed": 0, "a": 1}'


@pytest.mark.parametrize("word", ["stays", "ends"])
def test_an_agent_that_is_cut_off_is_ended_and_leaves_nothing(agents, word):
    """As threads, five of them took all the memory of their process, in which the next episode could not begin."""
    host = agents(f"{sys.executable} stubborn.py {word}")
    for episode in range(6 if word == "ends" else 1):
        assert cut_off(host, episode) == {"reward": 0.0, "info": {"broke_off": False}}
        *_, pid = map(int, pathlib.Path("pids").read_text().split())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_agent_that_fails_or_edits_its_history(agents):
    (begun, crashed) = played(agents(f"{sys.executable} stubborn.py crashes"), {}, "x")[:2]
    assert begun["text"] == "first" and crashed["kind"] == "hung" and "exit status 3" in crashed["failed"]
    *_, ended, told = played(agents(f"{sys.executable} stubborn.py edits"), {}, "x")
    assert ended["ended"] and told == {"reward": 0.0, "info": {"broke_off": True}}
    nowhere = say(agents("no-such-command"), 0, "reset", {}, 0, 0, "")
    assert nowhere["kind"] == "lost" and "exit status 127" in nowhere["failed"]
