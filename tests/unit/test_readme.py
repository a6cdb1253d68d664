"""The README says what the code does: its metrics, sections, paths, recipes, commands, messages, example are real."""

import dataclasses
import inspect
import pathlib
import re
import shlex

import pytest

from grpo.config import OWN_LOSS_DEFAULTS, PAPER_DEFAULTS, GRPOConfig, SFTConfig
from grpo.config.layout import check_world_size, describe_layout
from grpo.config.recipes import load, load_recipe
from grpo.rewards.builtin import BUILT_INS

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SOURCES = {path.name: path.read_text() for path in [*ROOT.glob("*.py"), *(ROOT / "grpo").rglob("*.py")]}
DEFAULTS = {
    "train_grpo.py": (GRPOConfig, str(ROOT / "configs" / "qwen3_1_7b_gsm8k.py")),
    "train_sft.py": (SFTConfig, str(ROOT / "configs" / "toy_sft.py")),
}

# Every metric that a run logs, by the file that names it; `reward/<function>` stands for one per reward function.
METRICS = {
    "rollout_metrics.py": "reward/mean reward/std reward/none_count reward/failed_count completion/length_mean "
    "completion/length_max completion/truncated_frac prompt/length_mean groups/zero_variance_frac eval/accuracy "
    "eval/reward_mean eval/completion_length_mean eval/truncated_frac eval/none_count eval/sample_reward_mean "
    "eval/sample_length_mean",
    "step_timer.py": "time/startup time/other time/step",
    "losses.py": "clip_share clip_low_share clip_high_share dual_clip_share gate_mean weight_cut_share active_share "
    "ratio_mean ratio_max mismatch/mean mismatch/max mismatch/kl",
    "trainer.py": "loss entropy grad_norm learning_rate",
    "train_grpo.py": "kl ess corrected_share",
    "driver.py": "reward/kl_penalty mismatch/nonfinite_frac tokens_per_second memory/peak_gib sampling/rounds "
    "sampling/informative_frac sampling/full_frac sampling/filtered",
}
# One per reward function, and one per number of samples
MANY = {"reward/<function>", "eval/pass_at_<k>"}
NAMED = {name for names in METRICS.values() for name in names.split()} | MANY
# What the loop takes out of the losses' metrics again, to make `ess` of it
INGREDIENTS = {"weight", "weight_squared"}

# Not written yet when a checkout has no measurements, or the reader's own.
MAY_BE_ABSENT = {"configs/RESULTS.md"}
# Files that a run writes.
RUN_FILES = {"config.py", "metrics.jsonl", "samples.txt", "file.py"}
OTHER_TOOLS_FLAGS = {"--nproc_per_node", "--nnodes", "--rdzv_backend", "--rdzv_endpoint", "--nodes", "--help"}
OTHER_TOOLS_FLAGS |= {"--no-deps", "--torch-backend"}


def table(first_header: str) -> list[list[str]]:
    """Rows of the README's table whose first column has this header, as lists of cells."""
    lines = README.partition(f"\n| {first_header} |")[2].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert rows, f"no table {first_header}"
    return rows


def phases() -> set[str]:
    scripts = SOURCES["train_grpo.py"] + SOURCES["train_sft.py"] + SOURCES["driver.py"]
    return {f"time/{name}" for name in re.findall(r'\.phase\("(\w+)"\)', scripts)}


# ---------------------------------------------------------------------------------------------------------------------
# Metrics
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", METRICS)
def test_metrics_are_logged(file):
    for name in METRICS[file].split():
        assert f'"{name}"' in SOURCES[file], f"{file} logs no {name}"


def test_metrics_with_a_slash_are_all_listed():
    groups = "reward|completion|prompt|groups|time|memory|mismatch|sampling|eval"
    for file in ("rollout_metrics.py", "trainer.py", "train_grpo.py", "train_sft.py", "driver.py", "step_timer.py"):
        found = re.findall(rf'"((?:{groups})/\w+)"', SOURCES[file])
        assert set(found) <= NAMED | phases(), file


def test_losses_metrics_are_all_listed():
    code = SOURCES["losses.py"].partition("LOSSES: dict")  # names of losses are keys too
    listed = set(METRICS["losses.py"].split())
    for part in (code[0], code[2].partition("\n}\n")[2]):
        found = re.findall(r'"([\w/]+)": [\w~(]|metrics\["(\w+)"\] = ', part)
        assert {first or second for first, second in found} - INGREDIENTS <= listed


def test_every_metric_is_explained_once():
    rows = table("Metric")
    explained = [row[0].strip("`") for row in rows]
    assert len(set(explained)) == len(explained)
    assert set(explained) == NAMED | phases()
    for name, unit, meaning, look in rows:
        assert unit and meaning and look, name


# ---------------------------------------------------------------------------------------------------------------------
# Configuration and commands
# ---------------------------------------------------------------------------------------------------------------------


def test_every_section_and_own_field_is_explained():
    fields = {field.name: getattr(GRPOConfig(), field.name) for field in dataclasses.fields(GRPOConfig)}
    sections = {name for name, value in fields.items() if dataclasses.is_dataclass(value)}
    assert {row[0].strip("`") for row in table("Section")} == sections
    for name in fields.keys() - sections:
        assert f"`--{name.replace('_', '-')}`" in README, name


def commands() -> list[str]:
    """Every command of the README that starts one of the scripts, from code blocks and from tables."""
    lines = re.findall(r"^    ((?:torchrun|sbatch) .*)$", README, re.MULTILINE)
    lines += re.findall(r"`((?:torchrun|sbatch) [^`]*)`", README)
    return [line for line in lines if "--help" not in line]


def test_there_are_commands():
    assert len(commands()) >= 10


@pytest.mark.parametrize("command", commands())
def test_command_parses_and_starts_as_many_ranks_as_its_recipe_needs(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    script = next(word for word in words if word.endswith((".py", ".sbatch")))
    position = words.index(script)
    launcher, arguments = words[:position], words[position + 1 :]
    config_type, default = DEFAULTS["train_grpo.py" if script.endswith(".sbatch") else script]
    options = dict(word.lstrip("-").split("=") for word in launcher[1:])
    nodes = int(options.get("nodes", options.get("nnodes", 1)))
    check_world_size(load(config_type, default, arguments), nodes * int(options.get("nproc_per_node", 8)))


def test_layout_flags_give_the_processes_they_say():
    for layout, _, flags, processes in table("Layout"):
        config = load(GRPOConfig, DEFAULTS["train_grpo.py"][1], shlex.split(flags.strip("`")))
        assert config.num_ranks == int(processes), layout
        assert config.roles.colocated == (layout == "colocated")
        assert config.needs_reference == (layout in ("split", "reference on the trainers"))


def test_every_flag_exists(capsys):
    known = set(OTHER_TOOLS_FLAGS)
    for config_type, default in DEFAULTS.values():
        with pytest.raises(SystemExit):
            load(config_type, default, ["--help"])
        known |= set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", README)) <= known


# ---------------------------------------------------------------------------------------------------------------------
# Paths, recipes, messages, example
# ---------------------------------------------------------------------------------------------------------------------


def test_every_path_exists():
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    folders = re.findall(r"\b(?:grpo|configs|launch|tests)/[\w./-]*\w", README)
    files = re.findall(r"(?<![\w./-])[\w-]+\.(?:py|txt|toml|sh|sbatch)\b", README)
    paths = {*links, *folders, *files} - MAY_BE_ABSENT - RUN_FILES
    assert "train_grpo.py" in paths and "launch/quickstart.sh" in paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_anchor_exists():
    headings = re.findall(r"^## (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors


def test_every_recipe_is_listed_with_its_ranks():
    listed = {re.search(r"\((.*)\)", row[0])[1]: row for row in table("Recipe")}
    assert set(listed) == {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    for path, (_, gpus, layout, command) in listed.items():
        assert path in command
        config_type = DEFAULTS["train_sft.py" if "train_sft.py" in command else "train_grpo.py"][0]
        config = load_recipe(str(ROOT / path), config_type)
        assert int(gpus) == (0 if "toy" in path else config.num_ranks)
        if config_type is GRPOConfig and config.generator.tensor_parallel == 1:
            for part in describe_layout(config).split(" + "):
                assert part in layout, f"{path}: {part}"


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
    section = README.partition("## Write your own loss or reward\n")[2].partition("\n## ")[0]
    loss, reward = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert loss == (ROOT / "configs/examples/my_loss.py").read_text()
    assert reward == (ROOT / "configs/examples/my_reward.py").read_text()
    assert max(len(loss.splitlines()), len(reward.splitlines())) <= 25


def test_losses_and_their_defaults_are_listed():
    rows = {row[0].strip("`"): row[2:] for row in table("Loss")}
    assert rows.keys() == {*PAPER_DEFAULTS, "path/file.py:function"}
    for loss, (advantages, aggregation, clip) in rows.items():
        defaults = PAPER_DEFAULTS.get(loss, OWN_LOSS_DEFAULTS)
        assert (advantages, aggregation) == (f"`{defaults['advantages']}`", f"`{defaults['aggregation']}`"), loss
        if clip != "-":
            assert [float(x) for x in clip.split(" / ")] == [defaults["clip_low"], defaults["clip_high"]], loss


def test_every_built_in_reward_is_listed_with_its_options():
    facts = {"max_completion_tokens", "call_timeout_seconds", "worker_memory_gib"}  # filled in by the run
    for row in (rows := table("Reward function")):
        parameters = inspect.signature(BUILT_INS[row[0].strip("`")]).parameters.values()
        options = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - facts
        assert set(re.findall(r"`(\w+)`", row[2])) == options, row[0]
    assert len(rows) == len(BUILT_INS)
