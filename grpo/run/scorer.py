"""Completions -> rollouts with rewards: what training and evaluation share. On rank 0."""

import math
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from grpo.config.fields import REWARD_MODEL, RunConfig
from grpo.data.chat import detokenize, look_at_prompt
from grpo.models import hf_folder
from grpo.report.samples import failure_lines, no_answer_line, unread_calls_line
from grpo.rewards.loading import answer_format_of
from grpo.rewards.pool import RewardError, RewardPool
from grpo.roles.reward_model import RewardModel, conversation, open_reward_model
from grpo.text import printable
from grpo.types import Completion, Prompt, Rollout
from grpo.workers.programs import check_programs


def check_version(completions: list[Completion], version: int) -> None:
    """Raise RuntimeError if any was sampled with weights of another version: those after so many steps."""
    if versions := {c.version for c in completions} - {version}:
        raise RuntimeError(
            f"completions of version {version} were sampled with weights of versions {sorted(versions)}: a weight "
            "sync was skipped or repeated"
        )


def check_lost(rollouts: list[Rollout]) -> None:
    """Raise RewardError if more than half of the episodes were lost: something is wrong with their environment."""
    episodes = [rollout.completion.episode for rollout in rollouts if rollout.completion.episode]
    lost = [episode["failure"] for episode in episodes if episode["failure"]]
    if 2 * len(lost) > len(episodes):
        raise RewardError(f"{len(lost)} of {len(episodes)} episodes were lost; the first: {lost[0]}")


def with_value(rollout: Rollout, name: str, weight: float, value: float | None, failure: str = "") -> Rollout:
    """Add to the functions' rewards what something else says, or why it fails."""
    failures = rollout.failures | ({name: failure} if failure else {})
    reward = rollout.reward if value is None else weight * value + (rollout.reward or 0.0)
    reward = None if failures else reward
    return replace(rollout, rewards={name: value} | rollout.rewards, reward=reward, failures=failures)


class Scorer:
    """Decodes completions and has worker processes score them, and the reward model, if there is one."""

    reward_model: RewardModel | None = None
    """Of the session, once it is loaded."""

    def __init__(
        self,
        config: RunConfig,
        folder: str,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int] = (),
    ):
        """Start the reward processes; prints what ends a completion, and what programs run under, if any are run.

        end_token_ids: further tokens that end a completion, beside those of the model's `folder` and of the generator.
        Raises ValueError or RuntimeError if a reward function cannot be loaded, or programs cannot be locked down, and
        what `open_reward_model` raises.
        """
        reward, generator, self.environment = config.reward, config.generator, config.environment
        if "code_reward" in reward.functions or "python" in self.environment.tools:
            print(check_programs(reward.allow_without_landlock), flush=True)
        self.reader = open_reward_model(reward.model, config.trainer) if reward.model else None
        self.reward_folder = self.reader.folder if self.reader else ""
        self.tokenizer = tokenizer
        further = (*generator.stop_token_ids, *end_token_ids)
        self.stop_token_ids = hf_folder.stop_token_ids(folder, tokenizer, further)
        ends = [f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in self.stop_token_ids]
        ends += [f"the text {text!r}" for text in generator.stop]
        print(f"completions end at {', '.join(ends)}, or after {generator.max_completion_tokens} tokens", flush=True)
        # Whose value of `reward.pass_value` says that a completion passed: the environment, the first function; or none
        self.pass_function = self.environment.reward_name or next(iter(reward.weights), "")
        opening, notes = look_at_prompt(tokenizer, config.data)
        for note in notes:
            print(printable(note), flush=True)
        self.pool = RewardPool(reward, generator.max_completion_tokens, opening)
        self.answer_format, self.has_looked = answer_format_of(self.pool.functions), False
        self.has_told_unread = False

    def submit(self, prompts: list[Prompt], completions: list[Completion], step: int) -> list[Rollout]:
        """Join prompts and their completions, group after group, decode, begin to score; returns at once.

        step: what reward functions are told, the step as the log counts it.
        """
        group_size = len(completions) // len(prompts)
        prompts = [prompts[i // group_size] for i in range(len(completions))]
        texts = detokenize(self.tokenizer, list(map(self._ids_to_show, prompts, completions)))
        rollouts = list(map(Rollout, prompts, completions, texts))
        self.pool.submit(rollouts, group_size, step)
        self.submitted = rollouts
        return rollouts

    def collect(self, where: str = "") -> list[Rollout]:
        """Wait for the rewards of what was submitted; warns of functions that failed.

        Where others hold a part of the reward model, they are asked: see `scores` of `comm.on_driver`.
        """
        said = self._ask_reward_model() if self.reward_model else None  # while worker processes score
        rollouts = [self._with_environment(rollout) for rollout in self.pool.collect()]
        if said:
            weight = self.pool.config.model_weight
            rollouts = [with_value(r, REWARD_MODEL, weight, *x) for r, x in zip(rollouts, said, strict=True)]
        check_lost(rollouts)
        for line in failure_lines(rollouts):
            print(f"warning: {where}{line}", flush=True)
        if self.answer_format and not self.has_looked and (line := no_answer_line(rollouts, self.answer_format)):
            print(printable(f"warning: {where}{line}"), flush=True)
        self.has_looked = True  # the first completions tell
        if not self.has_told_unread and (line := unread_calls_line(rollouts)):
            print(f"warning: {where}{line}", flush=True)
            self.has_told_unread = True
        return rollouts

    def prompt_texts(self, rollouts: list[Rollout]) -> list[str]:
        """The prompts as the model saw them, special tokens included."""
        return detokenize(self.tokenizer, [r.prompt_ids_T.tolist() for r in rollouts])

    def _with_environment(self, rollout: Rollout) -> Rollout:
        """Add what the environment says to the reward; an episode that was lost has none."""
        if rollout.completion.episode is None or not self.environment.all_classes:
            return rollout
        episode, (name, weight) = rollout.completion.episode, (self.environment.reward_name, self.environment.weight)
        return with_value(rollout, name, weight, episode["reward"], episode["failure"])

    def _ask_reward_model(self) -> list[tuple[float | None, str]]:
        """(score, why there is none) of each rollout that was submitted."""
        read = self.reader.read([conversation(rollout, self.pool.opening) for rollout in self.submitted])
        scores = iter(self.reward_model.scores([ids for ids in read if isinstance(ids, list)]))
        said = ((next(scores), "its score is not finite") if isinstance(x, list) else (math.nan, x) for x in read)
        return [(score, "") if math.isfinite(score) else (None, why) for score, why in said]

    def _ids_to_show(self, prompt: Prompt, completion: Completion) -> list[int]:
        """Without the stop token at the end."""
        ids = [token for piece in completion.behind(prompt)[1] for token in piece.ids_T.tolist()]
        return ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
