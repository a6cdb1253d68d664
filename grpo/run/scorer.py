"""Completions -> rollouts with rewards, and held-out numbers: what training and stand-alone evaluation share."""

from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from grpo.config import EvaluationConfig, GRPOConfig
from grpo.config.user_files import near_miss
from grpo.data.chat import detokenize
from grpo.data.held_out import load_eval_prompts
from grpo.models import hf_folder
from grpo.report.log import RunLog
from grpo.report.rollout_metrics import evaluation_metrics_of_sets
from grpo.report.samples import failure_lines
from grpo.rewards.loading import answer_format_of, load_functions
from grpo.rewards.pool import RewardPool
from grpo.roles.comm import gather_completions
from grpo.roles.generator import Generator
from grpo.roles.process_groups import Roles
from grpo.types import Completion, Prompt, Rollout
from grpo.workers.programs import check_programs


def evaluate(
    driver, generator: Generator | None, prompts: list[Prompt], options: EvaluationConfig, step: int, roles: Roles
) -> None:
    """Complete the held-out prompts, score and log; training does not notice. Every rank calls it.

    `driver` has a method `log_evaluation(prompts, greedy, samples, step)` that runs on rank 0.
    """
    greedy, samples = generator.evaluate(prompts, options) if roles.generates else (None, None)
    greedy, samples = gather_completions(greedy, roles), gather_completions(samples, roles)
    driver.log_evaluation(prompts, greedy, samples, step)


def check_version(completions: list[Completion], version: int) -> None:
    """Raise RuntimeError if any was sampled with weights of another version: those after so many steps."""
    if versions := {c.version for c in completions} - {version}:
        raise RuntimeError(
            f"completions of version {version} were sampled with weights of versions {sorted(versions)}: a weight "
            "sync was skipped or repeated"
        )


def check_functions(config: GRPOConfig, columns: Collection[str] | None = None) -> None:
    """Load the reward functions once, so that one that cannot be called is refused before anything starts.

    columns: those that the rows give; None, before they are read, takes those that `data` names. Which ones `data.row`
    makes is known only from the rows. Raises what `load_functions` raises.
    """
    if columns is None and not config.data.row:
        columns = config.data.reward_columns
    load_functions(config.reward, columns, config.generator.max_completion_tokens)


def held_out_prompts(config: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The prompts that evaluation completes, with all columns that the reward functions need.

    Raises what `load_eval_prompts` and `check_functions` raise.
    """
    prompts = load_eval_prompts(config.data, config.evaluation, tokenizer)
    if config.data.row:
        check_functions(config, list(prompts[0].columns))
    return prompts


class Scorer:
    """Decodes completions and has worker processes score them."""

    def __init__(self, config: GRPOConfig, folder: str, tokenizer: PreTrainedTokenizerBase):
        """Start the reward processes; raises ValueError or RuntimeError if a reward function cannot be loaded.

        With code_reward, prints what programs run under, and raises ValueError if that is too little.
        """
        if "code_reward" in config.reward.functions:
            print(check_programs(config.reward.allow_without_landlock), flush=True)
        self.config, self.tokenizer = config, tokenizer
        generator = config.generator
        self.stop_token_ids = hf_folder.stop_token_ids(folder, tokenizer, generator.stop_token_ids)
        ends = [f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in self.stop_token_ids]
        ends += [f"the text {text!r}" for text in generator.stop]
        print(f"completions end at {', '.join(ends)}, or after {generator.max_completion_tokens} tokens", flush=True)
        # The function whose value of at least 1 means that a completion passed; none if a teacher alone judges
        self.pass_function = next(iter(config.reward.functions), "")
        self.answer_format = answer_format_of(load_functions(config.reward, None, generator.max_completion_tokens))
        self.pool = RewardPool(config.reward, config.generator.max_completion_tokens)

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

    def log_evaluation(
        self, run_log: RunLog, prompts: list[Prompt], greedy: list[Completion], samples: list[Completion], step: int
    ) -> None:
        """Score the held-out completions of the weights after `step` steps, and write metrics and completions."""
        scored: dict[str, list[Rollout]] = {"greedy": [], "sample": []}
        for kind, completions in (("greedy", greedy), ("sample", samples)):
            if completions:  # perhaps no samples were asked for
                check_version(completions, step)
                self.submit(prompts, completions, step)
                scored[kind] = self.collect("evaluation: ")
                run_log.evaluation_completions(step, kind, scored[kind], self.prompt_texts(scored[kind]))
        num_samples = self.config.evaluation.num_samples
        metrics = evaluation_metrics_of_sets(*scored.values(), num_samples, self.pass_function, self.answer_format)
        names = [name.removeprefix("eval/") for name in metrics]
        best = self.config.checkpoint.keep_best.removeprefix("eval/")
        if best and best not in names:
            raise ValueError(
                f"checkpoint.keep_best={best} is not among the held-out metrics{near_miss(best, names)}: "
                f"{', '.join(names)}"
            )
        run_log.log_evaluation(step, metrics)

    def _ids_to_show(self, completion: Completion) -> list[int]:
        """Without the stop token at the end."""
        ids = completion.ids_T.tolist()
        return ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
