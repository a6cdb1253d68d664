"""Conversations with environment processes, for tests."""

from grpo.features.environments.calls import written_call
from grpo.features.environments.host import EnvironmentHost


def say(host: EnvironmentHost, episode: int, do: str, *arguments, seconds: float = 600.0) -> dict:
    """One message and its reply."""
    host.ask(episode, do, list(arguments), seconds)
    replies = []
    while not replies:
        replies = host.poll(600)
    (reply,) = replies
    assert reply.pop("episode") == episode
    return reply


def call(name: str, **arguments) -> str:
    return written_call(name, arguments, "hermes")


def played(host: EnvironmentHost, row: dict, *turns: str, seed: int = 0, environment: str = "") -> list[dict]:
    """Replies to `reset`, to each turn, and to `finish`."""
    begun = say(host, 0, "reset", row, seed, 0, environment)
    return [begun, *(say(host, 0, "turn", turn) for turn in turns), say(host, 0, "finish")]
