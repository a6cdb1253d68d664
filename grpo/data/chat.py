"""A model's tokenizer and its chat template, or the user's prompt template: texts in, token ids out."""

import pathlib
from typing import TYPE_CHECKING

from grpo.config import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands for a prompt, to see whether a template writes it
PROBE = "grpo probe 1867"


def load_tokenizer(folder: str, data: DataConfig | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder, with the chat template of `data.prompt_template` if that is a file.

    Raises ValueError if there is no template, it does not write the prompt, or the tokenizer has no EOS token.
    """
    import transformers

    data = data or DataConfig()
    if (pathlib.Path(folder) / "tokenizer.json").is_file():
        # As the file has it. AutoTokenizer rebuilds it after the name of a class, which is the wrong one where a Llama
        # has another tokenizer (R1-Distill): silently other tokens.
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if data.prompt_template and not data.is_text_template:
        tokenizer.chat_template = _read_template(data.prompt_template)
        _check_template(tokenizer, data)
    if not tokenizer.chat_template and not data.prompt_template:
        raise ValueError(
            f"the tokenizer of {folder} has no chat template; use an instruction-tuned model, or say what a prompt "
            "looks like, such as --data.prompt-template 'Question: {question} Answer:' (or a .jinja file)"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {folder} has no EOS token, so no completion could end; "
            "set eos_token in tokenizer_config.json"
        )
    return tokenizer


def _read_template(path: str) -> str:
    if not pathlib.Path(path).is_file():
        raise ValueError(f"data.prompt_template file {pathlib.Path(path).absolute()} does not exist")
    return pathlib.Path(path).read_text()


def _check_template(tokenizer: "PreTrainedTokenizerBase", data: DataConfig) -> None:
    """Raise ValueError unless the template of the user's file writes the prompt."""
    import jinja2

    try:
        text = _render(tokenizer, data, PROBE, tokenize=False)
    except jinja2.TemplateError as error:
        raise ValueError(f"data.prompt_template {data.prompt_template}: {type(error).__name__}: {error}") from error
    if PROBE not in text:
        raise ValueError(
            f"data.prompt_template {data.prompt_template} leaves the prompt out; write it as {{{{ question }}}}, or as "
            "the content of `messages`"
        )


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", config: DataConfig, text: str) -> list[int]:
    """Token ids of one prompt.

    By the chat template: the system prompt unless empty, `text` as the user's message, the assistant's opening. By a
    text template: that text with its placeholders filled in, after the tokenizer's own beginning of a text (BOS), if
    it has one.
    """
    if config.is_text_template:
        # the question last, so that nothing within it is taken for a placeholder
        filled = config.prompt_template.replace("{system_prompt}", config.system_prompt).replace("{question}", text)
        ids = tokenizer(filled)["input_ids"]
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids  # some tokenizers close every text
    return _render(tokenizer, config, text, tokenize=True)


def _render(tokenizer: "PreTrainedTokenizerBase", config: DataConfig, text: str, tokenize: bool) -> list[int] | str:
    """One chat by the tokenizer's chat template."""
    messages = [{"role": "user", "content": text}]
    if config.system_prompt:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    # return_dict: since transformers 5 the default is a BatchEncoding, whose len() is its number of fields.
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        tokenize=tokenize,
        return_dict=False,
        **({"question": text} if config.prompt_template else {}),
        **config.chat_template_kwargs,
    )
