"""Completions -> rollouts with rewards: what training and evaluation share. On rank 0."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from grpo.config import GeneratorConfig, RewardConfig
from grpo.data.chat import detokenize
from grpo.models import hf_folder
from grpo.report.samples import failure_lines
from grpo.rewards.loading import answer_format_of
from grpo.rewards.pool import RewardPool
from grpo.types import Completion, Prompt, Rollout
from grpo.workers.programs import check_programs


def check_version(completions: list[Completion], version: int) -> None:
    """Raise RuntimeError if any was sampled with weights of another version: those after so many steps."""
    if versions := {c.version for c in completions} - {version}:
        raise RuntimeError(
            f"completions of version {version} were sampled with weights of versions {sorted(versions)}: a weight "
            "sync was skipped or repeated"
        )


class Scorer:
    """Decodes completions and has worker processes score them."""

    def __init__(
        self,
        reward: RewardConfig,
        generator: GeneratorConfig,
        folder: str,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int] = (),
    ):
        """Start the reward processes; raises ValueError or RuntimeError if a reward function cannot be loaded.

        end_token_ids: further tokens that end a completion, beside those of the model's `folder` and of `generator`.
        With code_reward, prints what programs run under, and raises ValueError if that is too little.
        """
        if "code_reward" in reward.functions:
            print(check_programs(reward.allow_without_landlock), flush=True)
        self.tokenizer = tokenizer
        ends = (*generator.stop_token_ids, *end_token_ids)
        self.stop_token_ids = hf_folder.stop_token_ids(folder, tokenizer, ends)
        ends = [f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in self.stop_token_ids]
        ends += [f"the text {text!r}" for text in generator.stop]
        print(f"completions end at {', '.join(ends)}, or after {generator.max_completion_tokens} tokens", flush=True)
        # The function whose value of at least 1 means that a completion passed; none if a teacher alone judges
        self.pass_function = next(iter(reward.functions), "")
        self.pool = RewardPool(reward, generator.max_completion_tokens)
        self.answer_format = answer_format_of(self.pool.functions)

    def submit(self, prompts: list[Prompt], completions: list[Completion], step: int) -> list[Rollout]:
        """Join prompts and their completions, group after group, decode, begin to score; returns at once.

        step: what reward functions are told, the step as the log counts it.
        """
        group_size = len(completions) // len(prompts)
        texts = detokenize(self.tokenizer, [self._ids_to_show(c) for c in completions])
        both = zip(completions, texts, strict=True)
        rollouts = [Rollout(prompts[i // group_size], c, text) for i, (c, text) in enumerate(both)]
        self.pool.submit(rollouts, group_size, step)
        return rollouts

    def collect(self, where: str = "") -> list[Rollout]:
        """Wait for the rewards of what was submitted; warns of functions that failed."""
        rollouts = self.pool.collect()
        for line in failure_lines(rollouts):
            print(f"warning: {where}{line}", flush=True)
        return rollouts

    def prompt_texts(self, rollouts: list[Rollout]) -> list[str]:
        """The prompts as the model saw them, special tokens included."""
        return detokenize(self.tokenizer, [r.prompt.ids for r in rollouts])

    def _ids_to_show(self, completion: Completion) -> list[int]:
        """Without the stop token at the end."""
        ids = completion.ids_T.tolist()
        return ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
