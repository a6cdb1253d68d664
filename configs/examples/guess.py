"""Guess a number: an environment with one tool. --environment.name configs/examples/guess.py:Guess"""

import random


class Guess:
    def reset(self, seed: int, high: int = 16, **row) -> str:
        """Begin an episode. The text stands behind the row's prompt, which seeds leave empty. Columns come by name."""
        self.number, self.reward, self.done = random.Random(seed).randint(1, high), 0.0, False
        return f"I think of a number from 1 to {high}. Guess it."

    def guess(self, value: int) -> str:
        """Guess the number.

        Args:
            value: Your guess.
        """
        if value == self.number:
            self.reward, self.done = 1.0, True
            return "Right."
        return "Higher." if value < self.number else "Lower."

    def get_reward(self) -> float:
        return self.reward
