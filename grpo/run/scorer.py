"""Completions -> rollouts with rewards: what training and evaluation share. On rank 0."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from grpo import features
from grpo.config import DataConfig
from grpo.config.fields import RunConfig
from grpo.data.chat import detokenize, look_at_prompt, template_name
from grpo.data.turns import end_of_turn
from grpo.models import hf_folder
from grpo.report.samples import (
    broken_line,
    failure_lines,
    no_answer_line,
    unread_calls_line,
)
from grpo.rewards.loading import answer_format_of, measures_length
from grpo.rewards.pool import RewardError, RewardPool, counting_parts, weighted_sum
from grpo.text import printable
from grpo.types import Completion, Prompt, Rollout

# By what name an episode is lost that has functions as tools and no class
TOOLS = "environment.tools"
# Warnings about episodes, each of which is given once
EPISODE_LINES = (unread_calls_line, broken_line)


def check_version(completions: list[Completion], version: int) -> None:
    """Raise RuntimeError if a completion was sampled with other weights than those after `version` steps."""
    other_versions = {completion.version for completion in completions} - {version}
    if other_versions:
        raise RuntimeError(
            f"completions of version {version} were sampled with weights of versions {sorted(other_versions)}: a "
            "weight sync was skipped or repeated"
        )


def check_lost(rollouts: list[Rollout]) -> None:
    """Raise RewardError if more than half of the episodes were lost: something is wrong with their environment."""
    episodes = [rollout.completion.episode for rollout in rollouts]
    episodes = list(filter(None, episodes))
    failures = [episode["failure"] for episode in episodes if episode["failure"]]
    if 2 * len(failures) > len(episodes):
        raise RewardError(f"{len(failures)} of {len(episodes)} episodes were lost; the first: {failures[0]}")


def with_value(
    rollout: Rollout,
    name: str,
    weights: Mapping[str, float],
    value: float | None,
    failure: str,
) -> Rollout:
    """Add a value that is not a reward function's, or the reason why there is none.

    weights: of all parts of the reward, which is their `weighted_sum`.
    """
    failures = dict(rollout.failures)
    if failure:
        failures[name] = failure
    rewards = {name: value} | rollout.rewards
    reward = None if failures else weighted_sum(rewards, weights)
    return replace(rollout, rewards=rewards, reward=reward, failures=failures)


def passed_end_line(
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    stop_token_ids: Collection[int],
    stop_texts: Collection[str],
) -> str:
    """Return a warning if completions go on behind the token that ends a turn in the chat template, else nothing.

    So it is with many base models: their template has <|im_end|>, and their EOS is <|endoftext|>.
    """
    end = end_of_turn(tokenizer, data)
    if end is None or end in stop_token_ids:
        return ""
    text = tokenizer.convert_ids_to_tokens(end)
    if text in stop_texts:
        return ""
    return (
        f"warning: {template_name(tokenizer, data)} ends a turn with {text}, and completions go on behind it; end them "
        f"there with --generator.stop-token-ids {end}"
    )


class Scorer:
    """Decodes completions, and has worker processes and the reward model, if there is one, score them."""

    def __init__(
        self,
        config: RunConfig,
        folder: str,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int] = (),
    ):
        """Start the reward processes; prints what ends a completion, and how programs are locked down, if any are run.

        end_token_ids: tokens that end a completion, in addition to those of the model's `folder` and of the generator.
        Raises ValueError or RuntimeError if a reward function cannot be loaded, or programs cannot be locked down, and
        what `reward_part` of a feature raises.
        """
        reward = config.reward
        generator = config.generator
        self.environment = config.environment
        self.weights = config.reward_weights
        self.passes = reward.passes
        self.tokenizer = tokenizer
        self.model_path = reward.model
        for _, before_rewards in features.turned_on(config, "before_rewards"):
            print(before_rewards(config))
        self.parts = {name: reward_part(config) for name, reward_part in features.turned_on(config, "reward_part")}

        more_stop_ids = (*generator.stop_token_ids, *end_token_ids)
        self.stop_token_ids = hf_folder.stop_token_ids(folder, tokenizer, more_stop_ids)
        ends = [f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in self.stop_token_ids]
        ends += [f"the text {text!r}" for text in generator.stop]
        print(f"completions end at {', '.join(ends)}, or after {generator.max_completion_tokens} tokens")
        if self.weights:
            first, *rest = self.pass_functions
            otherwise = f", or {rest[0]} where it gives none" if rest else ""
            print(f"a completion passes if {first} gives at least {reward.pass_value:g}{otherwise}")
        line = passed_end_line(tokenizer, config.data, self.stop_token_ids, generator.stop)
        if line:
            print(printable(line))

        opening, notes = look_at_prompt(tokenizer, config.data)
        for note in notes:
            print(printable(note))
        self.pool = RewardPool(reward, generator.max_completion_tokens, opening)
        self.answer_format = answer_format_of(self.pool.functions)
        self.collected_before = False
        self.episode_lines = list(EPISODE_LINES)

    @property
    def pass_functions(self) -> list[str]:
        """Names of what says whether a completion passes: the first that gives it a value.

        They are the environment and the first function. An environment without `get_reward` gives no value. Or only
        what `reward.passes` names.
        """
        if self.passes:
            return [self.passes]
        names = list(self.weights)
        if self.environment.all_classes:
            return names[:2]
        return names[:1]

    @property
    def judging_parts(self) -> list[str]:
        """Names of the parts of the reward that count and look at more than the length of a completion."""
        return [name for name in counting_parts(self.weights) if not measures_length(self.pool.functions.get(name))]

    def submit(
        self,
        prompts: Sequence[Prompt],
        completions: list[Completion],
        step: int,
    ) -> list[Rollout]:
        """Join prompts and their completions, group after group, decode, begin to score; returns at once.

        step: the number of the step that reward functions get, as the log counts it.
        """
        group_size = len(completions) // len(prompts)
        prompts = [prompt for prompt in prompts for _ in range(group_size)]
        ids = list(map(self._ids_to_show, prompts, completions))
        texts = detokenize(self.tokenizer, ids)
        self.submitted = list(map(Rollout, prompts, completions, texts))
        self.pool.submit(self.submitted, group_size, step)
        return self.submitted

    def collect(self, where: str = "") -> list[Rollout]:
        """Wait for the rewards of what was submitted, and warn of functions that failed.

        where: how a warning begins. If other ranks hold a part of the reward model, they compute it meanwhile, see
        `scores` of `comm.on_driver`.
        """
        # while worker processes score
        values_of = {name: part.values(self.submitted, self.pool.opening) for name, part in self.parts.items()}
        rollouts = [self._with_environment(rollout) for rollout in self.pool.collect()]
        for name, values in values_of.items():
            for place, (value, failure) in enumerate(values):
                rollouts[place] = with_value(rollouts[place], name, self.weights, value, failure)
        check_lost(rollouts)

        warnings = failure_lines(rollouts)
        if self.answer_format and not self.collected_before:
            warnings.append(no_answer_line(rollouts, self.answer_format))
        for line_of in list(self.episode_lines):
            line = line_of(rollouts)
            warnings.append(line)
            if line:
                self.episode_lines.remove(line_of)
        self.collected_before = True
        for line in filter(None, warnings):
            print(printable(f"warning: {where}{line}"))
        return rollouts

    def prompt_texts(self, rollouts: list[Rollout]) -> list[str]:
        """Return the prompts as the model saw them, special tokens included."""
        ids = [rollout.prompt_ids_T.tolist() for rollout in rollouts]
        return detokenize(self.tokenizer, ids)

    def _with_environment(self, rollout: Rollout) -> Rollout:
        """Add the environment's value to the reward. An episode that was lost has no reward."""
        episode = rollout.completion.episode
        if episode is None:
            return rollout
        if not self.environment.all_classes:
            if not episode["failure"]:
                return rollout
            failures = {**rollout.failures, TOOLS: episode["failure"]}
            return replace(rollout, reward=None, failures=failures)
        return with_value(
            rollout,
            self.environment.reward_name,
            self.weights,
            episode["reward"],
            episode["failure"],
        )

    def _ids_to_show(self, prompt: Prompt, completion: Completion) -> list[int]:
        """Return the ids of a completion without the stop token at the end."""
        _, pieces = completion.behind(prompt)
        ids = []
        for piece in pieces:
            ids += piece.ids_T.tolist()
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return ids
