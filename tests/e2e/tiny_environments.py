"""Environments for the tests of whole runs: random completions must play them."""

import time


class Digits:
    """Replies to each turn with its digits, three times; rewards by how many there were."""

    def __init__(self, loses: int = 0):
        """loses: every so many rollouts of a group have no reward."""
        self.loses = loses

    def reset(self, seed: int, rollout: int, **row) -> str | None:
        self.seen, self.turns, self.done, self.rollout = 0, 0, False, rollout
        return None if seed % 2 else "3+4"

    def reply(self, text: str) -> str:
        time.sleep(0.01)
        self.turns += 1
        self.seen += sum(character.isdigit() for character in text)
        self.done = self.turns == 3
        return "".join(character for character in text if character.isdigit())[:4] or "0"

    def get_reward(self) -> float:
        if self.loses and self.rollout % self.loses == 0:
            raise ConnectionError("the judge is down")
        return self.seen / 12

    def get_info(self) -> dict:
        return {"turns": self.turns}


class Echo:
    """Repeats a turn once."""

    def reset(self, question: str, **row) -> str:
        return f"Say {question}"

    def reply(self, text: str) -> str | None:
        self.done = True
        return text[:4]

    def get_reward(self) -> float:
        return -1.0
