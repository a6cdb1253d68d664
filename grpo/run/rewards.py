"""What a run is scored with: reward functions and environment are refused here if they cannot be used."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from grpo.config.fields import RunConfig
from grpo.config.user_files import near_miss
from grpo.data.rows import Tools
from grpo.environments.tools import load_toolboxes
from grpo.report.rollout_metrics import evaluation_names
from grpo.rewards.loading import load_functions, try_built_ins
from grpo.rewards.pool import EPISODE_COLUMNS
from grpo.roles.engine.episodes import call_style, turns_of
from grpo.roles.engine.vllm_engine import check_engine
from grpo.run.policy import PolicyFiles
from grpo.run.scorer import Scorer
from grpo.types import Prompt


def check_functions(
    config: RunConfig,
    columns: Iterable[str] | None = None,
    rows: Iterable[Mapping[str, Any]] = (),
) -> None:
    """Load the reward functions once, and refuse what cannot be called, or rows that a built-in one cannot read.

    columns: those that the rows have. Without them, before the rows are read, those that `data` names are taken; which
    ones `data.row` makes is not known then. rows: the columns of each that rewards get. Raises ValueError also for a
    column that an episode's would replace.
    """
    data = config.data
    if columns is None and not data.row:
        columns = data.reward_columns
    if columns is not None and config.environment.enabled:
        allowed = [data.prompt_column]
        if config.environment.are_several:
            allowed.append("environment")
        for name in EPISODE_COLUMNS:
            if name in columns and name not in allowed:
                raise ValueError(
                    f"data.columns has {name}, but with an environment reward functions get a column of that name "
                    f"anyway; give the data set's another name, such as --data.columns my_{name} {name}"
                )
        columns = [*columns, *EPISODE_COLUMNS]
    functions = load_functions(config.reward, columns, config.generator.max_completion_tokens)
    for row in rows:
        try_built_ins(functions, row)


def read_rewards(config: RunConfig, policy: PolicyFiles, held_out: Sequence[Prompt]) -> Scorer:
    """Start the reward processes, and refuse what would fail only when the engine starts or an evaluation ends."""
    scorer = Scorer(config, policy.folder, policy.tokenizer, policy.form.end_token_ids)
    on_gpu = config.gpus > 0 or torch.cuda.is_available()  # a dry run may be for another machine
    check_engine(config.generator, policy.hf, on_gpu=on_gpu)
    if config.environment.enabled:
        check_environment(config, policy.tokenizer, policy.stop_token_ids)
    best = config.checkpoint.keep_best.removeprefix("eval/")
    if best:
        names = evaluation_names(held_out, config.evaluation.num_samples, scorer.answer_format)
        if best not in names:
            hint = near_miss(best, names)
            raise ValueError(f"checkpoint.keep_best={best} is not among the held-out metrics{hint}: {', '.join(names)}")
    return scorer


def tool_schemas(config: RunConfig) -> dict[str, Tools]:
    """Return the JSON schemas of each environment's tools, as the chat template gets them, by its name."""
    if not config.environment.enabled:
        return {}
    toolboxes = load_toolboxes(config.environment)
    return {name: toolbox.schemas for name, toolbox in toolboxes.items()}


def check_environment(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
) -> None:
    """Refuse an environment whose class, functions or chat template cannot be used, and print what it is."""
    toolboxes = load_toolboxes(config.environment)
    style = call_style(tokenizer, config.environment, toolboxes)
    turns = turns_of(
        tokenizer,
        config.environment,
        config.data,
        stop_token_ids,
        toolboxes,
    )
    has_other_reward = config.reward.weights or config.algorithm.distill_coef
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
        if turns[name].line:
            line += f"; {turns[name].line}"
        print(line)
