"""The files of the models that a run starts from, refused before they are loaded if they cannot be used."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.fields import RunConfig
from grpo.data import initial_model
from grpo.data.chat import check_template, load_tokenizer, template_name
from grpo.data.turns import end_of_turn
from grpo.models import hf_folder
from grpo.models.hf_folder import ChatForm
from grpo.models.lora import adapted_paths


@dataclass(frozen=True)
class PolicyFiles:
    """The policy's folder, and how the policy reads and writes text."""

    folder: str
    hf: PretrainedConfig
    """Its config.json."""
    tokenizer: PreTrainedTokenizerBase
    form: ChatForm
    """How the exported model writes chats."""
    stop_token_ids: Sequence[int]
    """The tokens that end a completion."""


def read_policy(
    config: RunConfig,
    texts: Iterable[str] = (),
    build_dir: str = "",
) -> PolicyFiles:
    """Open the folder of `model.path` and its tokenizer, and try its chat template.

    If `model.path` names a function that builds a model, it builds in `build_dir`, by default the run folder, and gets
    `texts`, those of the data, for its tokenizer. Raises ValueError if the folder, the model, its number of positions,
    the tokenizer or the template cannot be used, if the tensor_parallel degrees do not divide the model, if a layer
    that should get an adapter is missing, or if Muon should update experts.
    """
    build_dir = build_dir or config.run_dir
    folder = initial_model.build_model(config.model.path, build_dir, texts, config.seed)
    folder = hf_folder.resolve_folder(folder)
    hf = read_shape(config, folder)
    hf_folder.check_folder(folder)
    adapted_paths(hf, config.trainer)
    tokenizer = load_tokenizer(folder, config.data)
    hf_folder.check_vocabulary(folder, tokenizer)
    check_template(tokenizer, config.data)
    form = learned_form(config, tokenizer)
    more_stop_ids = (*config.generator.stop_token_ids, *form.end_token_ids)
    stop_token_ids = hf_folder.stop_token_ids(folder, tokenizer, more_stop_ids)
    return PolicyFiles(folder, hf, tokenizer, form, stop_token_ids)


def read_shape(config: RunConfig, folder: str) -> PretrainedConfig:
    """Read a model's config.json. Raises ValueError if the ranks cannot share it, or sequences are too long for it."""
    hf = hf_folder.read_hf_config(folder)
    hf_folder.check_trainer(folder, hf, config.trainer)
    tensor_parallel = math.lcm(config.trainer.tensor_parallel, config.generator.tensor_parallel)
    longest = config.max_sequence_tokens
    if config.evaluation.interval:
        longest = max(longest, config.data.max_prompt_tokens + config.generator.max_completion_tokens)
    hf_folder.check_lengths(folder, hf, longest, tensor_parallel)
    return hf


def learned_form(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ChatForm:
    """Return how a model trained with this config writes chats, as far as its own folder does not say so.

    A template that reads `question` is not exported, because nobody else passes that. Tokens that ended completions in
    training end replies of the exported model too.
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


def read_reference(config: GRPOConfig, policy: PolicyFiles) -> str:
    """Return folder or hub name of the frozen model: `model.reference_path`, checked, or else the policy's folder.

    Empty if the run needs none.
    """
    if not config.needs_reference:
        return ""
    path = config.model.reference_path
    if not path:
        return policy.folder
    folder = hf_folder.resolve_folder(path)
    hf = hf_folder.check_folder(folder)
    hf_folder.check_lengths(folder, hf, config.max_sequence_tokens, config.reference_tensor_parallel)
    hf_folder.check_reference(folder, policy.folder, policy.tokenizer)
    return path


def describe_ends(config: RunConfig, policy: PolicyFiles) -> list[str]:
    """Say what ends a completion. Warn if it goes on behind the token that ends a turn in the chat template.

    So it is with many base models: their template has <|im_end|>, and their EOS is <|endoftext|>.
    """
    generator = config.generator
    text_of = policy.tokenizer.convert_ids_to_tokens
    ends = [f"{text_of(token)!r} ({token})" for token in policy.stop_token_ids]
    ends += [f"the text {text!r}" for text in generator.stop]
    lines = [f"completions end at {', '.join(ends)}, or after {generator.max_completion_tokens} tokens"]
    end = end_of_turn(policy.tokenizer, config.data)
    if end is not None and end not in policy.stop_token_ids and text_of(end) not in generator.stop:
        lines.append(
            f"warning: {template_name(policy.tokenizer, config.data)} ends a turn with {text_of(end)}, and completions "
            f"go on behind it; end them there with --generator.stop-token-ids {end}"
        )
    return lines
