"""The model that a run starts from, checked before anything of it is loaded on a GPU."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from grpo.config import GRPOConfig, SFTConfig
from grpo.data import toy
from grpo.data.chat import check_template, load_tokenizer
from grpo.data.turns import end_of_turn
from grpo.models import hf_folder
from grpo.models.hf_folder import ChatForm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def learned_form(config: SFTConfig, tokenizer: "PreTrainedTokenizerBase") -> ChatForm:
    """How a model that SFT trained with this config writes chats, where its folder does not say so already.

    A template that reads `question`, which no one else passes, stays where it is.
    """
    end, template = end_of_turn(tokenizer, config.data), tokenizer.chat_template
    is_own = config.data.prompt_template and not config.data.is_text_template and "question" not in template
    return ChatForm(template if is_own else "", () if end is None else (end,))


def open_model_folder(
    config: GRPOConfig | SFTConfig, tensor_parallel: int, texts: Iterable[str] = (), toy_dir: str = ""
) -> tuple[str, "PreTrainedTokenizerBase"]:
    """The folder (or hub name) of `model.path`, and its tokenizer, whose template was tried.

    tensor_parallel: what its heads and vocabulary must divide by. A toy model is built in `toy_dir`, by default the run
    folder; its tokenizer may need `texts`, those of the data.
    Raises ValueError if there is no such folder, its model is not supported, its positions are fewer than
    `config.max_sequence_tokens`, or its tokenizer or template cannot be used.
    """
    folder = toy.build_if_toy(config.model.path, toy_dir or config.run_dir, texts, config.seed)
    folder = hf_folder.resolve_folder(folder)
    hf_folder.check_folder(folder, config.max_sequence_tokens, tensor_parallel)
    tokenizer = load_tokenizer(folder, config.data)
    hf_folder.check_vocabulary(folder, tokenizer)
    check_template(tokenizer, config.data)
    return folder, tokenizer
