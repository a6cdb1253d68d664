"""The layers of DESIGN.md: who may import whom, read from the source, so that nothing needs to be imported."""

import ast
import functools
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
LAYERS = (
    (
        "config",
        "recipes",
        "types",
        "advantages",
        "losses",
        "answers",
        "rewards",
        "sandbox",
        "packing",
        "plugin",
        "eval_metrics",
    ),
    ("roles", "comm", "data", "toy", "watchdog", "reward_worker", "reward_pool"),
    ("titan_on_cpu", "logprobs", "models", "forward", "trainer", "reference", "generator"),
    ("weight_sync", "checkpoint", "metrics", "driver"),
)
SCRIPTS = ("train_grpo", "train_sft", "grpo.summary", "grpo.evaluate", "grpo.check_loss")
LAYER_OF = {f"grpo.{name}": number for number, layer in enumerate(LAYERS) for name in layer}
HEAVY = ("torch.distributed", "torchtitan", "vllm")
MAKES_GROUPS = ("init_process_group", "new_group", "new_subgroups", "_new_process_group_helper")


def path_of(module: str) -> pathlib.Path:
    return ROOT / f"{module.replace('.', '/')}.py"


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text())


def imports_of(module: str) -> set[str]:
    """Modules it imports anywhere, also inside functions; `from grpo import data` counts as grpo.data."""
    found = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively, line {node.lineno}; this test reads full names"
            # both, since the imported name may be a module (from torch import distributed) or not
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def project_imports_of(module: str) -> set[str]:
    known = {*LAYER_OF, *SCRIPTS}
    return {name for name in imports_of(module) if name in known}


def uses(module: str, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imports_of(module))


def test_every_module_has_its_place():
    there = {f"grpo.{path.stem}" for path in (ROOT / "grpo").glob("*.py")} - {"grpo.__init__"}
    assert there == {*LAYER_OF, *(s for s in SCRIPTS if s.startswith("grpo."))}
    assert not [path for path in (ROOT / "grpo").glob("*/**/*.py") if "__pycache__" not in path.parts]


@pytest.mark.parametrize("module", LAYER_OF)
def test_imports_go_downward(module: str):
    allowed = {name for name, layer in LAYER_OF.items() if layer <= LAYER_OF[module]}
    assert project_imports_of(module) <= allowed - {module}


@pytest.mark.parametrize("module", [name for name, layer in LAYER_OF.items() if layer == 0])
def test_layer_0_names_nothing_heavy(module: str):
    assert not [package for package in HEAVY if uses(module, package)]
    for node in ast.walk(tree_of(module)):  # torch.distributed needs no import once torch is there
        assert not (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed")


def test_trainer_reference_and_generator_do_not_know_each_other():
    roles = {"grpo.trainer", "grpo.reference", "grpo.generator"}
    for module in roles:
        assert not project_imports_of(module) & roles


def test_only_the_generator_imports_vllm():
    assert [m for m in (*LAYER_OF, *SCRIPTS) if uses(m, "vllm")] == ["grpo.generator"]


def test_layers_0_and_1_do_without_torchtitan():
    assert not [m for m, layer in LAYER_OF.items() if layer <= 1 and uses(m, "torchtitan")]


def test_nothing_imports_a_script():
    for module in (*LAYER_OF, *SCRIPTS):
        assert not project_imports_of(module) & set(SCRIPTS)


def test_only_roles_creates_process_groups():
    for module in (*LAYER_OF, *SCRIPTS):
        named = {node.attr for node in ast.walk(tree_of(module)) if isinstance(node, ast.Attribute)}
        named |= {name.rpartition(".")[2] for name in imports_of(module)}
        assert bool(named & set(MAKES_GROUPS)) == (module == "grpo.roles"), module


def test_layer_0_imports_without_the_engines():
    """In a fresh process, because this one may have imported anything."""
    names = ", ".join(f"grpo.{name}" for name in LAYERS[0])
    program = f"import sys, {names}; print([m for m in ('vllm', 'torchtitan') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
