"""Completions -> rollouts with rewards: what training and evaluation share. On rank 0."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from grpo import features
from grpo.algorithm.groups import pass_rate, pass_values
from grpo.config.fields import RunConfig
from grpo.data.chat import detokenize, look_at_prompt
from grpo.report.samples import failure_lines, hung_line, no_answer_line
from grpo.rewards.loading import answer_format_of, load_functions, measures_length, try_built_ins
from grpo.rewards.pool import EPISODE_COLUMNS, RewardPool, check_lost, counting_parts
from grpo.roles.engine.vllm_engine import check_engine
from grpo.run.policy import PolicyFiles, describe_ends
from grpo.text import printable
from grpo.types import Rollout


def passing_parts(config: RunConfig) -> list[str]:
    """Return the names of what says whether a completion passes: the first that gives it a value.

    They are the environment, which gives none without `get_reward`, and the first function; or only `reward.passes`.
    """
    if config.reward.passes:
        return [config.reward.passes]
    names = list(config.reward_weights)
    return names[:2] if config.environment.reward_name else names[:1]


@dataclass(eq=False)
class Scorer:
    """Decodes completions, and has worker processes and the reward model, if there is one, score them."""

    config: RunConfig
    policy: PolicyFiles
    pool: RewardPool
    """It has started."""
    parts: Mapping[str, Any]
    """The parts of the reward that no function computes, by their names. Each has a method `values(rollouts, opening)`,
    which returns what it says of each rollout."""
    answer_format: str | None
    """Format of answers, None if no function reads them."""
    lines_once: list[Callable]
    """Functions that warn of a step's rollouts, each of which is heard once."""

    @property
    def judging_parts(self) -> list[str]:
        """Names of the parts of the reward that count and look at more than the length of a completion."""
        functions = self.pool.functions
        return [name for name in counting_parts(self.config.reward_weights) if not measures_length(functions.get(name))]

    def submit(
        self,
        rollouts: list[Rollout],
        group_size: int,
        step: int,
    ) -> list[Rollout]:
        """Decode rollouts, which lie group after group, and begin to score them. Returns them with texts, at once.

        step: the number of the step that reward functions get, as the log counts it.
        """
        ids = [rollout.ids_T.tolist() for rollout in rollouts]
        for completion in ids:
            if completion and completion[-1] in self.policy.stop_token_ids:
                completion.pop()
        texts = detokenize(self.policy.tokenizer, ids)
        self.submitted = []
        for rollout, text in zip(rollouts, texts, strict=True):
            self.submitted.append(replace(rollout, text=text, sequence_texts=self._sequence_texts(rollout)))
        self.pool.submit(self.submitted, group_size, step)
        return self.submitted

    def _sequence_texts(self, rollout: Rollout) -> list[str]:
        """Return the whole text of each sequence, if there are several."""
        if len(rollout.sequences) == 1:
            return []
        ids = [torch.cat([piece.ids_T for piece in pieces]).tolist() for pieces in rollout.sequences]
        return detokenize(self.policy.tokenizer, ids)

    def collect(self, where: str = "") -> list[Rollout]:
        """Wait for the rewards of what was submitted, and warn of functions that failed.

        where: how a warning begins. If other ranks hold a part of the reward model, they compute it meanwhile, see
        `scores` of `comm.on_driver`.
        """
        said = {}
        for name, part in self.parts.items():  # while worker processes score
            said[name] = part.values(self.submitted, self.pool.opening)
        rollouts = self.pool.collect(said, self.config.reward_weights)
        check_lost(rollouts)
        warnings = failure_lines(rollouts)
        for line_of in list(self.lines_once):
            line = line_of(rollouts)
            if line:
                warnings.append(line)
                self.lines_once.remove(line_of)
        for line in warnings:
            print(printable(f"warning: {where}{line}"))
        return rollouts

    def pass_rate(self, rollouts: list[Rollout]) -> float | None:
        """Return the share of rollouts that pass, None if nothing says whether one does."""
        values_R = pass_values(rollouts, passing_parts(self.config))
        return pass_rate(values_R, self.config.reward.pass_value)

    def prompt_texts(self, rollouts: list[Rollout]) -> list[str]:
        """Return the prompts as the model saw them, special tokens included."""
        ids = [rollout.prompt_ids_T.tolist() for rollout in rollouts]
        return detokenize(self.policy.tokenizer, ids)


# ---- Before the first step: what cannot be used is refused


def check_functions(config: RunConfig, rows: Sequence[Mapping[str, Any]] = ()) -> None:
    """Load the reward functions once, and refuse what cannot be called, or rows that a built-in one cannot read.

    rows: the columns that rewards get, of each row. Before they are read the functions are tried with the columns that
    `data` names; which ones `data.row` makes is not known then. Raises ValueError also for a column that an episode's
    would replace.
    """
    data = config.data
    columns = None if data.row else list(data.reward_columns)
    if rows:
        columns = list(rows[0])
    if columns is not None and config.environment.has_episodes:
        own = {*columns} - {data.prompt_column}
        if config.environment.are_several:
            own -= {"environment"}
        for name in own & {*EPISODE_COLUMNS}:
            raise ValueError(
                f"data.columns has {name}, but with an environment reward functions get a column of that name anyway; "
                f"give the data set's another name, such as --data.columns my_{name} {name}"
            )
        columns += EPISODE_COLUMNS
    functions = load_functions(config.reward, columns, config.generator.max_completion_tokens)
    for row in rows:
        try_built_ins(functions, row)


def read_rewards(config: RunConfig, policy: PolicyFiles) -> Scorer:
    """Start the reward processes, and print what ends a completion, what passes, and how programs are locked down.

    Refuses what would fail only when the engine starts. Raises ValueError or RuntimeError also if
    a reward function or a part of the reward cannot be loaded, or programs cannot be locked down.
    """
    lines = features.call(config, "before_rewards", config)
    parts = dict(features.call(config, "reward_part", config))
    lines += describe_ends(config, policy)
    passing = passing_parts(config)
    if passing:
        names = ", or else ".join(passing)
        lines.append(f"a completion passes if {names} gives at least {config.reward.pass_value:g}")
    opening, notes = look_at_prompt(policy.tokenizer, config.data)
    for line in [*lines, *notes]:
        print(printable(line))
    pool = RewardPool(config.reward, config.generator.max_completion_tokens, opening)
    lines_once = [hung_line, *itertools.chain(*features.call(config, "lines"))]
    answer_format = answer_format_of(pool.functions)
    if answer_format:
        lines_once.append(partial(no_answer_line, answer_format=answer_format))
    on_gpu = config.gpus > 0 or torch.cuda.is_available()  # a dry run may be for another machine
    check_engine(config.generator, policy.hf, on_gpu=on_gpu)
    features.call(config, "check", config, policy.tokenizer, policy.stop_token_ids)
    return Scorer(config, policy, pool, parts, answer_format, lines_once)
