"""Where rows come from, written as one text: `PATH[NAME]@REVISION:SPLIT`, of which only the path must be there."""

import os
import pathlib
import re
from dataclasses import dataclass

# Suffix of a local file -> what reads it; a file with any other suffix has JSON lines.
KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_PARTS = re.compile(
    r"(?P<path>(?:toy:)?[^\[\]@:]+)(?:\[(?P<name>[^\[\]]*)\])?(?:@(?P<revision>[^\[\]@:]+))?(?::(?P<split>.+))?"
)


@dataclass(frozen=True)
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
        """toy, folder, hub, or what a file holds: json, csv, parquet."""
        if self.path.startswith("toy:") or self.path == "seeds":
            return "toy"
        if pathlib.Path(self.path).is_dir():
            return "folder"
        suffix = pathlib.Path(self.path).suffix
        return KINDS.get(suffix, "json") if suffix in KINDS or pathlib.Path(self.path).is_file() else "hub"

    @property
    def is_file(self) -> bool:
        return self.kind in KINDS.values()

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
    parts = _PARTS.fullmatch(spec)
    if parts is None:
        raise ValueError(
            f"{field}={spec!r} is no data set; write PATH[NAME]@REVISION:SPLIT, of which only PATH must be there, such "
            "as openai/gsm8k[main]:train[:90%] or rows.jsonl"
        )
    return Source(label, parts["path"], parts["name"] or "", parts["revision"] or "", parts["split"] or split, weight)
