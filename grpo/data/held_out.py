"""Held-out prompts, on which GRPO is evaluated, and held-out examples, on which SFT is validated."""

from typing import TYPE_CHECKING

from grpo.config import DataConfig, EvaluationConfig, SFTConfig
from grpo.config.sources import Source
from grpo.data.chat import Refused, TooLong, encode_prompt
from grpo.data.prepare import all_too_long
from grpo.data.rows import SourceRows, check_chat_rows, check_rows, tell_unusable
from grpo.data.streaming import read_held_out
from grpo.data.streams import Labelled, encode_chat_row
from grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_eval_prompts(
    data: DataConfig, evaluation: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase"
) -> list[Prompt]:
    """Of each held-out set the first `evaluation.num_prompts` prompts that fit, in its order.

    Fewer if the set has fewer. Prompt.index counts on from 0 through all sets, Prompt.source is the set's name. Prints
    how many there are.

    Raises:
        ValueError: rows cannot be used (see `check_rows`), or the chat template refuses some, and `data.bad_rows` is
            refuse; or no prompt of a set fits into data.max_prompt_tokens.
    """
    prompts = []
    for source in evaluation.held_out(data):
        _warn_of_training_data(source, data, evaluation.section)
        prompts += _held_out_prompts(source, data, evaluation.num_prompts, len(prompts), tokenizer)
    return prompts


def _held_out_prompts(
    source: Source, data: DataConfig, most: int, first_index: int, tokenizer: "PreTrainedTokenizerBase"
) -> list[Prompt]:
    rows = check_rows(source, read_held_out(source, data, most), data)
    prompts, too_long, refused = [], [], {}
    for row in rows.usable:
        if len(prompts) == most:
            break
        example = rows.example(row)
        try:
            ids = encode_prompt(tokenizer, data, example.prompt, data.max_prompt_tokens, example.tools)
        except TooLong as error:
            too_long.append(error.num_tokens)
            continue
        except Refused as error:
            refused[row] = str(error)
            continue
        index = first_index + len(prompts)
        prompts.append(Prompt(index, ids, example.columns, row, source.label, example.prompt))
    tell_unusable(refused, len(rows.rows), source.path, data.bad_rows, len(refused) < len(rows.usable))
    if too_long and not prompts:
        raise ValueError(all_too_long(source.path, "data.max_prompt_tokens", data.max_prompt_tokens, too_long))
    _tell(rows, len(prompts))
    if too_long:
        print(
            f"warning: {len(too_long)} held-out prompts of {source.path} are longer than data.max_prompt_tokens="
            f"{data.max_prompt_tokens} and were left out",
            flush=True,
        )
    return prompts


def load_validation(config: SFTConfig, tokenizer: "PreTrainedTokenizerBase") -> dict[str, list[Labelled]]:
    """Name of each held-out set (empty if there is one) -> the first `validation.num_examples` of its usable rows.

    Left out, as in training, are those without a label, and too long ones if `too_long` says so. Prints how many
    there are. Raises ValueError if rows cannot be used (see `check_chat_rows`), or the chat template refuses some, and
    `data.bad_rows` is refuse; or if none of a set is left.
    """
    sets = {}
    for source in config.validation.held_out(config.data):
        _warn_of_training_data(source, config.data, config.validation.section)
        sets[source.label] = _held_out_examples(source, config, tokenizer)
    return sets


def _held_out_examples(source: Source, config: SFTConfig, tokenizer: "PreTrainedTokenizerBase") -> list[Labelled]:
    num_wanted = config.validation.num_examples
    rows = check_chat_rows(source, read_held_out(source, config.data, num_wanted), config)
    examples, num_left_out, refused = [], 0, {}
    for row in rows.usable:
        if len(examples) == num_wanted:
            break
        try:
            example = encode_chat_row(rows.example(row), config, tokenizer)
        except TooLong:
            example = Labelled([], [])
        except Refused as error:
            refused[row] = str(error)
            continue
        if any(example.mask):
            examples.append(example)
        else:
            num_left_out += 1
    tell_unusable(refused, len(rows.rows), source.path, config.data.bad_rows, len(refused) < len(rows.usable))
    limit = f"max_sequence_tokens={config.max_sequence_tokens}"
    if not examples:
        raise ValueError(
            f"none of {len(rows.usable)} held-out examples of {source.path} has a token to learn within {limit}; raise "
            "it, or bring chats with assistant turns"
        )
    _tell(rows, len(examples))
    if num_left_out:
        print(
            f"warning: {num_left_out} held-out examples of {source.path} are longer than {limit} or have no token to "
            "learn, and were left out",
            flush=True,
        )
    return examples


def _warn_of_training_data(source: Source, data: DataConfig, called: str) -> None:
    if any(_may_overlap(source, training) for training in data.all_sources):
        print(
            f"warning: {called} uses the training data {source.path}; set {called}.path or {called}.split", flush=True
        )


def _may_overlap(one: Source, other: Source) -> bool:
    """Whether both have rows of one split, except two different parts of it, which a user wrote to keep them apart."""
    (split, _, part), (other_split, _, other_part) = one.split.partition("["), other.split.partition("[")
    same_rows = (one.path, one.name) == (other.path, other.name) and (one.is_file or split == other_split)
    return same_rows and (not part or not other_part or part == other_part)


def _tell(rows: SourceRows, num_used: int) -> None:
    source = rows.source
    name = f"{source.label} ({source.text})" if source.label else source.text
    print(f"held out: {num_used:,} of {len(rows.rows):,} rows of {name}", flush=True)
