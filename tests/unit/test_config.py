"""What a user can get wrong, what a recipe becomes, and that --help explains every field."""

import ast
import dataclasses
import math
import pathlib
import re
import subprocess
import sys

import pytest

from grpo.config import (
    PAPER_DEFAULTS,
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    GeneratorConfig,
    GRPOConfig,
    MetricsConfig,
    ModelConfig,
    RewardConfig,
    RolesConfig,
    SamplingConfig,
    SFTConfig,
    TrainerConfig,
)
from grpo.config import fields as config_module
from grpo.config.recipes import (
    as_recipe,
    cautions,
    check_world_size,
    complete,
    describe_layout,
    load,
    load_recipe,
    suggest_layout,
    validate,
)

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.py"))
DEFAULT = str(ROOT / "configs" / "qwen3_1_7b_gsm8k.py")


def read(path: pathlib.Path) -> GRPOConfig | SFTConfig:
    return load_recipe(str(path), SFTConfig if "SFTConfig(" in path.read_text() else GRPOConfig)


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------

BAD = {
    "num_steps=0 must be at least 1": GRPOConfig(num_steps=0),
    "prompts_per_step=0 must be at least 1": GRPOConfig(prompts_per_step=0),
    "group_size=0 must be at least 1": GRPOConfig(group_size=0),
    "roles.num_trainers=0 must be at least 1": GRPOConfig(roles=RolesConfig(num_trainers=0)),
    "roles.num_references=-1 must be at least 0": GRPOConfig(roles=RolesConfig(num_references=-1)),
    "roles.timeout_minutes=0.0 must be above 0": GRPOConfig(roles=RolesConfig(timeout_minutes=0.0)),
    "data.max_prompt_tokens=0 must be": GRPOConfig(data=DataConfig(max_prompt_tokens=0)),
    "generator.tensor_parallel=0 must be": GRPOConfig(generator=GeneratorConfig(tensor_parallel=0)),
    "generator.max_completion_tokens=0 must be": GRPOConfig(generator=GeneratorConfig(max_completion_tokens=0)),
    "generator.max_num_seqs=0 must be": GRPOConfig(generator=GeneratorConfig(max_num_seqs=0)),
    "trainer.tensor_parallel=0 must be": GRPOConfig(trainer=TrainerConfig(tensor_parallel=0)),
    "trainer.data_replicas=0 must be": GRPOConfig(trainer=TrainerConfig(data_replicas=0)),
    "trainer.logprob_chunk_tokens=0 must be": GRPOConfig(trainer=TrainerConfig(logprob_chunk_tokens=0)),
    "evaluation.num_prompts=0 must be": GRPOConfig(evaluation=EvaluationConfig(num_prompts=0)),
    "checkpoint.keep=0 must be": GRPOConfig(checkpoint=CheckpointConfig(keep=0)),
    "checkpoint.interval=-1 counts steps": GRPOConfig(checkpoint=CheckpointConfig(interval=-1)),
    "metrics.samples_interval=-2 counts steps": GRPOConfig(metrics=MetricsConfig(samples_interval=-2)),
    "evaluation.interval=-3 counts steps": GRPOConfig(evaluation=EvaluationConfig(interval=-3)),
    "sync_check_interval=-4 counts steps": GRPOConfig(sync_check_interval=-4),
    "roles.num_generators=0 leaves nobody to sample; use at least 2": GRPOConfig(
        roles=RolesConfig(num_generators=0), generator=GeneratorConfig(tensor_parallel=2)
    ),
    "7 generator ranks do not split into replicas of generator.tensor_parallel=2; use 6 generator ranks": GRPOConfig(
        roles=RolesConfig(num_generators=7), generator=GeneratorConfig(tensor_parallel=2)
    ),
    "1 generator ranks do not split into replicas of generator.tensor_parallel=4; use 4 generator ranks": GRPOConfig(
        roles=RolesConfig(num_generators=1), generator=GeneratorConfig(tensor_parallel=4)
    ),
    "3 generator ranks do not split into replicas": GRPOConfig(  # colocated, trainers are the generators
        roles=RolesConfig(colocated=True, num_trainers=3), generator=GeneratorConfig(tensor_parallel=2)
    ),
    "roles.num_references=2 ranks would idle, because algorithm.kl_coef=0": GRPOConfig(
        roles=RolesConfig(num_references=2)
    ),
    "generator.sleep frees memory for a trainer on the same GPU; it needs --roles.colocated": GRPOConfig(
        generator=GeneratorConfig(sleep=True)
    ),
    "group_size=1 with algorithm.advantages=group_mean makes every advantage 0": GRPOConfig(
        group_size=1, algorithm=AlgorithmConfig(advantages="group_mean")
    ),
    "prompts_per_step=3 x group_size=2 = 6 completions do not divide over 4 data-parallel trainer ranks; "
    "the next number that does is 8": GRPOConfig(prompts_per_step=3, group_size=2),
    "generator.temperature=(1.0, 0.0) must be a tuple of numbers above 0": GRPOConfig(
        generator=GeneratorConfig(temperature=(1.0, 0.0))
    ),
    "generator.temperature=0.7 must be a tuple": GRPOConfig(generator=GeneratorConfig(temperature=0.7)),
    "generator.top_p=0.0 must lie in (0, 1]": GRPOConfig(generator=GeneratorConfig(top_p=0.0)),
    "generator.min_p=1.0 in [0, 1)": GRPOConfig(generator=GeneratorConfig(min_p=1.0)),
    "generator.top_k=-1 must not be negative": GRPOConfig(generator=GeneratorConfig(top_k=-1)),
    "generator.gpu_memory_utilization=1.5 must lie in (0, 1]": GRPOConfig(
        generator=GeneratorConfig(gpu_memory_utilization=1.5)
    ),
    "generator.kv_cache_gib=-1.0 must not be negative": GRPOConfig(generator=GeneratorConfig(kv_cache_gib=-1.0)),
    "algorithm.clip_low=1.1 must lie in [0, 1]": GRPOConfig(algorithm=AlgorithmConfig(clip_low=1.1)),
    "algorithm.clip_high=-0.1 must not be negative": GRPOConfig(algorithm=AlgorithmConfig(clip_high=-0.1)),
    "algorithm.loss='ppo' is unknown; use grpo, dr_grpo, dapo": GRPOConfig(algorithm=AlgorithmConfig(loss="ppo")),
    "algorithm.dual_clip=0.5 must be above 1": GRPOConfig(algorithm=AlgorithmConfig(dual_clip=0.5)),
    "algorithm.importance_correction_high=0 must be above 0": GRPOConfig(
        algorithm=AlgorithmConfig(importance_correction_high=0)
    ),
    "algorithm.num_mini_batches=0 must be at least 1": GRPOConfig(algorithm=AlgorithmConfig(num_mini_batches=0)),
    "algorithm.num_mini_batches=33 mini-batches of whole groups need as many prompts; raise prompts_per_step=32": (
        GRPOConfig(algorithm=AlgorithmConfig(num_mini_batches=33))
    ),
    "algorithm.kl_in=reward uses the value of the KL alone": GRPOConfig(
        algorithm=AlgorithmConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k3_k2_gradient")
    ),
    "algorithm.importance_correction=truncate would count it twice": GRPOConfig(
        algorithm=AlgorithmConfig(old_logprobs="generator", importance_correction="truncate")
    ),
    "algorithm.importance_correction=mask_tokens would count it twice": GRPOConfig(
        algorithm=AlgorithmConfig(old_logprobs="generator", importance_correction="mask_tokens")
    ),
    "algorithm.importance_correction_low=1.5 and importance_correction_high=2.0 must have 1 between them": GRPOConfig(
        algorithm=AlgorithmConfig(importance_correction="mask_tokens", importance_correction_low=1.5)
    ),
    "algorithm.dual_clip does nothing in sapo": GRPOConfig(algorithm=AlgorithmConfig(loss="sapo", dual_clip=3)),
    "algorithm.max_importance_weight does nothing in grpo": GRPOConfig(
        algorithm=AlgorithmConfig(max_importance_weight=2)
    ),
    "algorithm.kl_in=reward does nothing with algorithm.kl_coef=0": GRPOConfig(
        algorithm=AlgorithmConfig(kl_in="reward")
    ),
    "group_size=1 with algorithm.advantages=batch_std makes every advantage 0": GRPOConfig(
        group_size=1, algorithm=AlgorithmConfig(advantages="batch_std")
    ),
    "3 temperatures for group_size=2 completions": GRPOConfig(
        group_size=2, generator=GeneratorConfig(temperature=(0.5, 1.0, 1.5))
    ),
    "generator.stop has an empty string": GRPOConfig(generator=GeneratorConfig(stop=("a", ""))),
    "sampling.min_pass_rate=0.9 and max_pass_rate=0.1": GRPOConfig(
        sampling=SamplingConfig(min_pass_rate=0.9, max_pass_rate=0.1)
    ),
    "sampling.dynamic drops groups of equal rewards, which every group of group_size=1 is": GRPOConfig(
        group_size=1, algorithm=AlgorithmConfig(advantages="none"), sampling=SamplingConfig(dynamic=True)
    ),
    "generator.sleep drops the engine's weights after each step, so sync_interval=2 must be 1": GRPOConfig(
        roles=RolesConfig(colocated=True), generator=GeneratorConfig(sleep=True), sync_interval=2
    ),
    "reward.timeout_seconds=0 and": GRPOConfig(reward=RewardConfig(timeout_seconds=0)),
    "evaluation.temperature=0 above 0": GRPOConfig(evaluation=EvaluationConfig(temperature=0)),
    "checkpoint.interval=3 must be a multiple of sync_interval=2": GRPOConfig(
        sync_interval=2, checkpoint=CheckpointConfig(interval=3)
    ),
    "algorithm.kl_coef=-0.5 must not be negative": GRPOConfig(algorithm=AlgorithmConfig(kl_coef=-0.5)),
    "reward.functions is empty": GRPOConfig(reward=RewardConfig(functions={})),
    "4 trainer ranks do not split into trainer.tensor_parallel=3 x trainer.data_replicas=1; "
    "use a multiple of 3 trainer ranks, for example 3": GRPOConfig(trainer=TrainerConfig(tensor_parallel=3)),
    "4 trainer ranks do not split into trainer.tensor_parallel=4 x trainer.data_replicas=2; "
    "use a multiple of 8 trainer ranks, for example 8": GRPOConfig(
        trainer=TrainerConfig(tensor_parallel=4, data_replicas=2)
    ),
    "a sequence of up to 1536 tokens does not fit into trainer.micro_batch_tokens=1535; "
    "raise it to at least 1536": GRPOConfig(trainer=TrainerConfig(micro_batch_tokens=1535)),
    "trainer.learning_rate=-1.0 must be at least 0": GRPOConfig(trainer=TrainerConfig(learning_rate=-1.0)),
    "trainer.max_grad_norm=0.0 above 0": GRPOConfig(trainer=TrainerConfig(max_grad_norm=0.0)),
    # SFT shares the checks of trainer, checkpoint and metrics; its own:
    "num_trainers=0 must be at least 1": SFTConfig(num_trainers=0),
    "sequences_per_step=0 must be at least 1": SFTConfig(sequences_per_step=0),
    "max_sequence_tokens=0 must be at least 1": SFTConfig(max_sequence_tokens=0),
    "a sequence of up to 2048 tokens does not fit into trainer.micro_batch_tokens=1000": SFTConfig(
        trainer=TrainerConfig(micro_batch_tokens=1000)
    ),
    "3 trainer ranks do not split into trainer.tensor_parallel=2": SFTConfig(
        num_trainers=3, trainer=TrainerConfig(tensor_parallel=2)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_with_the_numbers(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(BAD[message])


def test_the_defaults_are_valid():
    validate(GRPOConfig())
    validate(SFTConfig())


def test_odd_but_possible_layouts_pass():
    validate(GRPOConfig(roles=RolesConfig(colocated=True, num_trainers=1)))
    validate(GRPOConfig(roles=RolesConfig(num_references=2), algorithm=AlgorithmConfig(kl_coef=0.1)))
    # colocated, num_generators does not apply: 4 trainers are 2 engines of 2
    four = RolesConfig(colocated=True, num_trainers=4, num_generators=0)
    validate(GRPOConfig(roles=four, generator=GeneratorConfig(tensor_parallel=2, sleep=True)))
    validate(GRPOConfig(trainer=TrainerConfig(tensor_parallel=2, data_replicas=2)))


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}])
def test_truncated_sampling_gets_one_warning(options):
    config = GRPOConfig(generator=GeneratorConfig(**options))
    validate(config)
    (warning,) = cautions(config)
    assert f"{next(iter(options))}={next(iter(options.values()))}" in warning and "mismatch/mean" in warning


@pytest.mark.parametrize(
    "algorithm, part",
    [
        ({"loss": "gspo", "clip_high": 0.2}, "algorithm.clip_high=0.2 hardly ever clips a sequence's ratio"),
        ({"loss": "reinforce", "max_importance_weight": 2.0}, "every weight is 1"),
    ],
)
def test_algorithms_that_may_surprise(algorithm, part):
    (warning,) = cautions(complete(GRPOConfig(algorithm=AlgorithmConfig(**algorithm))))
    assert part in warning


@pytest.mark.parametrize("loss", PAPER_DEFAULTS)
def test_nothing_to_warn_of_with_a_papers_defaults(loss):
    assert cautions(complete(GRPOConfig(algorithm=AlgorithmConfig(loss=loss)))) == []


def test_nothing_to_warn_of_by_default():
    assert cautions(GRPOConfig()) == cautions(SFTConfig()) == []


# ---------------------------------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------------------------------


def test_world_size_names_both_numbers_and_a_layout_that_works():
    config = GRPOConfig()
    check_world_size(config, 8)
    with pytest.raises(ValueError) as error:
        check_world_size(config, 6)
    message = str(error.value)
    assert "the layout (4 trainer + 4 generator) needs 8 processes, but torchrun started 6" in message
    assert "use --nproc_per_node=8 (times nnodes)" in message
    flags = message.partition("for 6 processes: ")[2].split()
    check_world_size(load(GRPOConfig, DEFAULT, flags), 6)


def test_world_size_of_sft():
    check_world_size(SFTConfig(num_trainers=2), 2)
    with pytest.raises(
        ValueError, match=r"num_trainers=2, but torchrun started 3 .*--nproc_per_node=2 or --num-tr.* 3"
    ):
        check_world_size(SFTConfig(num_trainers=2), 3)


@pytest.mark.parametrize("world_size", range(1, 17))
@pytest.mark.parametrize("trainer_parallel, generator_parallel", [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_suggested_layouts_are_valid(world_size, trainer_parallel, generator_parallel):
    config = GRPOConfig(
        prompts_per_step=12,
        algorithm=AlgorithmConfig(kl_coef=0.1),
        trainer=TrainerConfig(tensor_parallel=trainer_parallel),
        generator=GeneratorConfig(tensor_parallel=generator_parallel),
    )
    suggestion = suggest_layout(config, world_size)
    if suggestion.startswith("no layout"):
        assert world_size < trainer_parallel + generator_parallel or world_size % max(
            trainer_parallel, generator_parallel
        )
        return
    degrees = ["--trainer.tensor-parallel", str(trainer_parallel)]
    degrees += ["--generator.tensor-parallel", str(generator_parallel), "--algorithm.kl-coef", "0.1"]
    suggested = load(GRPOConfig, DEFAULT, [*suggestion.split(), *degrees, "--prompts-per-step", "12"])
    check_world_size(suggested, world_size)


def test_layouts_in_words():
    assert describe_layout(GRPOConfig(roles=RolesConfig(colocated=True, num_trainers=2))) == "2 colocated"
    split = RolesConfig(num_trainers=2, num_references=1, num_generators=1)
    assert describe_layout(GRPOConfig(roles=split)) == "2 trainer + 1 reference + 1 generator"


def test_derived_values():
    config = GRPOConfig(
        prompts_per_step=3,
        group_size=4,
        data=DataConfig(max_prompt_tokens=10),
        generator=GeneratorConfig(max_completion_tokens=5, tensor_parallel=4),
        trainer=TrainerConfig(tensor_parallel=6),
    )
    assert config.completions_per_step == 12
    assert config.max_sequence_tokens == 15
    assert config.largest_tensor_parallel == 12  # what both 6 and 4 divide
    assert config.num_ranks == 8
    assert not config.needs_reference
    assert dataclasses.replace(config, algorithm=AlgorithmConfig(kl_coef=1e-6)).needs_reference
    assert SFTConfig(num_trainers=3).num_ranks == 3


def test_num_ranks_of_each_layout():
    split = RolesConfig(num_trainers=2, num_references=3, num_generators=5)
    assert GRPOConfig(roles=split).num_ranks == 10
    assert GRPOConfig(roles=dataclasses.replace(split, colocated=True)).num_ranks == 2


@pytest.mark.parametrize(
    "roles, trainer_parallel, expected",
    [
        (RolesConfig(num_trainers=4, num_references=0), 4, 4),  # on the trainer ranks
        (RolesConfig(num_trainers=4, num_references=2), 4, 2),
        (RolesConfig(num_trainers=4, num_references=1), 4, 1),
        (RolesConfig(num_trainers=4, num_references=3), 2, 1),
        (RolesConfig(num_trainers=2, num_references=1, colocated=True), 2, 2),  # num_references does not apply
    ],
)
def test_reference_is_sharded_as_far_as_its_ranks_allow(roles, trainer_parallel, expected):
    config = GRPOConfig(roles=roles, trainer=TrainerConfig(tensor_parallel=trainer_parallel))
    assert config.reference_tensor_parallel == expected


@pytest.mark.parametrize("dtype, given, expected", [("float32", 0, 1e-3), ("bfloat16", 0, 0.1), ("bfloat16", 0.3, 0.3)])
def test_canary_tolerance(dtype, given, expected):
    assert GRPOConfig(model=ModelConfig(dtype=dtype), sync_check_tolerance=given).logprob_tolerance == expected


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def test_command_line_overrides_any_field():
    config = load(
        GRPOConfig,
        "no/such/default.py",
        [
            DEFAULT,
            *["--num-steps", "7", "--model.dtype", "float32", "--trainer.learning-rate", "3e-5"],
            *["--roles.colocated", "--trainer.no-packing", "--resume"],
            *["--reward.functions", "my/reward.py:short", "1", "thinking_reward", "0.5"],
            *["--data.columns", "answer", "level", "--data.chat-template-kwargs", "enable_thinking", "true"],
        ],
    )
    assert config.num_steps == 7 and config.model.dtype == "float32" and config.trainer.learning_rate == 3e-5
    assert config.roles.colocated and not config.trainer.packing and config.resume
    assert config.reward.functions == {"my/reward.py:short": 1.0, "thinking_reward": 0.5}
    assert config.data.columns == ("answer", "level")
    assert config.data.chat_template_kwargs == {"enable_thinking": True}
    # what was not named is the recipe's
    assert config.model.path == "Qwen/Qwen3-1.7B" and config.prompts_per_step == 64


def test_without_arguments_the_default_recipe_runs():
    assert load(GRPOConfig, DEFAULT, []) == complete(read(pathlib.Path(DEFAULT)))


def test_sft_overrides():
    config = load(SFTConfig, str(ROOT / "configs" / "toy_sft.py"), ["--num-trainers", "1", "--stop-at-loss", "0.5"])
    assert config.num_trainers == 1 and config.stop_at_loss == 0.5


def test_overrides_are_checked():
    with pytest.raises(ValueError, match=r"generator.temperature=\(0.0,\) must be a tuple of numbers above 0"):
        load(GRPOConfig, DEFAULT, ["--generator.temperature", "0"])


def test_warnings_are_printed_by_the_first_rank_only(monkeypatch, capsys):
    load(GRPOConfig, DEFAULT, ["--generator.top-p", "0.9"])
    assert capsys.readouterr().out.startswith("warning: generator.top_p=0.9")
    monkeypatch.setenv("RANK", "1")
    load(GRPOConfig, DEFAULT, ["--generator.top-p", "0.9"])
    assert capsys.readouterr().out == ""


def test_unknown_field_is_refused_once(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        load(GRPOConfig, DEFAULT, ["--trainer.learning-rat", "1"])
    assert "--trainer.learning-rate" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        load(GRPOConfig, DEFAULT, ["--trainer.learning-rat", "1"])
    assert capsys.readouterr() == ("", "")


def test_missing_recipe_lists_its_neighbours():
    with pytest.raises(ValueError, match=r"recipe .*nothing.py does not exist; recipes in that folder: .*toy_sft.py"):
        load(GRPOConfig, DEFAULT, [str(ROOT / "configs" / "nothing.py")])


def test_recipe_must_bind_the_right_config(tmp_path):
    with pytest.raises(ValueError, match="must bind `config` to a GRPOConfig, it binds SFTConfig"):
        load_recipe(str(ROOT / "configs" / "toy_sft.py"), GRPOConfig)
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="must bind `config` to a SFTConfig, it binds NoneType"):
        load_recipe(str(tmp_path / "empty.py"), SFTConfig)


# ---------------------------------------------------------------------------------------------------------------------
# Recipes
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_and_its_command_starts_as_many_ranks(path):
    config = read(path)
    validate(config)
    check_world_size(config, config.num_ranks)
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert f"configs/{path.name}" in docstring
    nodes = max([1, *map(int, re.findall(r"--n?nodes=(\d+)", docstring))])
    (per_node,) = re.findall(r"--nproc_per_node=(\d+)", docstring)
    assert int(per_node) * nodes == config.num_ranks
    script = "train_sft.py" if isinstance(config, SFTConfig) else "train_grpo.py"
    assert script in docstring
    assert config.run_dir == f"runs/{path.stem}"


SURPRISING = GRPOConfig(
    data=DataConfig(system_prompt='Say "hi"\nand \\boxed{}', columns=(), chat_template_kwargs={"a b": "'"}),
    reward=RewardConfig(functions={"dir/file.py:f": 1e-30, "math_reward": 2}),
    trainer=TrainerConfig(max_grad_norm=math.inf),
)


@pytest.mark.parametrize("config", [*map(read, RECIPES), GRPOConfig(), SFTConfig(), SURPRISING])
def test_recipe_text_gives_the_same_config(config, tmp_path):
    (tmp_path / "config.py").write_text(as_recipe(config))
    assert load_recipe(str(tmp_path / "config.py"), type(config)) == config


@pytest.mark.parametrize("loss", PAPER_DEFAULTS)
def test_a_loss_brings_its_papers_defaults(loss):
    """Switched on the command line, also over a recipe; what the user gives stays."""
    completed = load(GRPOConfig, DEFAULT, ["--algorithm.loss", loss]).algorithm
    assert {name: getattr(completed, name) for name in PAPER_DEFAULTS[loss]} == PAPER_DEFAULTS[loss]
    given = load(GRPOConfig, DEFAULT, ["--algorithm.loss", loss, "--algorithm.clip-high", "0.3"]).algorithm
    assert given == dataclasses.replace(completed, clip_high=0.3)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, "truncate"),
        ({"old_logprobs": "generator"}, "none"),  # the ratio has the generator in it already
        ({"importance_correction": "none"}, "none"),
        ({"old_logprobs": "generator", "importance_correction": "mask_sequences"}, "mask_sequences"),
    ],
)
def test_default_correction(given, expected):
    assert complete(GRPOConfig(algorithm=AlgorithmConfig(**given))).algorithm.importance_correction == expected


@pytest.mark.parametrize(
    "algorithm, expected",
    [
        ({}, (1, False)),
        ({"num_mini_batches": 2}, (2, True)),
        ({"num_epochs": 3, "num_mini_batches": 2}, (6, True)),
        ({"num_epochs": 3, "old_logprobs": "generator"}, (3, False)),
    ],
)
def test_old_logprobs_cost_a_forward_only_where_they_must(algorithm, expected):
    config = GRPOConfig(algorithm=AlgorithmConfig(**algorithm))
    assert (config.updates_per_step, config.recomputes_old_logprobs) == expected


def test_recipe_text_is_one_field_per_line():
    text = as_recipe(GRPOConfig())
    assert text.startswith("from grpo.config import (\n    AlgorithmConfig,\n")
    assert "\n    num_steps=200,\n" in text and "\n        learning_rate=1e-06,\n" in text


# ---------------------------------------------------------------------------------------------------------------------
# Help
# ---------------------------------------------------------------------------------------------------------------------


def config_classes() -> list[ast.ClassDef]:
    tree = ast.parse(pathlib.Path(config_module.__file__).read_text())
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def test_every_field_has_a_sentence():
    classes = {node.name: node for node in config_classes()}
    assert len(classes) == 13 and {"GRPOConfig", "SFTConfig"} <= classes.keys()
    for name, node in classes.items():
        assert ast.get_docstring(node), f"{name} has no docstring"
        following = [*node.body[1:], None]
        for statement, after in zip(node.body, following, strict=True):
            if not isinstance(statement, ast.AnnAssign):
                continue
            if isinstance(statement.annotation, ast.Name) and statement.annotation.id in classes:
                continue  # a section: --help shows its class's docstring
            field = f"{name}.{statement.target.id}"
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), f"{field} has no sentence"
            assert after.value.value.rstrip().endswith("."), f"{field}: not a sentence"


@pytest.mark.parametrize("config_type, recipe", [(GRPOConfig, DEFAULT), (SFTConfig, str(ROOT / "configs/toy_sft.py"))])
def test_help_shows_every_field(config_type, recipe, capsys):
    with pytest.raises(SystemExit):
        load(config_type, recipe, ["--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(config_type):
        value = getattr(config_type(), field.name)
        names = [f"{field.name}.{f.name}" for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        for name in names or [field.name]:
            assert f"--{name.replace('_', '-')}" in text


def test_bad_input_is_refused_before_torch_is_loaded():
    code = "import sys, grpo.config.recipes; sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'tyro')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
