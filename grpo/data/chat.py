"""A model's tokenizer and its chat template: texts in, token ids out."""

from typing import TYPE_CHECKING

from grpo.config import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder; raises ValueError if it has no chat template or no EOS token."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {folder} has no chat template; use an instruction-tuned model, or put a "
            "chat_template.jinja into the model's folder"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {folder} has no EOS token, so no completion could end; "
            "set eos_token in tokenizer_config.json"
        )
    return tokenizer


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", config: DataConfig, text: str) -> list[int]:
    """Token ids of one chat: the system prompt unless empty, `text` as the user's message, the assistant's opening."""
    messages = [{"role": "user", "content": text}]
    if config.system_prompt:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    # return_dict: since transformers 5 the default is a BatchEncoding, whose len() is its number of fields.
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **config.chat_template_kwargs
    )
