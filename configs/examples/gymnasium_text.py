"""Gymnasium's environments as far as they are text: an observation that is text, or that is drawn as text.

    --environment.name configs/examples/gymnasium_text.py:TextGame
    --data.path configs/examples/toys.py:seeds --data.answer-column "" --data.columns seed seed
    --environment.options game FrozenLake-v1 task "Walk from S to G." actions '["left", "down", "right", "up"]'

It needs `pip install gymnasium`. Its test has a class of the same interface; it was tried with gymnasium 1.4.0.
"""

import re

import gymnasium

# How gymnasium colours the place where the player is.
COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m")


class TextGame:
    def __init__(
        self,
        game: str,
        task: str,
        actions: list | None = None,
        arguments: dict | None = None,
        render_mode: str | None = "ansi",
    ):
        """game: its name in gymnasium. actions: words for the numbers 0, 1, .. that the game takes; None if it takes
        text. arguments: more of gymnasium.make. render_mode: None if observations are text."""
        self._game = gymnasium.make(game, render_mode=render_mode, **(arguments or {}))
        self._actions, self._task = actions, task

    def reset(self, seed: int, **row) -> str:
        observation, _ = self._game.reset(seed=seed)
        self.reward, self.done = 0.0, False
        actions = f"\n\nActions: {', '.join(self._actions)}." if self._actions else ""
        return f"{self._task}\n\n{self._text(observation)}{actions}"

    def act(self, action: str) -> str:
        """Act, and see what comes of it.

        Args:
            action: One of the actions.
        """
        if self._actions and action not in self._actions:
            raise ValueError(f"the actions are {', '.join(self._actions)}")
        move = self._actions.index(action) if self._actions else action
        observation, reward, terminated, truncated, _ = self._game.step(move)
        self.reward += float(reward)
        self.done = bool(terminated or truncated)
        return self._text(observation) + ("\nThe game is over." if self.done else "")

    def get_reward(self) -> float:
        return self.reward

    def close(self):
        self._game.close()

    def _text(self, observation) -> str:
        text = observation if isinstance(observation, str) else self._game.render()
        return COLOURED.sub(r"[\1]", text).strip()
