"""What people write for TRL runs as it is: rewards, tools, the classes of `environment_factory`."""

import contextlib
import inspect
import textwrap

import pytest

from grpo.config import DataConfig, EnvironmentConfig, RewardConfig
from grpo.config.user_files import load_function
from grpo.features.environments.host import EnvironmentHost
from grpo.features.environments.play import Episode, Player
from grpo.features.environments.suffix import Turns
from grpo.features.environments.tools import load_toolboxes
from grpo.rewards.loading import load_functions
from grpo.rewards.pool import EPISODE_COLUMNS, RewardPool
from grpo.types import Prompt, Rollout
from tests.rollouts import completion
from tests.unit import chat_templates as templates
from tests.unit.features.environments.conversations import call, played
from tests.unit.features.environments.test_turns_suffix import tokenizer_for

# A vault that opens by three digits; what it holds is asked of a client that belongs to one event loop.
FILE = '''
    import asyncio
    import numpy as np

    class VaultEnv:
        def __init__(self):
            self.client = None
            self.reward = 0.0

        def reset(self, prompt, code="000", **kwargs) -> str | None:
            self.code, self.done, self.tried, self._secret = code, False, [], "hidden"
            self.reward = np.float32(0.0)
            return f"The vault has {len(code)} digits."

        def try_digit(self, place: int, digit: str) -> str:
            """
            Try one digit.

            Args:
                place: Place of the digit, from 0.
                digit: The digit.
            """
            if self.done:
                raise ValueError("The vault is open.")
            self.tried.append([place, digit])
            fits = self.code[place] == digit
            self.reward += fits / len(self.code)
            return "It clicks." if fits else "Nothing."

        async def listen(self) -> list:
            """
            Listen at the door.
            """
            if self.client is None:
                self.client = asyncio.get_running_loop().create_future()
                asyncio.get_running_loop().call_later(0.01, self.client.set_result, None)
            await asyncio.shield(self.client)
            return [{"type": "text", "text": "A clock "}, {"type": "text", "text": "ticks."}]

        def photograph(self) -> list:
            """
            Photograph the door.
            """
            return [{"type": "image", "image": object()}]

        async def get_reward(self) -> float:
            await asyncio.sleep(0)
            return self.reward

    async def search(query: str, limit: int = 3) -> dict:
        """
        Search the archive.

        Args:
            query: What to look for.
            limit: How many entries at most.

        Returns:
            The entries.
        """
        await asyncio.sleep(0)
        if not query:
            raise ValueError("empty query")
        return {"entries": [query] * limit}

    def reward_func(environments, **kwargs):
        return [env.reward for env in environments]

    async def tries(prompts, completions, environments, **kwargs) -> list[float]:
        await asyncio.sleep(0)
        return [-0.1 * len(environment.tried) for environment in environments]

    def asks_too_much(environments, **kwargs):
        return [env.client.score() for env in environments]
'''
NAME, SEARCH = "vault.py:VaultEnv", "vault.py:search"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vault.py").write_text(textwrap.dedent(FILE))
    return tmp_path


def test_the_prompt_is_the_one_that_trl_writes(folder):
    """Its trainer adds what `reset` says to the last message, and shows the functions, then the methods by name."""
    vault = load_function(NAME, "environment")()
    data = DataConfig(system_prompt="")
    (toolbox,) = load_toolboxes(EnvironmentConfig(name=NAME, tools=(SEARCH,))).values()
    tokenizer = tokenizer_for(templates.QWEN2)
    turns = Turns(tokenizer, data, [tokenizer.convert_tokens_to_ids("<|im_end|>")], toolbox.schemas)
    methods = [method for name, method in inspect.getmembers(vault, inspect.ismethod) if name[0] != "_"]
    tools = [load_function(SEARCH, "tool"), *(m for m in methods if m.__name__ not in ("reset", "get_reward"))]
    system = {"role": "system", "content": "Be quick."}
    for prompt in ([system, {"role": "user", "content": "Open it. "}], [{"role": "user", "content": ""}], "Open it."):
        said = vault.reset(prompt=prompt, code="12")
        *earlier, last = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        expected = tokenizer.apply_chat_template(
            [*earlier, {**last, "content": last["content"] + said}],
            tools=tools,
            add_generation_prompt=True,
            return_dict=False,
        )
        host = HostOf({"text": said})
        player = Player(EnvironmentConfig(name=NAME), host, {"": turns}, tokenizer, 10_000)
        player.begin([Episode(Prompt(0, [1], content=prompt), 0, 0, 0)], 10)
        (turn,) = player.collect([0], 1)
        assert turn.new_ids == expected and said in tokenizer.decode(expected)


class HostOf:
    """Gives one reply."""

    def __init__(self, reply: dict):
        self.replies = [reply | {"episode": 0}]

    def ask(self, *_):
        pass

    def poll(self, _):
        return [self.replies.pop()] if self.replies else []


def test_a_class_with_async_tools_and_its_reward_functions(folder):
    config = EnvironmentConfig(name=NAME, tools=(SEARCH,))
    names = [schema["function"]["name"] for schema in load_toolboxes(config)[""].schemas]
    assert names == ["search", "listen", "photograph", "try_digit"]
    host = EnvironmentHost(config, "hermes", 1)
    try:
        row = {"prompt": [{"role": "user", "content": "Open it."}], "code": "123"}
        begun, first, second, third, told = played(
            host,
            row,
            call("search", query="vaults", limit=1) + call("try_digit", place=0, digit="1"),
            call("listen") + call("search", query=""),
            call("listen"),  # the same client, so the same loop, in a later turn
        )
        assert begun["text"] == "The vault has 3 digits."
        assert first["answers"] == ['{"entries": ["vaults"]}', "It clicks."] and not first["ended"]
        assert second["answers"] == ["A clock ticks.", "ValueError: empty query"]
        assert second["counts"]["tool_errors"] == 1 and third["answers"] == ["A clock ticks."]
        assert told["reward"] == pytest.approx(1 / 3)
        # what is private or no plain value does not leave its process
        assert told["info"].keys() == {"reward", "code", "done", "tried"}
        _, told_so, _ = played(host, row, call("photograph"))
        assert "image" in told_so["answers"][0] and told_so["counts"]["tool_errors"] == 1
    finally:
        host.close()

    episode = {"opening": begun["text"], "turns": [], "reward": told["reward"], "info": told["info"], "failure": ""}
    rollout = completion([1], prompt=Prompt(0, [1], content="Open it."), episode=episode)
    reward = rewards_of("vault.py:reward_func", "vault.py:tries")
    load_functions(reward, ["prompt", "code", *EPISODE_COLUMNS])  # the check before a run
    (scored,) = scores(reward, rollout)
    assert scored.rewards == {"vault.py:reward_func": pytest.approx(1 / 3), "vault.py:tries": pytest.approx(-0.1)}
    (scored,) = scores(rewards_of("vault.py:asks_too_much"), rollout)
    assert "sees no client of an environment" in scored.failures["vault.py:asks_too_much"]


def rewards_of(*names: str, seconds: float = 600.0, **fields) -> RewardConfig:
    return RewardConfig(functions=dict.fromkeys(names, 1.0), num_workers=2, timeout_seconds=seconds, **fields)


def scores(reward: RewardConfig, *rollouts: Rollout) -> list[Rollout]:
    with contextlib.closing(RewardPool(reward, 16)) as pool:
        pool.submit(rollouts, len(rollouts))
        return pool.collect()


def test_a_tool_called_done_ends_nothing(folder):
    code = "class Mine:\n    def reset(self, **kwargs):\n        pass\n    def done(self) -> str:\n        'Say so.'\n"
    (folder / "mine.py").write_text(code + "        return 'noted'\n")
    host = EnvironmentHost(EnvironmentConfig(name="mine.py:Mine"), "hermes", 1)
    with contextlib.closing(host):
        _, reply, _ = played(host, {}, call("done"))
    assert reply["answers"] == ["noted"] and not reply["ended"]


AGENT = """
    def asks_then_answers(completions, answer, **kwargs):
        rewards = []
        for completion, right in zip(completions, answer, strict=True):
            queries = [c["function"]["arguments"]["query"] for m in completion for c in m.get("tool_calls") or ()]
            found = [(m["name"], m["content"]) for m in completion if m["role"] == "tool"]
            said = completion[-1]["content"]
            rewards.append(len(queries) + 10 * (found == [("search", "42 km")]) + 100 * (said == right))
        return rewards
"""


def test_reward_functions_of_an_agent_get_all_its_turns_with_their_calls(folder):
    """As TRL's trainer hands them over: calls as data, the answers of tools by name, and the last turn at the end."""
    (folder / "agent.py").write_text(textwrap.dedent(AGENT))
    turns = [
        {
            "text": call("search", query="how far?"),
            "tokens": 9,
            "calls": [{"name": "search", "arguments": {"query": "how far?"}}],
            "answers": ["42 km"],
        },
        {"text": "42", "tokens": 1, "answers": []},
    ]
    episode = {"opening": None, "turns": turns, "reward": None, "info": {}, "failure": ""}
    prompt = Prompt(0, [1], {"answer": "42"}, content=[{"role": "user", "content": "How far?"}])
    name = "agent.py:asks_then_answers"
    reward = rewards_of(name, "regex_match", options={"regex_match": {"pattern": "^42$"}})
    (scored,) = scores(reward, completion([1], prompt=prompt, episode=episode, text="42"))
    assert scored.rewards == {name: 111.0, "regex_match": 1.0}


REWARDS = """
    import asyncio
    import re

    def accuracy_reward(completions: list[list[dict]], solution: list[str], **kwargs) -> list[float]:
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if solution[i] in content else 0.0 for i, content in enumerate(contents)]

    def short_enough(completion_ids, max_len=2, **kwargs):
        return [float(len(ids) <= max_len) for ids in completion_ids]

    async def judge(prompts, completions, **kwargs):
        async def score(prompt, completion):
            await asyncio.sleep(0.01)
            return len(prompt[-1]["content"]) + len(completion[0]["content"]) + 100 * len(prompts)

        return await asyncio.gather(*map(score, prompts, completions))

    async def hangs(prompts, completions, **kwargs):
        await asyncio.sleep(3600)

    def watches(completions, trainer_state, **kwargs):
        return [float(trainer_state.global_step) for _ in completions]
"""


def test_reward_functions_of_conversational_rows(folder):
    """Messages, token ids, default arguments, and coroutines that see the whole step at once."""
    (folder / "mine.py").write_text(textwrap.dedent(REWARDS))
    names = [f"mine.py:{name}" for name in ("accuracy_reward", "short_enough", "judge")]
    options = {names[1]: {"max_len": 3}, "regex_match": {"pattern": "7"}}
    reward = rewards_of(*names, "regex_match", options=options)
    load_functions(reward, ["solution"])  # the check before a run
    rollouts = []
    for i, (text, ids) in enumerate([("so 7", [1, 2, 3]), ("so 8 or", [1, 2, 3, 4])]):
        prompt = Prompt(0, [1], {"solution": "7"}, content=[{"role": "user", "content": "3+4?"}])
        rollouts.append(completion(ids, prompt=prompt, index=i, text=text))
    scored = scores(reward, *rollouts)
    found = [[rollout.rewards[name] for name in (*names, "regex_match")] for rollout in scored]
    assert found == [[1.0, 1.0, 208.0, 1.0], [0.0, 0.0, 211.0, 0.0]]
    late = {"mine.py:hangs": "took longer than 2 s"}  # once, not for each
    assert [r.failures for r in scores(rewards_of("mine.py:hangs", seconds=2.0), *rollouts)] == [late] * 2
    with pytest.raises(ValueError, match="trainer_state is TRL's: take `step`"):
        load_functions(rewards_of("mine.py:watches"), ["solution"])
