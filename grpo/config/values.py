"""What a field of the config takes: its type, and bounds written at the field; and the text that names a data set.

One loop holds a config against types and bounds. The bounds are our own four and not those of annotated_types, because
they carry the words of the message.
"""

import dataclasses
import operator
import os
import pathlib
import re
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclasses.dataclass(frozen=True)
class Bound:
    """One bound of a number, as in `Annotated[int, AtLeast(1)]`. NaN is in no bound."""

    words: str
    holds: Callable[[float, float], bool]
    limit: float


AtLeast = partial(Bound, "at least", operator.ge)
Above = partial(Bound, "above", operator.gt)
AtMost = partial(Bound, "at most", operator.le)
Below = partial(Bound, "below", operator.lt)


class Harmless:
    """Marks a field or section, as in `Annotated[int, AtLeast(1), Harmless]`, with which a run may change on resume.

    Neither samples nor gradients depend on it, except for the order in which floating point numbers are added (and,
    with sampling.carry_over, for which groups are complete when a step ends); or it is measured besides.
    """


WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", NoneType: "None"}
WORDS |= {list: "a list", dict: "a dict"}


def check_fields(config: Any, path: str = "") -> None:
    """Raise ValueError for the first field of a config, or of its sections, that does not fit its type and bounds."""
    for name, kind in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        if not fits(value, kind):
            raise ValueError(f"{path}{_misfit(name, value, kind)}")
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{path}{name}.")


def field_paths(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all fields (`algorithm.kl_coef`), sections after their fields."""
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            yield from field_paths(value, f"{prefix}{field.name}.")
        yield f"{prefix}{field.name}"


def fits(value: Any, kind: Any) -> bool:
    """Tell whether a value has a field's type and lies within its bounds."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return fits(value, parts[0]) and all(bound.holds(value, bound.limit) for bound in _bounds(parts))
    if origin is Literal:
        return value in parts
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(entry, parts[0]) for entry in value)
    if origin is MutableMapping:
        return isinstance(value, dict) and all(fits(n, str) and fits(entry, parts[1]) for n, entry in value.items())
    if kind in (int, float):  # True is an int to Python
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if kind is str:  # a lone surrogate, which a command line in another encoding leaves, fits into no file; NUL no path
        return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" or c == "\0" for c in value)
    return isinstance(value, kind)


def _misfit(name: str, value: Any, kind: Any) -> str:
    """Say what must be another: the value of a field, or of a tuple or table the first entry that does not fit."""
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    parts = get_args(plain)
    if get_origin(plain) is tuple and isinstance(value, tuple):
        wrong = next(entry for entry in value if not fits(entry, parts[0]))
        return f"{name} has {wrong!r}, which must be {_describe(parts[0])}"
    if get_origin(plain) is MutableMapping and isinstance(value, dict):
        for label, entry in value.items():
            if not fits(entry, parts[1]):
                return f"{name} has {label} = {entry!r}, which must be {_describe(parts[1])}"
    return f"{name}={value!r} must be {_describe(kind)}"


def _bounds(parts: tuple) -> list[Bound]:
    return [part for part in parts if isinstance(part, Bound)]


def _describe(kind: Any) -> str:
    """`a whole number, at least 1`."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = " and ".join(f"{bound.words} {bound.limit:g}" for bound in _bounds(parts))
        return ", ".join(filter(None, (_describe(parts[0]), bounds)))
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (Union, UnionType):
        return " or ".join(map(_describe, reversed(parts)))
    if origin is tuple:
        return f"a tuple, each entry {_describe(parts[0])}"
    if origin is MutableMapping:
        return f"a dict from names, each value {_describe(parts[1])}"
    return WORDS.get(kind, f"an object of class {kind.__name__}")


# ---- Where rows come from: `PATH[NAME]@REVISION:SPLIT`; all except the path can be left out

# Suffix of a local file -> what reads it; a file with any other suffix has JSON lines.
FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_SOURCE_PARTS = re.compile(
    r"(?P<path>[^\[\]@:]+\.py:\w+|[^\[\]@:]+)"
    r"(?:\[(?P<name>[^\[\]]*)\])?(?:@(?P<revision>[^\[\]@:]+))?(?::(?P<split>.+))?"
)


def names_function(path: str) -> bool:
    """Say whether `path` is `path/file.py:function`, a function in a file of the user's."""
    return re.search(r"\.py:\w+$", path) is not None


@dataclasses.dataclass(frozen=True)
class Source:
    """One data set, by the name that metrics and samples give it; that name is empty where there is only one."""

    label: str
    path: str
    name: str = ""
    revision: str = ""
    split: str = "train"
    weight: float = 1.0

    @property
    def kind(self) -> str:
        """function, folder, hub, or what a file holds: json, csv, parquet."""
        if names_function(self.path) or self.path.endswith(".py"):
            return "function"
        if pathlib.Path(self.path).is_dir():
            return "folder"
        suffix = pathlib.Path(self.path).suffix
        return FILE_KINDS.get(suffix, "json") if suffix in FILE_KINDS or pathlib.Path(self.path).is_file() else "hub"

    @property
    def is_file(self) -> bool:
        return self.kind in FILE_KINDS.values()

    @property
    def text(self) -> str:
        """The source in full, as a config says it."""
        name = f"[{self.name}]" if self.name else ""
        return f"{self.path}{name}{'@' if self.revision else ''}{self.revision}:{self.split}"

    @property
    def name_and_text(self) -> str:
        return f"{self.label} ({self.text})" if self.label else self.text


def parse_source(spec: str, field: str, label: str = "", split: str = "train", weight: float = 1.0) -> Source:
    """`openai/gsm8k[main]@v1:train[:5%]` as a Source; `split` is that of a text that leaves it open.

    A text that is the path of a file or folder is that and nothing else. Raises ValueError, which names the config's
    `field`, for a text of another form.
    """
    if os.path.exists(spec):
        return Source(label, spec, split=split, weight=weight)
    parts = _SOURCE_PARTS.fullmatch(spec)
    if parts is None:
        raise ValueError(
            f"{field}={spec!r} is no data set; write PATH[NAME]@REVISION:SPLIT, of which only PATH must be there, such "
            "as openai/gsm8k[main]:train[:90%] or rows.jsonl"
        )
    return Source(label, parts["path"], parts["name"] or "", parts["revision"] or "", parts["split"] or split, weight)
