"""Every command that a page or a recipe shows runs, word for word, up to the end of the checks that read no data.

Files that a user has are not there; the folders of runs have the config of the recipe that writes there.
"""

import ast
import importlib.machinery
import os
import pathlib
import re
import shlex
import sys
import types

import datasets
import pytest
import transformers

import train_grpo
from configs.examples import toys, word_problem_rows
from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import as_recipe, load, load_recipe
from grpo.roles.engine.vllm_engine import WRONG_ON_CPU, check_engine
from grpo.run.command_line import checked_config
from grpo.tools import check_environment, check_loss, check_reward, evaluate, export, look, replay
from tests.door import skipping_what_needs_a_deleted_feature
from tests.tiny_models import SMALL
from tests.unit.models.test_hf_folder import QWEN3_1_7B

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.py"))
CONFIG_TYPES = {
    "train_grpo.py": GRPOConfig,
    "launch/grpo.sbatch": GRPOConfig,
    "train_sft.py": SFTConfig,
    "launch/sft.sbatch": SFTConfig,
}
# Tools: how one is called, and what it would do behind its checks
TOOLS = {
    "grpo.check_environment": (check_environment, "features"),
    "grpo.check_loss": (check_loss, "features"),
    "grpo.check_reward": (check_reward, "first_rows"),
    "grpo.evaluate": (evaluate, "run"),
    "grpo.export": (export, "find_checkpoint"),
    "grpo.look": (look, ("summarize", "rollouts_text", "page_text")),
    "grpo.replay": (replay, "run"),
}
STARTS = r"(?:torchrun|sbatch|python) "


class Checked(BaseException):
    """A tool's checks are over."""


def shown_commands() -> list[str]:
    """Each command of the scripts and the tools, from code blocks, tables, prose and the docstrings of recipes."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "configs").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages.append(ROOT / "tests/README.md")
    texts = [page.read_text() for page in pages]
    for file in (*RECIPES, *(ROOT / "configs/examples").glob("*.py")):
        texts.append(ast.get_docstring(ast.parse(file.read_text())) or "")
    found = []
    for text in texts:
        text = re.sub(r"\\\n *", "", text)  # a command on several lines
        for variable, value in re.findall(r"^([A-Z]+)=(\S+)$", text, re.MULTILINE):
            text = text.replace(f"${variable}", value)
        found += re.findall(rf"^(?:    )?({STARTS}.*)$", text, re.MULTILINE)
        prose = re.sub(r"^(?:    .*|```\w*)$", "", text, flags=re.MULTILINE)
        found += [" ".join(inline.split()) for inline in re.findall(rf"`({STARTS}[^`]*)`", prose)]
    starts_ours = [command for command in dict.fromkeys(found) if _target(shlex.split(command))]
    return [command for command in starts_ours if "--help" not in command]


def _target(words: list[str]) -> str:
    """The script or tool that a command starts, empty if it is none of ours."""
    return next((word for word in words if word in CONFIG_TYPES or word in TOOLS), "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder like the repository's, with the runs that commands name."""
    folder = tmp_path_factory.mktemp("commands")
    for name in ("configs", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "my_task").mkdir()
    tutorial = (ROOT / "docs/tutorial.md").read_text()
    for file, text in re.findall(r"`(my_task/\w+\.py)`:\n\n```python\n(.*?)```", tutorial, re.DOTALL):
        (folder / file).write_text(text)
    configs = [load_recipe(str(path), GRPOConfig, SFTConfig) for path in RECIPES]
    recipes = {config.run_dir: as_recipe(config) for config in configs}
    default = recipes["runs/qwen3_1_7b_gsm8k"]
    for run_dir in re.findall(r"(?<!--run-dir )\bruns/\w+", " ".join(shown_commands())):
        (folder / run_dir).mkdir(parents=True, exist_ok=True)
        (folder / run_dir / "config.py").write_text(recipes.get(run_dir, default))
    return folder


@pytest.fixture
def models(folder, command):
    """Exported models that a command names. They go afterwards, because another command may write where they are."""
    files = [folder / path / "config.json" for path in re.findall(r"\bruns/[\w/-]+/model\b", command)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    yield
    for file in files:
        file.unlink()
        os.removedirs(file.parent)


def test_commands_are_found():
    assert {_target(shlex.split(command)) for command in shown_commands()} == {*CONFIG_TYPES, *TOOLS}


@pytest.mark.parametrize("command", shown_commands())
def test_a_command_of_a_page_passes_its_checks(command, folder, models, monkeypatch):
    """A script without torchrun also as a dry run for a GPU, and with the engine's options of a machine with one."""
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    sys.modules["wandb"].__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    words = shlex.split(command)
    target = _target(words)
    place = words.index(target)
    launcher, flags = words[:place], words[place + 1 :]
    options = dict(word.lstrip("-").split("=") for word in launcher if "=" in word)
    num_nodes = int(options.get("nodes", options.get("nnodes", 1)))
    num_ranks = num_nodes * int(options.get("nproc_per_node", 8)) if launcher[0] != "python" else 1
    for name, value in {"RANK": "0", "WORLD_SIZE": str(num_ranks)}.items():
        if launcher[0] == "python":
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with skipping_what_needs_a_deleted_feature():
        if target in TOOLS:
            run_tool(target, flags, monkeypatch)
            return
        config = checked_config(CONFIG_TYPES[target], flags)
    if "--gpus" not in flags:
        assert config.num_ranks == num_ranks
    if launcher[0] == "python":
        checked_config(CONFIG_TYPES[target], [*flags, "--dry-run", "--gpus", "1"])
    hf = transformers.AutoConfig.for_model(**QWEN3_1_7B)
    check_engine(config.generator, hf, on_gpu=True)
    if not WRONG_ON_CPU.keys() & config.generator.engine.keys():
        check_engine(config.generator, hf, on_gpu=False)


# Of a port, whose rows its own tool writes in this form
ROWS_OF_PORTS = {
    "from_trl": {"question": "What is 12 + 30?", "answer": "12 + 30 = 42\n#### 42"},
    "from_verl": {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "What is 12 + 30?"}],
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"index": 7},
    },
    "from_openrlhf": {"prompt": "What is 12 + 30?", "label": "#### 42"},
}


@pytest.mark.parametrize("port", ROWS_OF_PORTS)
def test_a_port_from_another_tool_passes_a_dry_run(port, tmp_path, monkeypatch, capsys):
    """With rows as that tool has them, and a small model in place of the large one."""
    (command,) = [text for text in shown_commands() if port in text and text.startswith("torchrun")]
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for split in ("train", "test"):
        rows = datasets.Dataset.from_list([ROWS_OF_PORTS[port]] * 64)
        rows.to_json(f"{split}.jsonl")
        rows.to_parquet(f"{split}.parquet")
    toys.make_model(tmp_path / "model", word_problem_rows.tokenizer(), 0, SMALL | {"max_position_embeddings": 2048})
    words = shlex.split(command)
    flags = words[words.index("train_grpo.py") + 1 :]
    machine = ["--model.path", "model", "--metrics.wandb-project=", "--dry-run", "--gpus", "8", "--gpu-gib", "80"]
    config = load(GRPOConfig, str(ROOT / "configs/qwen3_1_7b_gsm8k.py"), [*flags, *machine])
    with pytest.raises(SystemExit) as end:
        train_grpo.main(config)
    said = capsys.readouterr().out
    assert end.value.code == 0 and f"a completion passes if {next(iter(config.reward.functions))}" in said


def run_tool(name: str, words: list[str], monkeypatch):
    """Call a tool's `main`, which ends behind its checks."""
    module, behind = TOOLS[name]

    def end(*_arguments, **_options):
        raise Checked

    end.call = end.offers = end  # in place of the door
    for function in (behind,) if isinstance(behind, str) else behind:
        monkeypatch.setattr(module, function, end)
    monkeypatch.setattr(replay, "end_with_launcher", lambda: None)
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(Checked):
        module.main(words) if module not in (evaluate, replay) else module.main()
