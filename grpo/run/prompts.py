"""What training draws from, and what is held out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.fields import RunConfig
from grpo.data.encode import Encoded, Encoder
from grpo.data.prepare import (
    Sources,
    encode_sources,
    load_eval_prompts,
    load_validation,
    warn_of_repeated_rows,
)
from grpo.data.streams import ChatStream, PromptStream
from grpo.report.samples import show_examples
from grpo.run.groups import Group
from grpo.run.policy import PolicyFiles
from grpo.run.saved import Saved, resume_data
from grpo.run.scorer import check_functions, tool_schemas
from grpo.types import Prompt


@dataclass(frozen=True)
class Prompts:
    """What GRPO samples for."""

    stream: PromptStream
    groups: Sequence[Group] = ()
    """Those in flight in the checkpoint."""


@dataclass(frozen=True)
class Examples:
    """What SFT learns from."""

    stream: ChatStream
    validation: Mapping[str, list[Encoded]]
    """The examples of each validation set, by its name."""


def read_prompts(
    config: GRPOConfig,
    sources: Sources,
    policy: PolicyFiles,
    saved: Saved,
) -> Prompts:
    """Encode the rows as prompts, and go to the saved place in them. Raises what `resume_data` raises."""
    encoder = prompt_encoder(config, policy, config.algorithm.teacher_template)
    rows = encode_sources(sources, encoder, config.prompts_per_step)
    stream = PromptStream(rows, config.data, config.seed)
    return Prompts(stream, resume_data(saved, stream))


def read_examples(
    config: SFTConfig,
    sources: Sources,
    policy: PolicyFiles,
    saved: Saved,
) -> Examples:
    """Encode the rows as chats, show the first ones if asked, and go to the saved place. Read the validation sets."""
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
    rows = encode_sources(sources, encoder, config.sequences_per_step)
    if config.show:
        first_examples = ChatStream(rows, config.data, config.seed).draw(config.show)
        show_examples(first_examples, policy.tokenizer)
    stream = ChatStream(rows, config.data, config.seed)
    resume_data(saved, stream)
    validation = {}
    if config.validation.interval:
        validation = load_validation(config.validation, encoder)
        held_out = [example.ids for examples in validation.values() for example in examples]
        warn_of_repeated_rows("validation", held_out, rows)
    return Examples(stream, validation)


def read_held_out(config: RunConfig, policy: PolicyFiles) -> list[Prompt]:
    """Read the prompts that evaluation completes, with all columns that the reward functions need."""
    prompts = load_eval_prompts(config.evaluation, prompt_encoder(config, policy))
    check_functions(config, [prompt.columns for prompt in prompts])
    return prompts


def prompt_encoder(config: RunConfig, policy: PolicyFiles, teacher_template: str = "") -> Encoder:
    """Return what makes tokens of prompts, and with a template also of those that a teacher reads."""
    return Encoder(
        policy.tokenizer,
        config.data,
        config.data.max_prompt_tokens,
        tools=tool_schemas(config),
        teacher_template=teacher_template,
        vocab_size=policy.hf.vocab_size,
    )
