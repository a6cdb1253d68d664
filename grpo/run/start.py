"""What each script starts from, checked and read on rank 0 before its first step.

Bad input is refused here, before GPUs are used: ValueError or FileNotFoundError with the reason and the way out. Cheap
checks come first, and processes start last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grpo import features
from grpo.config import GRPOConfig, SFTConfig
from grpo.config.fields import HeldOutConfig, RunConfig
from grpo.data import prepare
from grpo.data.encode import Encoded, Encoder
from grpo.data.streams import ChatStream, PromptStream
from grpo.models import hf_folder
from grpo.run.groups import Group
from grpo.run.policy import PolicyFiles, read_policy, read_reference
from grpo.run.saved import Saved, find_saved, resume_data
from grpo.run.scorer import Scorer, check_functions, read_rewards
from grpo.types import Prompt


@dataclass(frozen=True)
class Start:
    """What a run starts from. What a script does not need is empty, and on other ranks than 0 everything."""

    saved: Saved | None = None
    policy: PolicyFiles | None = None
    reference: str = ""
    """Folder or hub name of the frozen model."""
    stream: PromptStream | ChatStream | None = None
    """What training draws from."""
    groups: Sequence[Group] = ()
    """Those in flight in the checkpoint of GRPO."""
    validation: Mapping[str, list[Encoded]] = field(default_factory=dict)
    """The examples of each validation set of SFT, by its name."""
    held_out: Sequence[Prompt] = ()
    """The prompts that evaluation completes."""
    scorer: Scorer | None = None
    """Its reward processes have started."""

    @property
    def reward_model(self) -> str:
        """Folder or hub name of the reward model, empty if none scores."""
        return self.scorer.config.reward.model if self.scorer else ""


# Of each function, `script` is the script's name in run.json, and `build_dir` the only place where a dry run may write.


def read_grpo(
    config: GRPOConfig,
    script: str,
    build_dir: str,
) -> Start:
    """Read the prompts, reference, held-out prompts and rewards of a GRPO run."""
    check_functions(config)
    features.call(config, "try_algorithm", config.algorithm)
    sources = prepare.load_sources(config.data)
    check_functions(config, prepare.first_columns(sources))  # the encoder compares the other rows with these

    paths = [config.model.reference_path, *data_paths(config, config.evaluation)]
    saved = find_saved(config, script, paths, names=("data", "flight"))
    policy = read_policy(config, prepare.texts_of(sources), build_dir)
    reference = read_reference(config, policy)
    rows = prepare.encode_sources(sources, prompt_encoder(config, policy))
    stream = PromptStream(rows, config.data, config.seed)
    groups = resume_data(saved, stream)
    held_out = []
    if config.evaluation.interval:
        held_out = read_held_out(config, policy)
        if not config.environment.reward_name:  # whose rows may have one prompt for all, and differ in their columns
            ids = [prompt.ids for prompt in held_out]
            prepare.warn_of_repeated_rows("evaluation", ids, rows)
    start = Start(
        saved,
        policy,
        reference,
        stream,
        groups,
        held_out=held_out,
        scorer=read_rewards(config, policy),
    )
    note_models(config, start)
    return start


def read_sft(
    config: SFTConfig,
    script: str,
    build_dir: str,
) -> Start:
    """Read the examples of a supervised run, and what it validates and evaluates on. Show some if asked."""
    if config.evaluation.interval:
        check_functions(config)
    sources = prepare.load_chat_sources(config.data, config.row_format, config.completion_column)
    paths = data_paths(config, config.validation, config.evaluation)
    saved = find_saved(config, script, paths, names=("data", "recent_losses"))
    policy = read_policy(config, prepare.texts_of(sources), build_dir)
    encoder = Encoder(
        policy.tokenizer,
        config.data,
        config.max_sequence_tokens,
        config.train_on,
        truncates=config.too_long == "truncate",
        row_format=config.row_format,
        completion_column=config.completion_column,
        vocab_size=policy.hf.vocab_size,
    )
    rows = prepare.encode_sources(sources, encoder)
    first_examples = ChatStream(rows, config.data, config.seed).draw(config.show)
    features.call(config, "show_examples", first_examples, policy.tokenizer)
    stream = ChatStream(rows, config.data, config.seed)
    resume_data(saved, stream)
    validation = {}
    if config.validation.interval:
        validation = prepare.load_validation(config.validation, encoder)
        ids = [example.ids for examples in validation.values() for example in examples]
        prepare.warn_of_repeated_rows("validation", ids, rows)
    held_out = []
    scorer = None
    if config.evaluation.interval:
        held_out, scorer = read_evaluation(config, policy)
    start = Start(
        saved,
        policy,
        stream=stream,
        validation=validation,
        held_out=held_out,
        scorer=scorer,
    )
    note_models(config, start)
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
    return prompts, read_rewards(config, policy)


def read_held_out(config: RunConfig, policy: PolicyFiles) -> list[Prompt]:
    """Read the prompts that evaluation completes, with all columns that the reward functions need."""
    prompts = prepare.load_eval_prompts(config.evaluation, prompt_encoder(config, policy))
    check_functions(config, [prompt.columns for prompt in prompts])
    return prompts


def prompt_encoder(config: RunConfig, policy: PolicyFiles) -> Encoder:
    """Return what makes tokens of prompts."""
    tools = {}
    for schemas in features.call(config, "tool_schemas", config):
        tools |= schemas
    return Encoder(
        policy.tokenizer,
        config.data,
        config.data.max_prompt_tokens,
        tools=tools,
        vocab_size=policy.hf.vocab_size,
    )


def data_paths(config: RunConfig, *sections: HeldOutConfig) -> list[str]:
    """Return the paths of the training data and of the held-out data that are used."""
    sources = list(config.data.all_sources)
    for section in sections:
        if section.interval:
            sources += section.held_out(config.data)
    return [source.path for source in sources]


def note_models(config: RunConfig, start: Start) -> None:
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
