"""An environment of verifiers, a MultiTurnEnv with its data set and its rubric: `load_environment` of a module.

    --environment.name configs/examples/verifiers_env.py:Verifiers --data.path seeds:4096
    --environment.options module my_env arguments '{"num_examples": 100}'

A seed is a row of its data set. The model's turns are text: what calls tools as messages of OpenAI's API (ToolEnv), and
version 1 of verifiers, whose harness wants an endpoint to talk to, do not fit. It needs `pip install "verifiers<0.2"`.
Its test has a class of the same interface; it was tried with verifiers 0.1.14.
"""

import functools
import importlib

from verifiers import ClientConfig


@functools.cache
def loaded(module: str, arguments: tuple):
    """The environment, loaded once in each process."""
    return importlib.import_module(module).load_environment(**dict(arguments))


class Verifiers:
    def __init__(self, module: str, arguments: dict | None = None):
        self._env = loaded(module, tuple((arguments or {}).items()))

    async def reset(self, seed: int, **row) -> str:
        rows = self._env.get_dataset()
        # a client is made, and never asked: the engine of the run is
        self._state = await self._env.init_state(dict(rows[seed % len(rows)]), ClientConfig(), "")
        await self._env.setup_state(self._state)
        self._messages, self.done = list(self._state["prompt"]), False
        return "\n\n".join(message["content"] for message in self._messages)

    async def reply(self, text: str) -> str | None:
        turn = [{"role": "assistant", "content": text}]
        self._state["trajectory"].append({"prompt": list(self._messages), "completion": turn})
        self._messages += turn
        if await self._env.is_completed(self._state):
            return None
        answers = await self._env.env_response(self._messages, self._state)
        self._messages += answers
        self.done = await self._env.is_completed(self._state)
        return "\n\n".join(answer["content"] for answer in answers)

    async def get_reward(self) -> float:
        self._state["completion"] = self._messages[len(self._state["prompt"]) :]
        await self._env.rubric.score_rollout(self._state)
        return self._state["reward"]

    async def close(self):
        await self._env.cleanup(self._state)
