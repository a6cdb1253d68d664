"""The modules of grpo/ in the order of their layers: a folder imports only folders below it. Read from the source."""

import ast
import functools

import pytest

from tests import ROOT

# From the ground up. Modules of one layer do not know each other, except that all of them know types, config and text.
LAYERS = (
    ("types", "config", "text", "libraries"),
    ("algorithm", "data", "workers"),
    ("rewards", "metrics"),
    ("models",),
    ("roles", "report"),
    ("watch",),
    ("folder",),
    ("features",),
    ("run",),
    ("tools",),
)
LAYER_OF = {folder: number for number, folders in enumerate(LAYERS) for folder in folders}
DOOR = "grpo.features"  # every layer may import it, nobody what is behind it
SCRIPTS = ("train_grpo", "train_sft")
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "grpo").rglob("*.py")
    if path.name != "__init__.py"
)
MAKES_GROUPS = ("init_process_group", "new_group", "new_subgroups", "_new_process_group_helper")


def folder_of(module: str) -> str:
    return module.split(".")[1]


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())


def imports_of(module: str) -> set[str]:
    """Modules it imports anywhere, also inside functions; `from grpo.data import rows` counts as grpo.data.rows."""
    found = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively, line {node.lineno}; this test reads full names"
            # both, since the imported name may be a module (from torch import distributed) or not
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def uses(module: str, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imports_of(module))


def test_every_folder_has_a_layer():
    assert {folder_of(module) for module in MODULES} | {"features"} == set(LAYER_OF)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downward(module):
    folder = folder_of(module)
    known = {folder_of(name) for name in imports_of(module) - {DOOR} if name.startswith("grpo.")}
    higher = {other for other in known - {folder} if LAYER_OF[other] >= LAYER_OF[folder]}
    assert not higher, f"{module} imports from {', '.join(sorted(higher))}"


def test_the_door_is_the_only_way_to_a_feature_and_knows_nothing_itself():
    assert not [name for name in imports_of(f"{DOOR}.__init__") if name.startswith("grpo")]
    for module in (*MODULES, *SCRIPTS):
        own_folder = ".".join(module.split(".")[:3])
        behind = [name for name in imports_of(module) if name.startswith(f"{DOOR}.")]
        assert all(name.startswith(own_folder) for name in behind), module


def test_no_two_files_import_each_other():
    waiting = {m: {n for n in imports_of(m) if n in MODULES} for m in MODULES}
    while free := [m for m, needs in waiting.items() if not needs & waiting.keys()]:
        for module in free:
            del waiting[module]
    assert not waiting, f"a circle among {', '.join(waiting)}"


@pytest.mark.parametrize("module", [m for m in MODULES if LAYER_OF[folder_of(m)] <= 1])
def test_the_two_lowest_layers_know_neither_engines_nor_other_ranks(module):
    assert not [package for package in ("torch.distributed", "torchtitan", "vllm") if uses(module, package)]
    for node in ast.walk(tree_of(module)):  # torch.distributed needs no import once torch is there
        assert not (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed")


def test_config_and_rewards_do_without_torch():
    """Bad input is refused before torch is loaded, and worker processes start fast."""
    for module in MODULES:
        # the pool is the driver's end and knows rollouts, whose tokens are tensors
        if folder_of(module) in ("config", "rewards") and module != "grpo.rewards.pool":
            assert not uses(module, "torch") and not uses(module, "grpo.types"), module


def test_below_run_nothing_takes_a_whole_config():
    """A function takes the section that it reads, so that its signature says on what it depends."""
    names = ("GRPOConfig", "SFTConfig", "RunConfig", "Config")
    whole = {f"{module}.{name}" for module in ("grpo.config", "grpo.config.fields") for name in names}
    users = {module for module in MODULES if imports_of(module) & whole}
    assert {folder_of(module) for module in users} <= {"config", "run", "tools"}, sorted(users)


def test_trainer_reference_and_generator_do_not_know_each_other():
    roles = {"grpo.roles.trainer", "grpo.roles.reference", "grpo.roles.engine.generator"}
    for module in roles:
        assert not imports_of(module) & (roles - {module})


def test_one_file_creates_process_groups():
    for module in (*MODULES, *SCRIPTS):
        named = {node.attr for node in ast.walk(tree_of(module)) if isinstance(node, ast.Attribute)}
        named |= {name.rpartition(".")[2] for name in imports_of(module)}
        assert bool(named & set(MAKES_GROUPS)) == (module == "grpo.roles.process_groups"), module
