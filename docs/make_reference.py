"""Write docs/reference.md: every field with its default, what it may be, its sentence, and the pages that name it.

python -m docs.make_reference
"""

import ast
import inspect
import pathlib
import re
from typing import get_args

from grpo import config as c
from grpo.config import fields
from grpo.config.recipes import load_recipe
from grpo.config.values import settings

FOLDER = pathlib.Path(__file__).parent
RECIPES = {"train_grpo.py": "qwen3_1_7b_gsm8k.py", "train_sft.py": "sft_llama3_1_8b.py"}
HEAD = """# Reference: every field

`python -m docs.make_reference` writes this page. A flag is the field with dashes: `trainer.learning_rate` is
`--trainer.learning-rate`. Without a recipe, flags change the default recipe of a script: where its value is another
one than the field's default, it follows in brackets. [How to write values](../configs/README.md#configuration).
"""
COLUMNS = "\n| Field | Default | May be | What it says | Pages |\n|---|---|---|---|---|"
# What annotations say, in words
WORDS = {
    r" \| None|[']|, \.\.\.|\b(?:Annotated|Literal|tuple)\[|\](?=[ ,]|$)": "",
    r"\bPositive\b": "1 or more",
    r"\b(?:Count|Interval|NotNegative)\b": "0 or more",
    r"\bAboveZero\b": "above 0",
    r"\bTemperature\b": "0.01 or more",
    r"AtMost\((\d)\)": r"at most \1",
    r"Below\((\w+|math.inf)\)": r"below \1",
    r"math.inf": "infinity",
    r"\bOneOrSeveral\b": "text, or names with texts",
    r"\bTable\[\w+": "names with values",
    r"\bbool\b": "True, False",
    r"\bstr\b": "text",
    r"\b(?:int|float)\b": "a number",
} | {name: ", ".join(get_args(getattr(fields, name))) for name in ("TrainOn", "RowFormat", "LoRATarget")}


def read_fields() -> dict[tuple[str, str], tuple[str, str]]:
    """Return what a field may be and its sentence, by class and name."""
    found = {}
    for node in ast.parse(inspect.getsource(fields)).body:
        for line, text in zip(getattr(node, "body", ()), getattr(node, "body", ())[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(text, ast.Expr):
                may_be = ast.unparse(line.annotation)
                for pattern, words in WORDS.items():
                    may_be = re.sub(pattern, words, may_be)
                found[node.name, line.target.id] = may_be, " ".join(text.value.value.split())
    return found


def pages_with(path: str) -> str:
    """Return links to the two pages that name a field most often."""
    flag = path.replace("_", "-")
    pattern = re.compile(rf"(?<![\w.-])(?:--{re.escape(flag)}|{re.escape(path)})(?![\w.-])")
    how_tos = [page for page in sorted(FOLDER.glob("*.md")) if not re.match("from-|reference", page.name)]
    counts = {page.name: len(pattern.findall(page.read_text())) for page in how_tos}
    best = sorted((page for page in counts if counts[page]), key=lambda page: -counts[page])
    return ", ".join(f"[{page[:-3]}]({page})" for page in best[:2])


def page_text() -> str:
    """Return the whole page."""
    defaults = {"train_grpo.py": c.GRPOConfig(), "train_sft.py": c.SFTConfig()}
    recipes = {
        script: settings(load_recipe(f"configs/{recipe}", type(defaults[script]))) for script, recipe in RECIPES.items()
    }
    paths = dict.fromkeys(path for config in defaults.values() for path in settings(config))
    about = read_fields()
    tables: dict[str, list[str]] = {"outside the sections": []}
    for path in paths:
        section, _, name = path.rpartition(".")
        holder = next(config for config in defaults.values() if path in settings(config))
        default = settings(holder)[path]
        classes = type(getattr(holder, section) if section else holder).__mro__
        may_be, sentence = next(about[cls.__name__, name] for cls in classes if (cls.__name__, name) in about)
        others = [
            f"{recipe[path]!r} in {script}"
            for script, recipe in recipes.items()
            if recipe.get(path, default) != default
        ]
        value = "; ".join(others)
        anchor = path.replace("_", "-").replace(".", "-")
        cells = [
            f'<a id="{anchor}"></a>`{path}`',
            f"`{default!r}`" + f" ({value})" * bool(others),
            may_be,
            sentence,
            pages_with(path),
        ]
        row = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        tables.setdefault(section or "outside the sections", []).append(row)
    parts = [f"\n## {section}\n" + COLUMNS + "\n" + "\n".join(rows) for section, rows in tables.items()]
    return HEAD + "\n".join(parts) + "\n"


if __name__ == "__main__":
    (FOLDER / "reference.md").write_text(page_text())
