"""Types and bounds of the config's fields, and the text that names a data set.

One loop compares a config with its types and bounds. The bounds are four of our own and not those of annotated_types,
because they carry the words of the message.
"""

import dataclasses
import operator
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclasses.dataclass(frozen=True)
class Bound:
    """A bound of a number, as in `Annotated[int, AtLeast(1)]`. NaN is within no bound."""

    words: str
    holds: Callable[[float, float], bool]
    limit: float


AtLeast = partial(Bound, "at least", operator.ge)
Above = partial(Bound, "above", operator.gt)
AtMost = partial(Bound, "at most", operator.le)
Below = partial(Bound, "below", operator.lt)


WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "None",
    list: "a list",
    dict: "a dict",
}


def check_fields(config: Any, path: str = "") -> None:
    """Raise ValueError for the first field of a config, or of its sections, that does not fit its type and bounds."""
    for name, kind in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        if not fits(value, kind):
            raise ValueError(f"{path}{name}={value!r} must be {_words_of(kind)}")
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{path}{name}.")


def field_paths(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all fields (`algorithm.kl_coef`), each section behind its fields."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from field_paths(value, f"{prefix}{field.name}.")
        yield f"{prefix}{field.name}"


def settings(config: Any) -> dict[str, Any]:
    """Return the value of each field that is not a section, by its dotted path (`algorithm.kl_coef`)."""
    values = {path: operator.attrgetter(path)(config) for path in field_paths(config)}
    return {path: value for path, value in values.items() if not dataclasses.is_dataclass(value)}


def fits(value: Any, kind: Any) -> bool:
    """Tell whether a value has a field's type and lies within its bounds."""
    origin = get_origin(kind)
    parts = get_args(kind)
    if origin is Annotated:
        bounds = [part for part in parts if isinstance(part, Bound)]
        return fits(value, parts[0]) and all(bound.holds(value, bound.limit) for bound in bounds)
    if origin is Literal:
        return value in parts
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(entry, parts[0]) for entry in value)
    if origin is MutableMapping:
        return isinstance(value, dict) and all(fits(name, str) and fits(value[name], parts[1]) for name in value)
    if kind in (int, float):  # True is an int to Python
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if kind is str:  # a lone surrogate, which a command line in another encoding leaves, fits into no file; NUL no path
        return isinstance(value, str) and not re.search("[\ud800-\udfff\0]", value)
    return isinstance(value, kind)


def _words_of(kind: Any) -> str:
    """Write what a field takes, as `a whole number, at least 1`."""
    origin = get_origin(kind)
    parts = get_args(kind)
    if origin is Annotated:
        bounds = " and ".join(f"{part.words} {part.limit:g}" for part in parts if isinstance(part, Bound))
        words = (_words_of(parts[0]), bounds)
        return ", ".join(filter(None, words))
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (Union, UnionType):
        return " or ".join(map(_words_of, reversed(parts)))
    if origin is tuple:
        return f"a tuple, each entry {_words_of(parts[0])}"
    if origin is MutableMapping:
        return f"a dict from names, each value {_words_of(parts[1])}"
    return WORDS.get(kind, f"an object of class {kind.__name__}")


# ---- Sources of rows: `PATH[NAME]@REVISION:SPLIT`, where only the path must be given

# Suffix of a local file -> its reader
FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_SOURCE_PARTS = re.compile(
    r"(?P<path>[^\[\]@:]+\.py:\w+|[^\[\]@:]+)"
    r"(?:\[(?P<name>[^\[\]]*)\])?(?:@(?P<revision>[^\[\]@:]+))?(?::(?P<split>.+))?"
)


def names_function(path: str) -> bool:
    """Say whether `path` is `path/file.py:function`, a function in a file of the user's.

    >>> names_function("my_rewards.py:short"), names_function("math_reward")
    (True, False)
    """
    return re.search(r"\.py:\w+$", path) is not None


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set. Its label, by which metrics and samples name it, is empty if there is only one."""

    label: str
    path: str
    name: str = ""
    revision: str = ""
    split: str = "train"
    weight: float = 1.0

    @property
    def kind(self) -> str:
        """Kind of source: function, folder, file or hub."""
        if names_function(self.path) or self.path.endswith(".py"):
            return "function"
        path = pathlib.Path(self.path)
        if path.is_dir():
            return "folder"
        return "file" if path.is_file() or path.suffix in FILE_KINDS else "hub"

    @property
    def text(self) -> str:
        """Source in full, as a config writes it."""
        name = f"[{self.name}]" if self.name else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.path}{name}{revision}:{self.split}"


def parse_source(spec: str, field: str, label: str = "", split: str = "train") -> Source:
    """Read a text such as `openai/gsm8k[main]@v1:train[:5%]` as a Source; `split` is for a text without one.

    The path of an existing file is taken as it is, also with a split behind it. Raises ValueError, which
    names the config's `field`, for a text of another form, and for a revision or configuration of what has none.

    >>> source = parse_source("openai/gsm8k[main]:train[:90%]", "data.path")
    >>> source.path, source.name, source.split
    ('openai/gsm8k', 'main', 'train[:90%]')
    """
    path = spec
    while path and not os.path.exists(path):
        path, _, _ = path.rpartition(":")
    if path and not path.endswith(".py"):
        return Source(label, path, split=spec[len(path) + 1 :] or split)
    parts = _SOURCE_PARTS.fullmatch(spec)
    if parts is None:
        raise ValueError(
            f"{field}={spec!r} is no data set; write PATH[NAME]@REVISION:SPLIT, of which only PATH must be there, such "
            "as openai/gsm8k[main]:train[:90%] or rows.jsonl"
        )
    source = Source(label, parts["path"], parts["name"] or "", parts["revision"] or "", parts["split"] or split)
    if source.kind != "hub" and (source.revision or source.name):
        raise ValueError(
            f"{field}={spec!r}: {source.path} is a local {source.kind}, which has no revisions (@) and no "
            "configurations ([ ]); leave them out"
        )
    return source


def parse_sources(path: str | Mapping[str, str], field: str, split: str) -> list[Source]:
    """Read a field that names one data set, or several by their labels; see `parse_source`."""
    if isinstance(path, str):
        return [parse_source(path, field, split=split)]
    if not path:
        raise ValueError(f"{field} is empty; name a data set")
    return [parse_source(spec, f"{field} {label}", label, split) for label, spec in path.items()]
