"""What training draws from, and what is held out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.fields import RunConfig
from grpo.data.encode import Encoded
from grpo.data.prepare import (
    Sources,
    load_eval_prompts,
    load_validation,
    usable_chats,
    usable_prompts,
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
    rows = usable_prompts(
        sources,
        config,
        policy.tokenizer,
        tool_schemas(config),
        policy.hf.vocab_size,
    )
    stream = PromptStream(rows, config)
    return Prompts(stream, resume_data(saved, stream))


def read_examples(
    config: SFTConfig,
    sources: Sources,
    policy: PolicyFiles,
    saved: Saved,
) -> Examples:
    """Encode the rows as chats, show the first ones if asked, and go to the saved place. Read the validation sets."""
    rows = usable_chats(sources, config, policy.tokenizer, policy.hf.vocab_size)
    if config.show:
        first_examples = ChatStream(rows, config).draw(config.show)
        show_examples(first_examples, policy.tokenizer)
    stream = ChatStream(rows, config)
    resume_data(saved, stream)
    validation = {}
    if config.validation.interval:
        validation = load_validation(config, policy.tokenizer, policy.hf.vocab_size)
        held_out = [example.ids for examples in validation.values() for example in examples]
        warn_of_repeated_rows("validation", held_out, rows)
    return Examples(stream, validation)


def read_held_out(config: RunConfig, policy: PolicyFiles) -> list[Prompt]:
    """Read the prompts that evaluation completes, with all columns that the reward functions need."""
    prompts = load_eval_prompts(
        config.data,
        config.evaluation,
        policy.tokenizer,
        tool_schemas(config),
        policy.hf.vocab_size,
    )
    check_functions(config, [prompt.columns for prompt in prompts])
    return prompts
