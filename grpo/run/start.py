"""What each script starts from, checked and read on rank 0 before its first step.

Bad input is refused here, before GPUs are used: ValueError or FileNotFoundError with the reason and the way out. Cheap
checks come first, and processes start last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.fields import EvaluationConfig, RunConfig, ValidationConfig
from grpo.data.prepare import first_columns, load_chat_sources, load_sources, texts_of, warn_of_repeated_rows
from grpo.models import hf_folder
from grpo.run.policy import PolicyFiles, read_policy, read_reference
from grpo.run.prompts import read_examples, read_held_out, read_prompts
from grpo.run.saved import Saved, find_saved
from grpo.run.scorer import Scorer, check_functions, read_rewards
from grpo.run.trial import try_algorithm
from grpo.types import Prompt


@dataclass(frozen=True)
class Start:
    """What a run starts from. What a script does not need is empty."""

    saved: Saved
    policy: PolicyFiles
    reference: str = ""
    """Folder or hub name of the frozen model."""
    data: Any = None
    """`Prompts` or `Examples`, from which training draws."""
    held_out: Sequence[Prompt] = ()
    """The prompts that evaluation completes."""
    scorer: Scorer | None = None
    """Its reward processes have started."""
    reward_model: str = ""
    """Folder or hub name of the reward model."""


# Of each function, `script` is the script's name in run.json, and `build_dir` the only place where a dry run may write.


def read_grpo(
    config: GRPOConfig,
    script: str,
    build_dir: str,
) -> Start:
    """Read the prompts, reference, held-out prompts and rewards of a GRPO run."""
    check_functions(config)
    try_algorithm(config.algorithm)
    sources = load_sources(config.data)
    check_functions(config, first_columns(sources))  # the encoder compares the other rows with these

    paths = [config.model.reference_path, *data_paths(config, config.evaluation)]
    saved = find_saved(config, script, paths, parts=("data", "flight"))
    policy = read_policy(config, texts_of(sources), build_dir)
    reference = read_reference(config, policy)
    prompts = read_prompts(config, sources, policy, saved)
    held_out = []
    if config.evaluation.interval:
        held_out = read_held_out(config, policy)
        if not config.environment.all_classes:  # whose rows may have one prompt for all, and differ in their columns
            rows = [order.rows for order in prompts.stream.orders.values()]
            warn_of_repeated_rows("evaluation", [prompt.ids for prompt in held_out], rows)
    scorer = read_rewards(config, policy, held_out)
    start = Start(saved, policy, reference, prompts, held_out, scorer, config.reward.model)
    note_weights(config, start)
    return start


def read_sft(
    config: SFTConfig,
    script: str,
    build_dir: str,
) -> Start:
    """Read the examples of a supervised run, and what it validates and evaluates on."""
    if config.evaluation.interval:
        check_functions(config)
    sources = load_chat_sources(config.data, config.row_format, config.completion_column)
    paths = data_paths(config, config.validation, config.evaluation)
    saved = find_saved(config, script, paths, parts=("data", "recent_losses"))
    policy = read_policy(config, texts_of(sources), build_dir)
    examples = read_examples(config, sources, policy, saved)
    start = Start(saved, policy, "", examples)
    if config.evaluation.interval:
        held_out, scorer = read_evaluation(config, policy)
        start = Start(saved, policy, "", examples, held_out, scorer, config.reward.model)
    note_weights(config, start)
    return start


def read_evaluation(config: RunConfig, policy: PolicyFiles) -> tuple[list[Prompt], Scorer]:
    """Read the held-out prompts of a script that does not train by GRPO, and start the reward processes."""
    data = config.data
    try:
        prompts = read_held_out(config, policy)
    except ValueError as error:
        raise ValueError(
            f"evaluation reads rows as GRPO does, prompts from data.prompt_column={data.prompt_column} and what "
            f"rewards get from data.answer_column={data.answer_column} and data.columns: {error}"
        ) from error
    return prompts, read_rewards(config, policy, prompts)


def data_paths(config: RunConfig, *sections: EvaluationConfig | ValidationConfig) -> list[str]:
    """Return the paths of the training data and of the held-out data that are used."""
    sources = list(config.data.all_sources)
    for section in sections:
        if section.interval:
            sources += section.held_out(config.data)
    return [source.path for source in sources]


def note_weights(config: RunConfig, start: Start) -> None:
    """Note the checksum of each model that a checkpoint does not hold: base of adapters, fixed reference, reward model.

    Raises what `WasRead.note` raises. The folders must have been checked.
    """
    folders = {}
    if config.trainer.lora_rank:
        folders["model.path"] = start.policy.folder
    if config.reference_has_model and not config.reference_moves:
        name = "model.reference_path" if config.model.reference_path else "model.path"
        folders[name] = hf_folder.resolve_folder(start.reference)
    if start.reward_model:
        folders["reward.model"] = hf_folder.resolve_folder(start.reward_model, scores=True)
    checksums = {}
    for name, folder in folders.items():
        checksums[f"the weights of {name}"] = f"checksum {hf_folder.weights_checksum(folder)}"
    start.saved.read.note("weights", checksums)
