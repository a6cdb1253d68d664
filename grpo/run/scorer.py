"""Completions -> rollouts with rewards: what training and evaluation share. On rank 0."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from grpo import features
from grpo.algorithm.groups import pass_rate, pass_values
from grpo.config.fields import RunConfig
from grpo.data.chat import detokenize, look_at_prompt
from grpo.data.rows import Tools
from grpo.report.samples import failure_lines, hung_line, no_answer_line
from grpo.rewards.loading import answer_format_of, load_functions, measures_length, try_built_ins
from grpo.rewards.pool import EPISODE_COLUMNS, RewardError, RewardPool, counting_parts, weighted_sum
from grpo.roles.engine.vllm_engine import check_engine
from grpo.run.policy import PolicyFiles, describe_ends
from grpo.text import printable
from grpo.types import Rollout


def check_version(rollouts: list[Rollout], version: int) -> None:
    """Raise RuntimeError if a rollout was just sampled with other weights than those after `version` steps."""
    other_versions = {rollout.version for rollout in rollouts} - {version}
    if other_versions:
        raise RuntimeError(
            f"completions of version {version} were sampled with weights of versions {sorted(other_versions)}: a "
            "weight sync was skipped or repeated"
        )


def check_lost(rollouts: list[Rollout]) -> None:
    """Raise RewardError if more than half of the episodes were lost: something is wrong with their environment."""
    episodes = [rollout.episode for rollout in rollouts if rollout.episode]
    failures = [episode["failure"] for episode in episodes if episode["failure"]]
    if 2 * len(failures) > len(episodes):
        raise RewardError(f"{len(failures)} of {len(episodes)} episodes were lost; the first: {failures[0]}")


def other_parts(config: RunConfig) -> dict[str, Any]:
    """Return the parts of the reward that no function computes, by their names, as `Scorer` takes them."""
    return dict(reward_part(config) for _, reward_part in features.turned_on(config, "reward_part"))


def passing_parts(config: RunConfig) -> list[str]:
    """Return the names of what says whether a completion passes: the first that gives it a value.

    They are the environment, which gives none without `get_reward`, and the first function; or only `reward.passes`.
    """
    if config.reward.passes:
        return [config.reward.passes]
    names = list(config.reward_weights)
    return names[:2] if config.environment.reward_name else names[:1]


def with_parts(
    rollout: Rollout,
    parts: Mapping[str, tuple[float | None, str]],
    reward_weights: Mapping[str, float],
) -> Rollout:
    """Add the parts of the reward that no function computes, each a value or the reason why there is none, and sum up.

    reward_weights: of all parts, which is their `weighted_sum`; None if one failed.
    """
    rewards = {name: value for name, (value, _) in parts.items() if name in reward_weights}
    rewards |= rollout.rewards
    failures = {name: failure for name, (_, failure) in parts.items() if failure}
    failures = rollout.failures | failures
    reward = None if failures else weighted_sum(rewards, reward_weights)
    return replace(rollout, rewards=rewards, reward=reward, failures=failures)


@dataclass(eq=False)
class Scorer:
    """Decodes completions, and has worker processes and the reward model, if there is one, score them."""

    pool: RewardPool
    """It has started."""
    parts: Mapping[str, Any]
    """The parts of the reward that no function computes, by their names. Each has a method `values(rollouts, opening)`,
    which returns for each rollout its value or None, and the reason if it failed."""
    reward_weights: Mapping[str, float]
    """Of all parts."""
    pass_functions: Sequence[str]
    """Names of what says whether a completion passes, the first that gives it a value."""
    policy: PolicyFiles
    turn_weight: float | None = None
    """Weight of the environment, if each turn earns its own reward."""
    lines_once: list[Callable] = field(default_factory=list)
    """Functions that warn of a step's rollouts, each of which is heard once."""

    collected_before = False  # without an annotation it is no argument

    @property
    def answer_format(self) -> str | None:
        """Format of answers, None if no function reads them."""
        return answer_format_of(self.pool.functions)

    @property
    def judging_parts(self) -> list[str]:
        """Names of the parts of the reward that count and look at more than the length of a completion."""
        functions = self.pool.functions
        return [name for name in counting_parts(self.reward_weights) if not measures_length(functions.get(name))]

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
        # while worker processes score
        values_of = {}
        for name, part in self.parts.items():
            values_of[name] = part.values(self.submitted, self.pool.opening)
        rollouts = []
        for index, rollout in enumerate(self.pool.collect()):
            parts = {name: values[index] for name, values in values_of.items()}
            rollouts.append(with_parts(rollout, parts, self.reward_weights))
        check_lost(rollouts)

        warnings = failure_lines(rollouts)
        if self.answer_format and not self.collected_before:
            warnings.append(no_answer_line(rollouts, self.answer_format))
        self.collected_before = True
        for line_of in list(self.lines_once):
            line = line_of(rollouts)
            if line:
                warnings.append(line)
                self.lines_once.remove(line_of)
        for line in filter(None, warnings):
            print(printable(f"warning: {where}{line}"))
        return rollouts

    def pass_rate(self, rollouts: list[Rollout]) -> float | None:
        """Return the share of rollouts that pass, None if nothing says whether one does."""
        values_R = pass_values(rollouts, self.pass_functions)
        return pass_rate(values_R, self.pool.config.pass_value)

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
    if data.row and rows:
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
    for _, before_rewards in features.turned_on(config, "before_rewards"):
        print(before_rewards(config))
    parts = other_parts(config)
    ends, *warnings = describe_ends(config, policy)
    pass_functions = passing_parts(config)
    lines = [ends]
    if pass_functions:
        first, *rest = pass_functions
        otherwise = f", or {rest[0]} where it gives none" if rest else ""
        lines.append(f"a completion passes if {first} gives at least {config.reward.pass_value:g}{otherwise}")
    opening, notes = look_at_prompt(policy.tokenizer, config.data)
    for line in [*lines, *warnings, *notes]:
        print(printable(line))
    lines_once = [hung_line]
    for _, lines_of in features.turned_on(config, "lines"):
        lines_once += lines_of()
    scorer = Scorer(
        RewardPool(config.reward, config.generator.max_completion_tokens, opening),
        parts,
        config.reward_weights,
        pass_functions,
        policy,
        turn_weight=config.environment.weight if config.turns_earn else None,
        lines_once=lines_once,
    )
    on_gpu = config.gpus > 0 or torch.cuda.is_available()  # a dry run may be for another machine
    check_engine(config.generator, policy.hf, on_gpu=on_gpu)
    for _, check in features.turned_on(config, "check"):
        check(config, policy.tokenizer, policy.stop_token_ids)
    return scorer


def tool_schemas(config: RunConfig) -> dict[str, Tools]:
    """Return the JSON schemas of each environment's tools, as the chat template gets them, by its name."""
    schemas = {}
    for _, schemas_of in features.turned_on(config, "tool_schemas"):
        schemas |= schemas_of(config)
    return schemas
