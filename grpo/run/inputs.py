"""What each script checks and reads before its first step, on rank 0. Bad input is refused here, before GPUs are used.

Every function raises ValueError or FileNotFoundError with the reason and the way out.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from grpo.algorithm.trial import try_algorithm
from grpo.config import GRPOConfig, SFTConfig
from grpo.config.fields import RunConfig
from grpo.config.user_files import near_miss
from grpo.data.prepare import (
    load_chat_sources,
    load_eval_prompts,
    load_sources,
    load_validation,
    reward_columns,
    texts_of,
    usable_chats,
    usable_prompts,
)
from grpo.data.streams import ChatStream, PromptStream
from grpo.data.turns import end_of_turn
from grpo.environments.serving import serving_template
from grpo.environments.tools import load_toolboxes
from grpo.models import hf_folder
from grpo.models.hf_folder import ChatForm
from grpo.report.rollout_metrics import evaluation_names
from grpo.report.samples import show_examples
from grpo.rewards.loading import load_functions, try_built_ins
from grpo.rewards.pool import EPISODE_COLUMNS
from grpo.roles.engine.episodes import call_style, turns_of
from grpo.roles.engine.vllm_engine import check_engine
from grpo.run.scorer import Scorer
from grpo.run.session import Session
from grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Stream = TypeVar("Stream")


def read_grpo(session: Session) -> None:
    """Open the session of a GRPO run, the prompts that it draws, the reference and the rewards."""
    config: GRPOConfig = session.config
    data, evaluates = config.data, config.evaluation.interval > 0
    check_functions(config)
    try_algorithm(config.algorithm)
    sources = load_sources(data)
    if data.row:  # which columns it makes is known only now
        check_functions(config, reward_columns(sources))
    # the columns of all rows of a source have the same types, which the encoder checks
    first_rows = [next(rows.examples(), None) for rows in sources]
    try_rewards(config, [row.columns for row in first_rows if row])
    read = [*data.all_sources, *(config.evaluation.held_out(data) if evaluates else [])]
    models = config.model.reference_path, *config.model.teachers.values(), config.reward.model
    inputs = (*models, *(source.path for source in read))
    session.open(inputs, math.lcm(config.trainer.tensor_parallel, config.generator.tensor_parallel), texts_of(sources))
    if config.needs_reference:
        session.reference_folders = reference_folders(session)
    rows = usable_prompts(sources, config, session.tokenizer, tools_of(config), vocab_size_of(session))
    session.stream = resumed_stream(partial(PromptStream, rows, config), session.saved_state, config.allow_changes)
    if evaluates:
        session.eval_prompts = held_out_prompts(session)
    session.scorer = Scorer(config, session.model_folder, session.tokenizer)
    check_generation(session)
    session.form = learned_form(config, session.tokenizer)


def reference_folders(session: Session) -> list[str]:
    """The folders of the frozen models: the reference's, or each teacher's, whose name stands in what is said of it."""
    config = session.config
    paths = {f"model.teachers has {name}: ": path for name, path in config.model.teachers.items()}
    paths = paths or {"": config.model.reference_path}
    for where, path in paths.items():
        try:
            if path or where:
                folder = hf_folder.resolve_folder(path)
                hf_folder.check_folder(folder, config.max_sequence_tokens, config.reference_tensor_parallel)
                hf_folder.check_reference(folder, session.model_folder, session.tokenizer)
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"{where}{error}") from error
    return [path or session.model_folder for path in paths.values()]


def read_sft(session: Session) -> None:
    """Open the session of a supervised run, the examples that it draws, and what it validates and evaluates on."""
    config: SFTConfig = session.config
    validates, evaluates = config.validation.interval > 0, config.evaluation.interval > 0
    if evaluates:
        check_functions(config)
    sources = load_chat_sources(config)
    read = [*config.data.all_sources, *(config.validation.held_out(config.data) if validates else [])]
    read += config.evaluation.held_out(config.data) if evaluates else []
    inputs = (config.reward.model, *(source.path for source in read))
    session.open(inputs, config.trainer.tensor_parallel, texts_of(sources))
    session.form = learned_form(config, session.tokenizer)
    rows = usable_chats(sources, config, session.tokenizer, vocab_size_of(session))
    session.stream = resumed_stream(partial(ChatStream, rows, config), session.saved_state, config.allow_changes)
    if config.show:
        show_examples(ChatStream(rows, config).draw(config.show), session.tokenizer)
    session.validation = load_validation(config, session.tokenizer, vocab_size_of(session)) if validates else {}
    if evaluates:
        read_evaluation(session, session.form.end_token_ids)


def resumed_stream(make: Callable[[], Stream], state: dict[str, Any], allow_changes: bool) -> Stream:
    """A stream of data at the place that a checkpoint's `state` has; a new one without any.

    With `allow_changes`, a place in other data is none, and theirs begin at their beginning. Raises ValueError else.
    """
    stream = make()
    try:
        if state:
            stream.load_state_dict(state["data"])
    except ValueError as error:
        if not allow_changes:
            raise
        print(f"the data begin anew: {str(error).partition(';')[0]}", flush=True)
        stream = make()  # some of its sources may have their place already
    return stream


def read_evaluation(session: Session, end_token_ids: Sequence[int] = ()) -> None:
    """Read the held-out prompts of a session that trains by other rows or not at all; the reward processes start.

    end_token_ids: further tokens that end an answer.
    """
    config, data, generator = session.config, session.config.data, session.config.generator
    longest = data.max_prompt_tokens + generator.max_completion_tokens
    hf_folder.check_folder(session.model_folder, longest, generator.tensor_parallel)
    try:
        session.eval_prompts = held_out_prompts(session)
    except ValueError as error:
        raise ValueError(
            f"evaluation reads rows as GRPO does, prompts from data.prompt_column={data.prompt_column} and what "
            f"rewards get from data.answer_column={data.answer_column} and data.columns: {error}"
        ) from error
    session.scorer = Scorer(config, session.model_folder, session.tokenizer, end_token_ids)
    check_generation(session)


def held_out_prompts(session: Session) -> list[Prompt]:
    """The prompts that evaluation completes, with all columns that the reward functions need."""
    config = session.config
    tools, vocab_size = tools_of(config), vocab_size_of(session)
    prompts = load_eval_prompts(config.data, config.evaluation, session.tokenizer, tools, vocab_size)
    if config.data.row or config.data.teacher_column:
        check_functions(config, list(prompts[0].columns))
    try_rewards(config, [prompt.columns for prompt in prompts])
    return prompts


def vocab_size_of(session: Session) -> int:
    """The number of tokens that the session's model has a row for in its embedding."""
    return hf_folder.read_hf_config(session.model_folder).vocab_size


def check_functions(config: RunConfig, columns: list[str] | None = None) -> None:
    """Load the reward functions once, so that one that cannot be called is refused before anything starts.

    columns: those that the rows give; None, before they are read, takes those that `data` names. Which ones `data.row`
    makes is known only from the rows.
    """
    if columns is None and not config.data.row:
        columns = config.data.reward_columns
    if columns is not None and config.environment.enabled:
        columns = [*columns, *EPISODE_COLUMNS]
    load_functions(config.reward, columns, config.generator.max_completion_tokens)


def try_rewards(config: RunConfig, rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuse rows, each the columns that rewards get, that a built-in reward function cannot read."""
    functions = load_functions(config.reward, None, config.generator.max_completion_tokens)
    for columns in rows:
        try_built_ins(functions, columns)


def tools_of(config: RunConfig) -> dict[str, list[dict[str, Any]]]:
    """The tools of each environment as the chat template gets them, JSON schemas, by its name; none without one."""
    toolboxes = load_toolboxes(config.environment) if config.environment.enabled else {}
    return {name: toolbox.schemas for name, toolbox in toolboxes.items()}


def check_generation(session: Session) -> None:
    """Refuse an engine, an environment or a metric for the best checkpoint that would fail later."""
    config = session.config
    check_engine(config.generator, hf_folder.read_hf_config(session.model_folder))
    check_environment(session)
    if best := config.checkpoint.keep_best.removeprefix("eval/"):
        sets = list(dict.fromkeys(prompt.source for prompt in session.eval_prompts))
        names = evaluation_names(sets, config.evaluation.num_samples, bool(session.scorer.answer_format))
        if best not in names:
            raise ValueError(
                f"checkpoint.keep_best={best} is not among the held-out metrics{near_miss(best, names)}: "
                f"{', '.join(names)}"
            )


def check_environment(session: Session) -> None:
    """Refuse an environment whose class, functions or chat template cannot be used; tell what it is."""
    config, tokenizer = session.config, session.tokenizer
    if not config.environment.enabled:
        return
    toolboxes = load_toolboxes(config.environment)
    style = call_style(tokenizer, config.environment, toolboxes)
    turns = turns_of(tokenizer, config.environment, config.data, session.scorer.stop_token_ids, toolboxes)
    for name, toolbox in toolboxes.items():
        if not (toolbox.has_reward or config.reward.weights or config.algorithm.distill_coef):
            raise ValueError(
                f"{toolbox.name} has no get_reward and reward.functions is empty; give it one, or name some"
            )
        if not config.data.row:
            toolbox.check_columns(config.data.reward_columns)
        calls = f" with the tools {', '.join(toolbox.tools)}, called as {style}" if toolbox.tools else ""
        line = turns[name].line
        print(f"environment {name or toolbox.name}{calls}{'; ' if line else ''}{line}", flush=True)


def learned_form(config: RunConfig, tokenizer: "PreTrainedTokenizerBase") -> ChatForm:
    """How a model that was trained with this config writes chats, where its folder does not say so already.

    With an environment it keeps what the model wrote in earlier turns, and tells if the run's template does not. A
    template that reads `question`, which no one else passes, stays where it is.
    """
    data, template, ends = config.data, tokenizer.chat_template, ()
    is_own = data.prompt_template and not data.is_text_template and "question" not in template
    if isinstance(config, SFTConfig):
        end = end_of_turn(tokenizer, data)
        ends = () if end is None else (end,)
    elif config.environment.enabled and (keeping := serving_template(tokenizer, data)) != "":
        template, is_own = keeping, keeping is not None
        exported = "keeps them too" if is_own else "cannot be made to keep them: serve it with another one"
        print(
            "thoughts and all else of earlier turns stay as sampled, which the chat template would change; that of the "
            f"exported model {exported}",
            flush=True,
        )
    return ChatForm(template if is_own else "", ends)
