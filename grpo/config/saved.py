"""The `config.py` of a run folder as data, and what another config changes about the run.

The file is parsed and never run, so that a run folder can be resumed that one would not run programs from.
"""

import ast
import dataclasses
from operator import attrgetter
from typing import Any

from grpo.config.fields import GRPOConfig, SFTConfig
from grpo.config.recipes import as_recipe

# Fields on which neither samples nor gradients depend, except for the order in which floating point numbers are added
# (and, with sampling.carry_over, for which groups are complete when a step ends); or what is measured besides. A name
# that ends in a dot stands for a whole section.
HARMLESS = (
    "run_dir",
    "profile",
    "record",
    "show",
    "stop_at_loss",
    "num_trainers",
    "sync_check_interval",
    "sync_check_tolerance",
    "roles.",
    "checkpoint.",
    "metrics.",
    "deadlines.",
    "warnings.",
    "evaluation.",
    "validation.",
    "model.attention",
    "model.reference_tensor_parallel",
    "generator.tensor_parallel",
    "generator.max_num_seqs",
    "generator.gpu_memory_utilization",
    "generator.kv_cache_gib",
    "generator.enforce_eager",
    "generator.sleep",
    "reward.num_workers",
    "reward.timeout_seconds",
    "reward.memory_gib",
    "reward.allow_weak_sandbox",
    "reward.environment",
    "trainer.tensor_parallel",
    "trainer.data_replicas",
    "trainer.micro_batch_tokens",
    "trainer.packing",
    "trainer.share_prompts",
    "trainer.activation_checkpointing",
    "trainer.fsdp_gather",
    "trainer.compile",
    "trainer.deterministic",
    "trainer.logprob_chunk_tokens",
    "trainer.max_skipped_steps",
)
# Of supervised fine-tuning besides: what only its evaluation by generating reads
HARMLESS_IN_SFT = ("reward.", "generator.", "data.max_prompt_tokens", "data.answer_column", "data.columns")
NOT_THERE = "not there"


@dataclasses.dataclass(frozen=True)
class Change:
    """A field that has another value than in the saved config."""

    path: str
    old: str
    """As Python writes it, as the next one."""
    new: str
    breaks_exactness: bool
    """Whether what the run samples or learns depends on it."""


def changes_since(saved: str, config: GRPOConfig | SFTConfig) -> list[Change]:
    """What `config` has other than `saved`, the text of a config that `as_recipe` wrote; in the order of the fields.

    A field that the saved one does not have yet counts with its default. Raises ValueError if it is no such text.
    """
    before, default, changes = read_saved(saved), type(config)(), []
    for path, new in read_saved(as_recipe(config)).items():  # so, without the flags of a single start
        old = before.pop(path) if path in before else attrgetter(path)(default)
        if repr(old) != repr(new):  # as text, because NaN is not NaN
            changes.append(Change(path, repr(old), repr(new), not is_harmless(path, config)))
    gone = [Change(path, repr(old), NOT_THERE, not is_harmless(path, config)) for path, old in before.items()]
    return changes + gone


def is_harmless(path: str, config: GRPOConfig | SFTConfig) -> bool:
    """Whether a run may go on with another value of that field and still be the same run."""
    if path == "num_steps":  # the other schedules end where the steps do
        return config.trainer.schedule == "constant"
    names = HARMLESS + (HARMLESS_IN_SFT if isinstance(config, SFTConfig) else ())
    return path.startswith(tuple(name for name in names if name.endswith("."))) or path in names


def read_saved(text: str) -> dict[str, Any]:
    """Value of each field by its dotted path. Raises ValueError if the text is not what `as_recipe` writes."""
    try:
        statements = ast.parse(text).body
        (config,) = [s.value for s in statements if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == "config"]
        values = dict(_fields(config, ""))
    except (SyntaxError, RecursionError, TypeError, MemoryError) as error:
        raise ValueError(f"it is no config that a run wrote ({error})") from error
    if not values:
        raise ValueError("it is no config that a run wrote")
    return values


def _fields(node: ast.expr, path: str):
    """(path, value) of each field of a section, written as a call with keywords."""
    if not _is_section(node):
        raise ValueError("it is no config that a run wrote")
    for keyword in node.keywords:
        if _is_section(keyword.value):
            yield from _fields(keyword.value, f"{path}{keyword.arg}.")
        else:
            yield f"{path}{keyword.arg}", _value(keyword.value)


def _is_section(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args


def _value(node: ast.expr) -> Any:
    """A literal, or float("inf") as `as_recipe` writes it."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "float" and len(node.args) == 1:
        return float(ast.literal_eval(node.args[0]))
    if isinstance(node, ast.Dict):
        return {ast.literal_eval(k): _value(v) for k, v in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)
