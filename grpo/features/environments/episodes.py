"""The environments of one replica, next to its engine: its head asks them and sends its other ranks what to sample.

Text exists only here and on the driver: a turn's ids become text for its tools, and their answers become ids.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.config import EnvironmentConfig
from grpo.config.fields import MAX_NUM_SEQS
from grpo.data.chat import load_tokenizer
from grpo.data.rows import environment_of
from grpo.features.environments.calls import style_of
from grpo.features.environments.host import EnvironmentHost
from grpo.features.environments.play import Decision, Episode, Player, num_at_once, play
from grpo.features.environments.suffix import Turns
from grpo.features.environments.tools import Toolbox, load_toolboxes
from grpo.roles.engine import vllm_engine
from grpo.roles.engine.loop import EngineLoop
from grpo.roles.process_groups import Roles
from grpo.types import Piece, Prompt, Rollout


class Episodes:
    """Plays the episodes of a replica. All of its ranks make the same calls."""

    def __init__(self, config: Any, folder: str, stop_token_ids: Sequence[int], roles: Roles):
        """Start the environment processes on the head; call it before CUDA is used. config: that of the run."""
        self.config = config.environment
        self.roles = roles
        self.turns_earn = config.turns_earn
        self.num_processes = self.config.num_processes or min(config.generator.max_num_seqs, MAX_NUM_SEQS)
        self.player = None
        if roles.rank in roles.heads:
            tokenizer = load_tokenizer(folder, config.data)
            toolboxes = load_toolboxes(self.config)
            turns = turns_of(tokenizer, config, stop_token_ids, toolboxes)
            style = call_style(tokenizer, self.config, toolboxes)
            host = EnvironmentHost(self.config, style, self.num_processes, config.reward.environment)
            self.player = Player(self.config, host, turns, tokenizer, config.data.max_prompt_tokens)

    def complete(
        self,
        loop: EngineLoop,
        rollouts: list[tuple[Prompt, int]],
        max_tokens: int,
        add: Callable[[int, list[int], int, int], None],
        run_seed: int,
        version: int,
        held_out: bool,
    ) -> list[Rollout]:
        """Play a rollout for each (prompt, index in its group) to its end. Returns these on the head, else [].

        Their index and temperature are the caller's to set.

        max_tokens: limit on what follows a prompt, answers included. add: see `play`.
        """
        first = num_at_once(self.config, len(rollouts), self.num_processes)
        if self.player:
            episodes = []
            for prompt, index in rollouts:
                seed = environment_seed(run_seed, prompt, held_out)
                environment = environment_of(prompt.columns, self.player.turns)
                episodes.append(Episode(prompt, index, seed, version, environment))
            self.player.begin(episodes, max_tokens, self.turns_earn and not held_out, first)
        play(self.config, loop, len(rollouts), add, self.player, self._send, first)
        return [rollout_of(episode) for episode in self.player.finish()] if self.player else []

    def _send(self, decisions: list[Decision] | None) -> list[Decision]:
        """Send the head's decisions to all ranks of the replica; the others pass None."""
        if len(self.roles.replica) == 1:
            return decisions
        return vllm_engine.broadcast_in_replica(decisions)

    def close(self) -> None:
        """End the environment processes."""
        if self.player:
            self.player.host.close()


def turns_of(
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
    stop_token_ids: Sequence[int],
    toolboxes: Mapping[str, Toolbox],
) -> dict[str, Turns]:
    """Return what the chat template writes between turns, by environment, like `toolboxes`.

    Raises ValueError if the template cannot carry several turns.
    """
    reply_as = config.environment.reply_as
    return {
        name: Turns(tokenizer, config.data, stop_token_ids, toolbox.schemas, reply_as, toolbox.has_reply)
        for name, toolbox in toolboxes.items()
    }


def call_style(tokenizer: PreTrainedTokenizerBase, config: EnvironmentConfig, toolboxes: Mapping[str, Toolbox]) -> str:
    """Return how the model writes calls: as configured, or as its chat template asks for; empty without tools."""
    if not any(toolbox.tools for toolbox in toolboxes.values()):
        return ""
    return style_of(tokenizer.chat_template) if config.calls == "auto" else config.calls


def check_environment(
    config: Any,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
) -> None:
    """Refuse an environment whose class, functions or chat template cannot be used, and print what it is."""
    toolboxes = load_toolboxes(config.environment)
    style = call_style(tokenizer, config.environment, toolboxes)
    turns_of(tokenizer, config, stop_token_ids, toolboxes)  # refuses a template
    has_other_reward = config.reward.functions or config.reward.model or config.algorithm.distill_coef
    for name, toolbox in toolboxes.items():
        if not (toolbox.has_reward or has_other_reward):
            raise ValueError(
                f"{toolbox.name} has no get_reward and reward.functions is empty; give it one, or name some"
            )
        if not config.data.row:
            toolbox.check_columns(config.data.reward_columns)
        line = f"environment {name or toolbox.name}"
        if toolbox.tools:
            tools = ", ".join(toolbox.tools)
            line += f" with the tools {tools}, called as {style}"
        print(line)


def rollout_of(episode: Episode) -> Rollout:
    """Return an episode as a rollout. One that was lost before its first turn has sampled no tokens."""
    pieces = episode.pieces or [Piece.written(episode.prompt.ids)]
    if not episode.turns:
        pieces = [*pieces, Piece.sampled([], [], episode.version)]
    return Rollout(
        episode.prompt,
        0,
        sequences=(tuple(pieces),),
        ended_by=episode.ended_by,
        episode=episode.note(),
    )


def environment_seed(run_seed: int, prompt: Prompt, held_out: bool) -> int:
    """Return the seed of `reset`, below 2**31: the same for all completions of a prompt.

    It is the row's column `seed`, if that has an integer (as with configs/examples/toys.py:seeds), which may be text as
    in CSV. It follows from any other value of that column, and without one it is drawn for the prompt. Held-out prompts
    have the upper half.
    """
    seed = prompt.columns.get("seed")
    if seed is None:
        seed = f"{run_seed} {prompt.index}"
    try:
        seed = int(seed)
    except (TypeError, ValueError, OverflowError):
        seed = random.Random(str(seed)).getrandbits(30)
    return seed % 2**30 + held_out * 2**30
