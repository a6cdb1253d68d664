"""The READMEs say what the code does: their metrics, fields, paths, recipes, commands, messages, examples are real."""

import ast
import dataclasses
import inspect
import io
import pathlib
import re
import shlex
import tokenize

import pytest

from docs.make_reference import page_text
from grpo import config as c
from grpo.config.checks import describe_roles, validate
from grpo.config.recipes import field_paths, load, load_recipe
from grpo.folder.run_folder import RUN_FILES
from grpo.rewards.loading import BUILT_INS
from tests.door import DELETED, is_gone

ROOT = pathlib.Path(__file__).parents[2]
FOUND = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "configs/README.md", ROOT / "tests/README.md"]
FOUND += sorted((ROOT / "tests/bench").rglob("*.md"))
NAMES = [str(path.relative_to(ROOT)) for path in FOUND]
# They name what was there once
HISTORY = [name for name in NAMES if name == "CHANGELOG.md" or "evidence/" in name or "notebook/" in name]
PAGES = {name: (ROOT / name).read_text() for name in sorted({*NAMES} - {*HISTORY})}
TOP = PAGES["README.md"]
for _page in ("docs/from-trl.md", "docs/from-verl.md"):  # the first column of their tables has names of other tools
    PAGES[_page] = re.sub(r"^\|[^|]*\|", "| |", PAGES[_page], flags=re.MULTILINE)
EVERYTHING = "\n".join(PAGES.values())
FILES = [*ROOT.glob("*.py"), *(ROOT / "grpo").rglob("*.py")]
SOURCES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
DEFAULTS = {
    "train_grpo.py": (c.GRPOConfig, str(ROOT / "configs" / "qwen3_1_7b_gsm8k.py")),
    "train_sft.py": (c.SFTConfig, str(ROOT / "configs" / "sft_llama3_1_8b.py")),
}

# One per reward function, event of an episode, number of samples, source
MANY = {
    "validation/<name>/loss",
    "reward/<function>",
    "environment/calls",
    "environment/<fault>",
    "environment/ended_by/<why>_frac",
    "skipped/<cause>",
    "eval/pass_at_<k>",
    "reward/source/<name>",
    "prompt/source/<name>",
}
# What the log replaces by `mismatch/ess`
INGREDIENTS = {"mismatch/weight", "mismatch/weight_squared"}

# Files that a user writes, and those of another project.
OTHER_FILES = {
    "my.py",
    "my_agent.sh",
    "my_task/make_rows.py",
    "my_task/rewards.py",
    "my_task/recipe.py",
    "my_task/ask.py",
    "my_score.py",
    "rewards.py",
    "score.py",
    "tools.py",
    "path/file.py",
    "script.py",
    "configs/my_run.py",
    "apps/grpo/main.py",
    "apps/sft/main.py",
}
OTHER_TOOLS_FLAGS = {
    "--lr",
    "--learning-rate",
    "--field",
    "--no-field",
    "--nproc_per_node",
    "--nnodes",
    "--rdzv_backend",
    "--rdzv_endpoint",
    "--nodes",
    "--help",
}
OTHER_TOOLS_FLAGS |= {"--shutdown-timeout", "--signals-to-handle", "--max_restarts"}
OTHER_TOOLS_FLAGS |= {
    "--argjson",
    "--no-deps",
    "--torch-backend",
    "--logdir",
    "--standalone",
    "--step",
    "--turns",
    "--play",
}
OTHER_TOOLS_FLAGS |= {"--shape", "--jobs", "--roles", "--phases", "--kinds", "--array", "--env", "--file", "--tag"}
OTHER_TOOLS_FLAGS |= {"--num", "--cases", "--worst", "--prompt", "--evaluation", "--html", "--methods", "--layers"}
OTHER_TOOLS_FLAGS |= {"--partition", "--account", "--mem"}
MOST_LINES = 120  # of the page that a newcomer reads first, 30 of them what the quickstart prints
MOST_BYTES = 14 * 1024  # of any other page, except the reference


def table(first_header: str) -> list[list[str]]:
    """Rows of the one table whose first column has this header, as lists of cells."""
    pages = [page for page in PAGES.values() if f"\n| {first_header} |" in page]
    assert len(pages) == 1, f"{len(pages)} tables {first_header}"
    rows = []
    for line in pages[0].partition(f"\n| {first_header} |")[2].splitlines()[2:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def section(page: str, heading: str) -> str:
    """The text under a heading of the second level."""
    found = PAGES[page].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert found, f"{page} has no section {heading}"
    return found


def python_of(page: str) -> str:
    """The one block of Python on a page."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    return block


def documented_metrics() -> set[str]:
    rows = table("Metric") + table("Seconds")
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


def phases() -> set[str]:
    return {f"time/{name}" for name in re.findall(r'\.(?:phase|enter)\("(\w+)"\)', "\n".join(SOURCES.values()))}


def test_the_first_page_is_short():
    assert len(TOP.splitlines()) <= MOST_LINES


def test_no_page_is_long():
    sizes = {name: len(text.encode()) for name, text in PAGES.items() if name.startswith("docs/")}
    assert [name for name, size in sizes.items() if size > MOST_BYTES and name != "docs/reference.md"] == []


def test_the_reference_is_that_of_the_fields():
    """If not: `python -m docs.make_reference`."""
    assert PAGES["docs/reference.md"] == page_text()


# ---- Metrics


def test_every_documented_metric_is_logged():
    """Losses name theirs without `loss/`; a phase is logged as `time/PHASE`."""
    code = "\n".join(SOURCES.values())
    for name in documented_metrics() - MANY - phases():
        short = name.removeprefix("loss/")
        assert f'"{short}"' in code or f"record({short}=" in code, name


def test_every_logged_metric_is_documented():
    groups = (
        "reward|completion|environment|prompt|groups|time|memory|mismatch|lag|sampling|eval|loss|distill|validation"
    )
    groups += "|packing"
    for file, source in SOURCES.items():
        code = re.sub(r"^ *>>> .*$", "", source, flags=re.MULTILINE)  # examples have names of a user's functions
        found = set(re.findall(rf'"((?:{groups})/\w+)"', code))
        assert found <= documented_metrics() | INGREDIENTS, file
    assert phases() <= documented_metrics()


def test_losses_metrics_are_all_listed():
    found = set()
    functions = ast.parse(SOURCES["grpo/algorithm/losses.py"]).body
    for function in functions:
        for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            if isinstance(node, ast.Dict):
                found |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                found |= {node.slice.value} if isinstance(node.slice, ast.Constant) else set()
    assert found
    assert {f"loss/{name}" for name in found} <= documented_metrics()


# ---- Configuration and commands


def test_every_section_and_own_field_is_explained():
    page = section("configs/README.md", "Configuration")
    for config in (c.GRPOConfig(), c.SFTConfig()):
        sections = {name for name, value in vars(config).items() if dataclasses.is_dataclass(value)}
        if isinstance(config, c.GRPOConfig):
            assert {row[0].strip("`") for row in table("Section")} == sections
        for name in vars(config).keys() - sections:
            assert f"`--{name.replace('_', '-')}`" in page, name


def test_every_field_that_is_named_exists():
    paths = {*field_paths(c.GRPOConfig()), *field_paths(c.SFTConfig())}
    sections = "|".join({path.partition(".")[0] for path in paths if "." in path})
    named = set(re.findall(rf"`((?:{sections})\.\w+)`", EVERYTHING)) - {*RUN_FILES}
    assert len(named) > 30
    methods = {name for name in named if f"{name}(" in SOURCES["train_grpo.py"]}  # of the Trainer
    assert sorted(named - paths - methods) == []


def test_other_commands_start_what_exists():
    tools = re.findall(r"\bpython -m grpo\.(\w+)", EVERYTHING)
    scripts = re.findall(r"\b(?:python|bash) ([\w/]+\.(?:py|sh))", EVERYTHING)
    assert "look" in tools and "launch/quickstart.sh" in scripts
    for path in {*(f"grpo/tools/{tool}.py" for tool in tools), *scripts} - OTHER_FILES:
        assert (ROOT / path).is_file(), path


def test_layout_flags_give_the_processes_they_say():
    for layout, _, flags, processes in table("Layout"):
        config = load(c.GRPOConfig, DEFAULTS["train_grpo.py"][1], shlex.split(flags.strip("`")))
        assert config.num_ranks == int(processes), layout
        assert config.roles.colocated == (layout == "colocated")
        assert config.needs_reference == (layout in ("split", "reference on the trainers"))


def test_every_flag_exists(capsys):
    known = set(OTHER_TOOLS_FLAGS)
    for config_type, default in DEFAULTS.values():
        with pytest.raises(SystemExit):
            load(config_type, default, ["--help"])
        known |= set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out))
    prose = re.sub(r"\]\([^)]*\)", "", EVERYTHING)  # an anchor may have two dashes too
    assert set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", prose)) <= known


# ---- Paths, names, recipes, messages, examples


def anchors(path: pathlib.Path) -> set[str]:
    """Those of a page's headings, as code hosts make them, and those that it writes."""
    text = path.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    written = re.findall(r'<a id="([\w-]+)">', text)
    return {*written, *(re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings)}


@pytest.mark.parametrize("page", [*PAGES, *HISTORY])
def test_every_link_resolves(page):
    path = ROOT / page
    links = [link for link in re.findall(r"\]\(([^)]+)\)", path.read_text()) if "://" not in link]
    for link in links:
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists() or is_gone(file), link
        assert not anchor or is_gone(file) or anchor in anchors(file), link


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_is_named_exists(page):
    """Paths as seen from the page's own folder, the root, or a folder of the root."""
    text = re.sub(r"(\[[\w.-]+\.(?:md|py))?\]\([^)]*\)", "]", PAGES[page])  # links have a test of their own
    text = re.sub(r"`[^`]*`[^`|.]*?\sof\s+commit", "", text)  # what was there once
    folders = re.findall(r"(?<![\w./-])(?:grpo|configs|docs|launch|tests)/[\w./-]*\w", text)
    files = re.findall(r"(?<![\w.-])[\w./-]*\w\.(?:py|txt|toml|sh|sbatch|md)\b(?!:)", text)
    named = {*folders, *files} - OTHER_FILES
    named = {path for path in named if pathlib.Path(path).name not in RUN_FILES}
    places = [(ROOT / page).parent, *(ROOT / folder for folder in ("", "grpo", "configs", "launch"))]
    named_files = {path: [place / path for place in places] for path in sorted(named)}
    assert [path for path, files in named_files.items() if not any(f.exists() or is_gone(f) for f in files)] == []
    assert page != "README.md" or {"train_grpo.py", "launch/quickstart.sh"} <= named


def test_every_tensor_that_is_named_exists():
    """A suffix after the legend of grpo/types.py makes a name one of the code's."""
    named = set(re.findall(r"`([a-z]\w*_(?:N|S|T|BT|PG))`", EVERYTHING))
    assert {"ids_N", "loss_mask_BT"} <= named
    assert [name for name in named if not any(re.search(rf"\b{name}\b", source) for source in SOURCES.values())] == []


def test_the_step_is_that_of_the_script():
    """Whatever the list of the step's parts names is called in train_grpo.py."""
    parts = re.findall(r"^\d\. (.*(?:\n   .*)*)", section("docs/design/step.md", "How a step works"), re.MULTILINE)
    named = [name for part in parts for name in re.findall(r"`([a-z]\w*(?:\.\w+)?)`", part)]
    named = [name for name in named if name not in ("group_size",)]
    assert len(parts) >= 8 and len(named) >= 12
    assert [name for name in named if name not in SOURCES["train_grpo.py"]] == []


@pytest.mark.parametrize("script", DEFAULTS)
def test_docstrings_and_comments_of_the_scripts_name_what_exists(script):
    """`config.x` and `section.x` are fields; `module.x` is defined in that module; any other name is used in code."""
    texts, code = [], set()
    for token in tokenize.generate_tokens(io.StringIO(SOURCES[script]).readline):
        if token.type == tokenize.COMMENT or token.string.startswith('"""'):
            texts.append(token.string)
        elif token.type == tokenize.NAME or token.type == tokenize.STRING:
            code |= {token.string.strip('"'), re.sub("_[A-Z]+$", "", token.string)}  # without its suffix
    fields = {*field_paths(DEFAULTS[script][0]())}
    fields |= {field.rpartition(".")[2] for field in fields}
    named = {name.removeprefix("config.") for name in re.findall(r"`([a-z][\w.]*)`", "\n".join(texts))}
    for name in named - fields - code - {*SOURCES}:
        owner, _, attribute = name.rpartition(".")
        sources = [source for file, source in SOURCES.items() if pathlib.Path(file).stem == owner]
        assert any(re.search(rf"\b(def {attribute}\(|{attribute} =)", source) for source in sources), name


def test_the_table_of_waits_has_each_line_for_which_all_ranks_wait():
    page = SOURCES["train_grpo.py"]
    waits = page.partition("who waits for it")[2].partition("\ndef ")[0]
    methods = re.findall(r"@(?:partial\()?(?:from|on)_driver(?:, .*)?\n    def (\w+)", SOURCES["grpo/run/driver.py"])
    called = [name for name in methods if f"driver.{name}(" in page.partition("\ndef sample")[0]]
    assert {"plan", "request_ahead", "log"} <= {*called}
    assert [name for name in called if not re.search(rf"\b{name}\b", waits)] == []
    rows = re.findall(r"^#     (\S+?),? .*  all$", waits, re.MULTILINE)
    assert len(rows) >= 5 and all(f"{name}(" in page for name in rows)


def test_who_talks_to_whom_names_what_exists():
    for who in (name for row in table("Call") for name in re.findall(r"`([\w.]+)`", row[0])):
        owner, _, function = who.rpartition(".")
        holders = [source for source in SOURCES.values() if not owner or f"class {owner}" in source]
        assert any(f"def {function}(" in source for source in holders) or (DELETED and not holders), who


def test_where_to_change_what_names_what_exists():
    """In a row of that table, each name is in one of the row's files (or in one of the scripts)."""
    for wish, where in table("I want"):
        files = [SOURCES["train_grpo.py"]]
        for link in re.findall(r"\]\(([^)]+)\)", where):
            path = ROOT / "docs/design" / link.partition("#")[0]
            if not is_gone(path):
                files.append(path.read_text())
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", where):
            if name not in SOURCES and name not in field_paths(c.GRPOConfig()):
                assert any(re.search(rf"\b{name.rpartition('.')[2]}\b", text) for text in files), f"{wish}: {name}"


def test_every_recipe_is_listed_with_its_ranks():
    listed = {re.search(r"\((.*)\)", row[0])[1]: row for row in table("Recipe")}
    assert set(listed) == {path.name for path in (ROOT / "configs").glob("*.py")}
    for name, (_, gpus, layout, command) in listed.items():
        assert f"configs/{name}" in command
        config_type = DEFAULTS["train_sft.py" if "train_sft.py" in command else "train_grpo.py"][0]
        config = load_recipe(str(ROOT / "configs" / name), config_type)
        assert int(gpus) == (0 if config.model.dtype == "float32" else config.num_ranks)
        if config_type is c.GRPOConfig and config.generator.tensor_parallel == 1:
            for part in describe_roles(config.roles).split(" + "):
                assert part in layout, f"{name}: {part}"


def test_recipes_that_are_shown_can_be_used():
    shown = [
        code
        for code in re.findall(r"```python\n(.*?)```", PAGES["configs/README.md"], re.DOTALL)
        if "\nconfig =" in code
    ]
    assert len(shown) == 2
    for code in shown:
        names = {"__file__": str(ROOT / "configs" / "my_run.py")}
        exec(code, names)
        validate(names["config"])


# Those of torch, pip and other libraries.
FOREIGN_MESSAGES = {
    "operator torchvision::nms does not exist",
    "CUDA out of memory",
    "No matching distribution found for torch==2.13.0+cpu",
}


def test_every_message_is_one_of_the_code():
    # neighbouring literals joined, values in braces as they are
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(SOURCES.values()))
    code = code.replace("{config.num_ranks}", "8")
    for row in table("Message"):
        message = re.match(r"`(.*?)`", row[0])[1]
        assert message in code or message in FOREIGN_MESSAGES, message


def test_own_loss_and_reward_are_the_files_that_run_end_to_end():
    loss, reward = (python_of(f"docs/own-{what}.md") for what in ("loss", "reward"))
    assert loss == (ROOT / "configs/examples/my_method.py").read_text()
    assert reward == (ROOT / "configs/examples/my_reward.py").read_text()
    assert len(loss.splitlines()) < 40 and len(reward.splitlines()) <= 25


def test_every_built_in_reward_is_listed_with_its_options():
    facts = {"max_completion_tokens", "call_timeout_seconds", "worker_memory_gib"}  # filled in by the run
    rows = [row for row in table("Reward function") if not DELETED or row[0].strip("`") in BUILT_INS]
    for row in rows:
        parameters = inspect.signature(BUILT_INS[row[0].strip("`")]).parameters.values()
        options = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - facts
        assert set(re.findall(r"`(\w+)`", row[2])) == options, row[0]
    assert len(rows) == len(BUILT_INS)
