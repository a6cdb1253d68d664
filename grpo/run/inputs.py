"""What a script starts from: `Inputs`, checked and read on rank 0 before its first step.

Bad input is refused here, before GPUs are used. Each function raises ValueError or FileNotFoundError with the reason
and the way out. A check that every run needs belongs in `open_run`.
"""

import itertools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from grpo.algorithm.trial import try_algorithm
from grpo.config import GRPOConfig, SFTConfig
from grpo.config.fields import EvaluationConfig, RunConfig, ValidationConfig
from grpo.config.user_files import near_miss
from grpo.data import toy
from grpo.data.chat import check_template, load_tokenizer
from grpo.data.encode import Encoded
from grpo.data.prepare import (
    load_chat_sources,
    load_eval_prompts,
    load_sources,
    load_validation,
    reward_columns,
    texts_of,
    usable_chats,
    usable_prompts,
    warn_of_repeated_rows,
)
from grpo.data.rows import Tools
from grpo.data.streams import ChatStream, PromptStream
from grpo.data.turns import end_of_turn
from grpo.environments.tools import load_toolboxes
from grpo.folder.checkpoint import open_run_folder
from grpo.folder.was_read import READ, WasRead
from grpo.models import hf_folder
from grpo.models.families import has_experts
from grpo.models.hf_folder import ChatForm
from grpo.models.lora import adapted_places
from grpo.report.rollout_metrics import evaluation_names
from grpo.report.samples import show_examples
from grpo.rewards.loading import load_functions, try_built_ins
from grpo.rewards.pool import EPISODE_COLUMNS
from grpo.roles.engine.episodes import call_style, turns_of
from grpo.roles.engine.vllm_engine import check_engine
from grpo.run.groups import Group, saved_groups
from grpo.run.scorer import Scorer
from grpo.types import Prompt, check_saved


@dataclass(frozen=True)
class Inputs:
    """What a run starts from. A field that the script does not need is empty."""

    model_folder: str
    tokenizer: PreTrainedTokenizerBase | None
    checkpoint: pathlib.Path | None
    """The checkpoint to continue from."""
    saved_state: Mapping[str, Any]
    """The driver's state in that checkpoint."""
    read: WasRead
    """What was read so far, as the next checkpoint keeps it."""
    step: int = 0
    """The number of steps that were done when it was saved."""
    stream: PromptStream | ChatStream | None = None
    """What training draws from."""
    groups: Sequence[Group] = ()
    """The groups in flight in that checkpoint."""
    reference_folder: str = ""
    """Folder or hub name of the frozen model."""
    eval_prompts: Sequence[Prompt] = ()
    """The prompts that evaluation completes."""
    scorer: Scorer | None = None
    """Its reward processes have started."""
    stop_token_ids: Sequence[int] = ()
    """The tokens that end a completion."""
    reward_model: str = ""
    """Folder or hub name of the reward model."""
    validation: Mapping[str, list[Encoded]] = field(default_factory=dict)
    """The examples of each validation set, by its name."""
    form: ChatForm = ChatForm()
    """How the exported model writes chats."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens for which the model has a row in its embedding."""
        return hf_folder.read_hf_config(self.model_folder).vocab_size

    def for_all_ranks(self) -> "Inputs":
        """Return the part that every rank needs, which is small and can be pickled."""
        return replace(
            self,
            tokenizer=None,
            saved_state={},
            stream=None,
            groups=(),
            scorer=None,
            validation={},
        )


# ---- The inputs of each script. Its name stands in run.json; `build_dir` is the only place where a dry run may write.


def read_grpo(
    config: GRPOConfig,
    script: str,
    build_dir: str,
) -> Inputs:
    """Read the prompts, references, held-out prompts and rewards of a GRPO run."""
    data = config.data
    check_functions(config)
    try_algorithm(config.algorithm)
    sources = load_sources(data)
    if data.row:  # which columns it makes is known only now
        check_functions(config, reward_columns(sources))
    # all rows of a source have columns of the same types, which the encoder checks
    first_columns = []
    for rows in sources:
        first = itertools.islice(rows.examples(), 1)
        first_columns += [example.columns for example in first]
    try_rewards(config, first_columns)

    paths = [config.model.reference_path, *data_paths(config, config.evaluation)]
    inputs = open_run(config, script, build_dir, paths, texts_of(sources), ("data", "flight"))
    if config.needs_reference:
        folder = reference_folder(config, inputs)
        inputs = replace(inputs, reference_folder=folder)

    tools = tool_schemas(config)
    rows = usable_prompts(
        sources,
        config,
        inputs.tokenizer,
        tools,
        inputs.vocab_size,
    )
    inputs = with_stream(inputs, PromptStream(rows, config))
    inputs = replace(inputs, form=learned_form(config, inputs.tokenizer))
    if config.evaluation.interval:
        prompts = held_out_prompts(config, inputs)
        if not config.environment.all_classes:  # whose rows may have one prompt for all, and differ in their columns
            warn_of_repeated_rows("evaluation", [prompt.ids for prompt in prompts], rows)
        inputs = replace(inputs, eval_prompts=prompts)
    inputs = with_scorer(config, inputs)
    note_weights(config, inputs)
    return inputs


def read_sft(
    config: SFTConfig,
    script: str,
    build_dir: str,
) -> Inputs:
    """Read the examples of a supervised run, and what it validates and evaluates on."""
    if config.evaluation.interval:
        check_functions(config)
    sources = load_chat_sources(config)
    paths = data_paths(config, config.validation, config.evaluation)
    inputs = open_run(config, script, build_dir, paths, texts_of(sources), ("data", "recent_losses"))
    form = learned_form(config, inputs.tokenizer)
    rows = usable_chats(sources, config, inputs.tokenizer, inputs.vocab_size)
    if config.show:
        first_examples = ChatStream(rows, config).draw(config.show)
        show_examples(first_examples, inputs.tokenizer)
    inputs = with_stream(inputs, ChatStream(rows, config))
    inputs = replace(inputs, form=form)
    if config.validation.interval:
        validation = load_validation(config, inputs.tokenizer, inputs.vocab_size)
        held_out = [example.ids for examples in validation.values() for example in examples]
        warn_of_repeated_rows("validation", held_out, rows)
        inputs = replace(inputs, validation=validation)
    if config.evaluation.interval:
        inputs = read_evaluation(config, inputs)
    note_weights(config, inputs)
    return inputs


def read_evaluation(config: RunConfig, inputs: Inputs) -> Inputs:
    """Add the held-out prompts of a script that does not train by GRPO, and start the reward processes."""
    data = config.data
    longest = data.max_prompt_tokens + config.generator.max_completion_tokens
    hf_folder.check_folder(inputs.model_folder, longest, config.generator.tensor_parallel)
    try:
        prompts = held_out_prompts(config, inputs)
    except ValueError as error:
        raise ValueError(
            f"evaluation reads rows as GRPO does, prompts from data.prompt_column={data.prompt_column} and what "
            f"rewards get from data.answer_column={data.answer_column} and data.columns: {error}"
        ) from error
    return with_scorer(config, replace(inputs, eval_prompts=prompts))


# ---- Folders and streams


def data_paths(config: RunConfig, *sections: EvaluationConfig | ValidationConfig) -> list[str]:
    """Return the paths of the training data and of the held-out data that are used."""
    sources = list(config.data.all_sources)
    for section in sections:
        if section.interval:
            sources += section.held_out(config.data)
    return [source.path for source in sources]


def open_run(
    config: RunConfig,
    script: str,
    build_dir: str,
    paths: Sequence[str],
    texts: Iterable[str] = (),
    parts: Sequence[str] = (),
) -> Inputs:
    """Check the run folder, find the checkpoint to continue from, and open the model's folder and tokenizer.

    paths: folders, files and hub names that the run reads besides its model and reward model. parts: what the script
    saves of its driver. For the other arguments and for what raises ValueError see `open_run_folder`, `WasRead` and
    `open_model_folder`.
    """
    paths = [config.model.path, config.reward.model, *paths]
    checkpoint, saved_state = open_run_folder(config, script, paths)
    if saved_state:
        check_saved("the driver's state", saved_state, ("step", READ, *parts))
    read = WasRead(config, saved_state)
    folder, tokenizer = open_model_folder(config, texts, build_dir)
    return Inputs(folder, tokenizer, checkpoint, saved_state, read, read.step)


def open_model_folder(
    config: RunConfig,
    texts: Iterable[str] = (),
    build_dir: str = "",
) -> tuple[str, PreTrainedTokenizerBase]:
    """Return the folder of `model.path` and its tokenizer, after trying its chat template.

    If `model.path` names a function that builds a model, it builds in `build_dir`, by default the run folder, and gets
    `texts`, those of the data, for its tokenizer. Raises ValueError if the folder, the model, its number of positions,
    the tokenizer or the template cannot be used, if the tensor_parallel degrees do not divide the model, if a layer
    that should get an adapter is missing, or if Muon should update experts.
    """
    build_dir = build_dir or config.run_dir
    folder = toy.build_model(config.model.path, build_dir, texts, config.seed)
    folder = hf_folder.resolve_folder(folder)
    tensor_parallel = math.lcm(config.trainer.tensor_parallel, config.generator.tensor_parallel)
    hf_folder.check_folder(folder, config.max_sequence_tokens, tensor_parallel)
    hf = hf_folder.read_hf_config(folder)
    adapted_places(hf, config.trainer)
    if config.trainer.optimizer == "muon" and has_experts(hf):
        raise ValueError(
            f"trainer.optimizer=muon does not go with {folder}, a mixture of {hf.num_experts} experts: it updates "
            "single matrices, and experts are stacked; set --trainer.optimizer adamw"
        )
    tokenizer = load_tokenizer(folder, config.data)
    hf_folder.check_vocabulary(folder, tokenizer)
    check_template(tokenizer, config.data)
    return folder, tokenizer


def reference_folder(config: GRPOConfig, inputs: Inputs) -> str:
    """Return the folder of the frozen model, checked: that of `model.reference_path`, or else the policy's."""
    if not config.model.reference_path:
        return inputs.model_folder
    folder = hf_folder.resolve_folder(config.model.reference_path)
    hf_folder.check_folder(
        folder,
        config.max_sequence_tokens,
        config.reference_tensor_parallel,
    )
    hf_folder.check_reference(folder, inputs.model_folder, inputs.tokenizer)
    return config.model.reference_path


def note_weights(config: RunConfig, inputs: Inputs) -> None:
    """Note the checksum of each model that a checkpoint does not hold: base of adapters, fixed reference, reward model.

    Raises what `WasRead.note` raises. The folders must have been checked.
    """
    folders = {}
    if config.trainer.lora_rank:
        folders["model.path"] = inputs.model_folder
    if config.reference_has_model and not config.reference_moves:
        name = "model.reference_path" if config.model.reference_path else "model.path"
        folders[name] = hf_folder.resolve_folder(inputs.reference_folder)
    if inputs.reward_model:
        folders["reward.model"] = hf_folder.resolve_folder(inputs.reward_model, scores=True)
    checksums = {}
    for name, folder in folders.items():
        checksums[f"the weights of {name}"] = f"checksum {hf_folder.weights_checksum(folder)}"
    inputs.read.note("weights", checksums)


def with_stream(inputs: Inputs, stream: PromptStream | ChatStream) -> Inputs:
    """Add a new stream of data. If the run is resumed, add the groups in flight, and go to the saved place in the data.

    If the rows are others, which `allow_changes` allows, the data begin again. Then, and after any other change on
    which the result depends, groups in flight are left out, because they belong to the old run. Raises ValueError if
    another version of the project saved them, and what `WasRead.note` raises.
    """
    checksums = {}
    for label, order in stream.orders.items():
        name = f"the rows of {label}" if label else "the rows"
        checksums[name] = f"{order.num_rows} of {order.source}, checksum {order.rows.checksum}"
    has_same_rows = inputs.read.note("rows", checksums)
    state = inputs.saved_state
    groups = []
    if state and has_same_rows:
        stream.load_state_dict(state["data"])
    elif state:
        print("the data begin again")
    if state.get("flight"):
        groups = saved_groups(state["flight"])
    if groups and not inputs.read.is_same_run:
        print(f"{len(groups)} groups in flight are left out: they are of the old config or data")
        groups = []
    return replace(inputs, stream=stream, groups=groups)


# ---- Held-out prompts and rewards


def held_out_prompts(config: RunConfig, inputs: Inputs) -> list[Prompt]:
    """Read the prompts that evaluation completes, with all columns that the reward functions need."""
    tools = tool_schemas(config)
    prompts = load_eval_prompts(
        config.data,
        config.evaluation,
        inputs.tokenizer,
        tools,
        inputs.vocab_size,
    )
    if config.data.row:
        check_functions(config, list(prompts[0].columns))
    try_rewards(config, [prompt.columns for prompt in prompts])
    return prompts


def with_scorer(config: RunConfig, inputs: Inputs) -> Inputs:
    """Start the reward processes, and refuse what would fail only when the engine starts or an evaluation ends."""
    scorer = Scorer(
        config,
        inputs.model_folder,
        inputs.tokenizer,
        inputs.form.end_token_ids,
    )
    on_gpu = config.gpus > 0 or torch.cuda.is_available()  # a dry run may be for another machine
    check_engine(config.generator, hf_folder.read_hf_config(inputs.model_folder), on_gpu=on_gpu)
    if config.environment.enabled:
        check_environment(config, inputs.tokenizer, scorer.stop_token_ids)
    check_best(config, inputs.eval_prompts, scorer)
    return replace(
        inputs,
        scorer=scorer,
        stop_token_ids=scorer.stop_token_ids,
        reward_model=config.reward.model,
    )


def check_functions(config: RunConfig, columns: Iterable[str] | None = None) -> None:
    """Load the reward functions once, so that one that cannot be called is refused before anything starts.

    columns: those that the rows have. Without them, before the rows are read, those that `data` names are taken; which
    ones `data.row` makes is not known then. Raises ValueError also for a column that an episode's would replace.
    """
    data = config.data
    if columns is None and not data.row:
        columns = data.reward_columns
    if columns is not None and config.environment.enabled:
        for name in EPISODE_COLUMNS:
            if name in columns and name not in (data.prompt_column, data.environment_column):
                raise ValueError(
                    f"data.columns has {name}, but with an environment reward functions get a column of that name "
                    f"anyway; give the data set's another name, such as --data.columns my_{name} {name}"
                )
        columns = [*columns, *EPISODE_COLUMNS]
    load_functions(config.reward, columns, config.generator.max_completion_tokens)


def try_rewards(config: RunConfig, rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuse rows that a built-in reward function cannot read. Each row is the columns that rewards get."""
    functions = load_functions(config.reward, None, config.generator.max_completion_tokens)
    for columns in rows:
        try_built_ins(functions, columns)


def check_best(
    config: RunConfig,
    prompts: Sequence[Prompt],
    scorer: Scorer,
) -> None:
    """Refuse a `checkpoint.keep_best` that is not among the metrics of the held-out prompts."""
    best = config.checkpoint.keep_best.removeprefix("eval/")
    if not best:
        return
    names = evaluation_names(prompts, config.evaluation.num_samples, scorer.answer_format)
    if best not in names:
        hint = near_miss(best, names)
        raise ValueError(f"checkpoint.keep_best={best} is not among the held-out metrics{hint}: {', '.join(names)}")


# ---- Environments, tools and the exported chat form


def tool_schemas(config: RunConfig) -> dict[str, Tools]:
    """Return the JSON schemas of each environment's tools, as the chat template gets them, by its name."""
    if not config.environment.enabled:
        return {}
    toolboxes = load_toolboxes(config.environment)
    return {name: toolbox.schemas for name, toolbox in toolboxes.items()}


def check_environment(
    config: GRPOConfig,
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


def learned_form(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ChatForm:
    """Return how a model trained with this config writes chats, as far as its own folder does not say so.

    A template that reads `question` is not exported, because nobody else passes that. Tokens that ended completions in
    training end answers of the exported model too.
    """
    data = config.data
    template = ""
    if data.prompt_template and not data.is_text_template and "question" not in tokenizer.chat_template:
        template = tokenizer.chat_template
    if isinstance(config, SFTConfig):
        end = end_of_turn(tokenizer, data)
        end_token_ids = () if end is None else (end,)
        return ChatForm(template, end_token_ids)
    return ChatForm(template, config.generator.stop_token_ids)
