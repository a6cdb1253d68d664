"""A remote environment of OpenEnv: its server runs elsewhere, each rollout has a session of its own there.

    --environment.name configs/examples/openenv_client.py:Remote
    --data.path configs/examples/toys.py:seeds --data.answer-column "" --data.columns seed seed
    --environment.options url http://localhost:8000 action message observation echoed_message task "Say something."

The model's turn, behind its thoughts, is the action. For several kinds of actions write a method for each, as `act` of
gymnasium_text.py is, which calls `self._client.step`. It needs `pip install openenv-core`, and a server that takes as
many sessions as rollouts are decoded at once (its `max_concurrent_envs`). Its test has a client of the same interface;
it was tried with the client and the server of openenv-core 0.3.0.
"""

import json

from openenv.core import GenericEnvClient

from grpo.workers.worker import Lost


class Remote:
    def __init__(self, url: str, action: str = "message", observation: str = "", task: str = ""):
        """action: the field of the server's action that the model writes. observation: the field that it reads; empty
        for all of them, as JSON."""
        self._client = GenericEnvClient(base_url=url).sync()
        self._action, self._observation, self._task = action, observation, task

    def reset(self, seed: int, **row) -> str:
        self.reward, self.done = 0.0, False
        return "\n\n".join(filter(None, [self._task, self._text(self._client.reset(seed=seed))]))

    def reply(self, text: str) -> str:
        """Take a step. If the server is gone, the rollout is left out of the loss; if it refuses, it is not."""
        try:
            result = self._client.step({self._action: text.rpartition("</think>")[2].strip()})
        except RuntimeError:  # the server's own word about the action
            raise
        except Exception as error:
            raise Lost(f"the server is gone: {error!r}") from error
        self.reward += result.reward or 0.0
        self.done = result.done
        return self._text(result)

    def get_reward(self) -> float:
        return self.reward

    def close(self):
        self._client.close()

    def _text(self, result) -> str:
        if self._observation:
            return str(result.observation[self._observation])
        return json.dumps(result.observation, ensure_ascii=False)
