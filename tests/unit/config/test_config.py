"""What a user can get wrong, what a recipe becomes, and that --help explains every field."""

import ast
import dataclasses
import math
import pathlib
import re

import pytest

from grpo.config import (
    PAPER_DEFAULTS,
    AlgorithmConfig,
    DataConfig,
    GeneratorConfig,
    GRPOConfig,
    RewardConfig,
    RolesConfig,
    SFTConfig,
    TrainerConfig,
    change,
    fields,
)
from grpo.config.checks import cautions, check_effects, check_world_size, suggest_roles, validate
from grpo.config.recipes import as_recipe, load, load_recipe

ROOT = pathlib.Path(__file__).parents[3]
RECIPES = sorted((ROOT / "configs").glob("*.py"))
DEFAULT = str(ROOT / "configs" / "qwen3_1_7b_gsm8k.py")


def read(path: pathlib.Path) -> GRPOConfig | SFTConfig:
    return load_recipe(str(path), GRPOConfig, SFTConfig)


# ---- Checks

TEACHER = {"model.reference_path": "teacher"}
ONLY_TEACHER = TEACHER | {"reward.functions": {}, "algorithm.distill_coef": 1.0}
HINT = {"algorithm.teacher_template": "{question} {answer}", "algorithm.distill_coef": 1.0}
SELF = {"algorithm.teacher": "policy"}
MOVES = {"algorithm.kl_coef": 0.1, "algorithm.reference_interval": 5}
OWN_SETS = {"data.sources": {"a": "a.jsonl"}}
OLD_GENERATOR = {"algorithm.old_logprobs": "generator"}
CLASSES = {"environment.classes": {"a": "x.py:A", "b": "x.py:B"}}
KIND = {"data.environment_column": "kind"}
TOOLS = {"environment.tools": ("python",)}
EACH_TURN = {"algorithm.advantages": "return_to_go"}
ROUNDED = {"trainer.moments": "bfloat16"}
CARRY_8 = {"sampling.carry_over": 8}
DPPO = "configs/examples/methods/dppo.py:dppo"
CORRECTION, LOW = "algorithm.importance_correction", "algorithm.importance_correction_low"
# What is changed in the defaults (4 trainers, 4 generators, 32 prompts of 8 completions), and what the message has
REFUSED_IN_GRPO = [
    ({"roles.num_generators": 7, "generator.tensor_parallel": 2}, "7 generator ranks .* use 6"),
    ({"roles.num_references": 2}, "roles.num_references needs algorithm.kl_coef or distill_coef"),
    ({"generator.sleep": True}, "generator.sleep needs roles.colocated"),
    ({"generator.temperature": (0.5, 1.0, 1.5), "group_size": 2}, "3 values .* group_size=2"),
    ({"prompts_per_step": 3, "group_size": 2}, "3 x group_size=2 = 6 completions .* over 4 .*-step 4 or 2"),
    ({"trainer.tensor_parallel": 3}, "4 trainer ranks .*tensor_parallel=3 x trainer.data_replicas=1; use 3"),
    ({"trainer.micro_batch_tokens": 1535}, "1536 tokens .*micro_batch_tokens=1535; raise it to at least 1536"),
    (ROUNDED | {"trainer.adam_beta2": 0.999}, "adam_beta2=0.999 takes 0.001 of .* use an adam_beta2 of at most 0.996"),
    (
        {"trainer.optimizer": "muon", "trainer.lora_rank": 8},
        "muon does not go with trainer.lora_rank=8: .*optimizer adamw",
    ),
    ({"algorithm.loss": "ppo"}, "algorithm.loss='ppo' is unknown; use grpo, dr_grpo, dapo"),
    ({"algorithm.advantages": "gruop_std"}, "algorithm.advantages='gruop_std' is unknown; use group_std, group_mean"),
    ({"algorithm.num_mini_batches": 33}, "num_mini_batches=33 .* raise prompts_per_step=32"),
    (OLD_GENERATOR | {CORRECTION: "truncate"}, "importance_correction=truncate .* twice"),
    ({CORRECTION: "mask_tokens", LOW: 1.5}, "1 must lie between .*low=1.5 and .*high=2.0"),
    ({"algorithm.distill_coef": 1.0}, "distill_coef needs model.reference_path or algorithm.teacher_template"),
    (SELF | {"algorithm.distill_coef": 1.0}, "teacher=policy needs algorithm.teacher_template"),
    (HINT | {"algorithm.distill_coef": 0.0}, "teacher_template needs algorithm.distill_coef: it weighs"),
    (HINT | {"algorithm.kl_coef": 0.1}, "teacher_template does not go with algorithm.kl_coef: .* set kl_coef to 0"),
    (HINT | {"environment.name": "x.py:A"}, "teacher_template does not go with environment.name or classes: reset"),
    (MOVES | TEACHER, "reference_interval does not go with .* model.reference_path"),
    (MOVES | {"roles.num_references": 1}, "reference_interval needs .* --roles.num-references 0"),
    (MOVES | {"trainer.data_replicas": 2}, "reference_interval needs .* --trainer.data-replicas 1"),
    (MOVES | {"algorithm.reference_interval": 1}, "reference_interval=1 .* KL and its gradient are always 0; raise"),
    (HINT | SELF | TEACHER, "teacher=policy .* model.reference_path"),
    (HINT | SELF | {"roles.num_references": 1}, "policy does not go with roles.num_references: .* --roles.num-ref"),
    ({"group_size": 1, "algorithm.advantages": "rloo"}, "advantages=rloo makes"),
    ({"sampling.dynamic": True, "group_size": 1, "algorithm.advantages": "none"}, "dynamic needs a group_size of at"),
    ({"overlap_steps": 1, "roles.colocated": True}, "overlap_steps .* with roles.colocated: .* set --overlap-steps 0"),
    ({"overlap_steps": 1, CORRECTION: "none"}, "importance_correction=none with old_logprobs=policy"),
    ({"sampling.carry_over": 1, CORRECTION: "mask_sequences"}, "=mask_sequences with old_logprobs=policy"),
    (OLD_GENERATOR | {"overlap_steps": 1}, "importance_correction=none with old_logprobs=generator"),
    ({"sampling.carry_over": 32}, "carry_over=32 must be below prompts_per_step=32"),
    (CARRY_8 | {"generator.stop": ("END",)}, "generator.stop, .* does not go with sampling.carry_over"),
    ({"reward.functions": {}}, "reward.functions is empty"),
    ({"reward.passes": "accuracy"}, "reward.passes='accuracy' .* name one of math_reward, thinking_reward"),
    (ONLY_TEACHER | {"sampling.dynamic": True}, "reward.functions is empty"),
    ({"environment.name": "calculator"}, "environment.name .* 'calculator', which names no class .* environment.tools"),
    (CLASSES, "environment.classes needs data.environment_column"),
    (KIND, "data.environment_column needs environment.classes"),
    (TOOLS | {"sampling.carry_over": 1, CORRECTION: "truncate"}, "carry_over does not go with an environment"),
    (TOOLS | {"generator.stop": ("END",)}, "generator.stop, .* with an environment: .* use generator.stop_token_ids"),
    (TOOLS | {"data.prompt_template": "{question}"}, "data.prompt_template .* with an environment: it has no turns"),
    (TOOLS | {"environment.rounds": True, "environment.answer_steps": 4}, "rounds does not go with .*answer_steps"),
    (EACH_TURN, "return_to_go needs an environment: .* use rloo"),
    ({"algorithm.loss": "dppo"}, "'dppo' is not built in; name its file, --algorithm.loss configs/.*/dppo.py:dppo,"),
    ({"algorithm.advantages": "gdpo"}, "name its file, --algorithm.advantages configs/.*/methods/gdpo.py:gdpo"),
    ({"algorithm.old_logprobs": "generator", CORRECTION: "truncate"}, "importance_correction=truncate .* twice"),
    ({"algorithm.loss": DPPO, CORRECTION: "none", "overlap_steps": 1}, "none with old_logprobs=policy"),
    (
        {"checkpoint.push_to_hub": "a/b", "checkpoint.export": False},
        "push_to_hub uploads what checkpoint.export writes",
    ),
    ({"profile": 201}, "profile=201 is no step of a run of num_steps=200"),
]
BEST = {"checkpoint.interval": 4, "checkpoint.keep_best": "accuracy"}
REFUSED_IN_SFT = [
    ({"trainer.micro_batch_tokens": 1000}, "2048 tokens .*micro_batch_tokens=1000"),
    ({"num_trainers": 3, "trainer.tensor_parallel": 2}, "3 trainer ranks .*tensor_parallel=2"),
    (BEST, "checkpoint.interval=4 must be a multiple of evaluation.interval=0"),
    (OWN_SETS | {"evaluation.interval": 2}, "held out: set evaluation.path or evaluation.sets"),
    ({"data.weights": {"gsm": 1}, **OWN_SETS}, "data.weights has 'gsm', not in data.sources"),
    ({"data.weights": {"a": 0}, **OWN_SETS}, "data.weights=.*'a': 0.* above 0"),
    ({"data.prompt_template": "no place"}, "data.prompt_template='no place' has no {question}.* .jinja"),
]


@pytest.mark.parametrize(
    "base, changes, message",
    [(GRPOConfig(), *case) for case in REFUSED_IN_GRPO] + [(SFTConfig(), *case) for case in REFUSED_IN_SFT],
)
def test_what_cannot_work_is_refused_with_the_numbers(base, changes, message):
    with pytest.raises(ValueError, match=message):
        validate(change(base, changes))


# What a recipe may hold, because other flags may need it, and a command line may not: nothing would read it
WITHOUT_EFFECT = [
    ({}, {"algorithm.kl_in": "reward"}, "kl_in='reward' does nothing with algorithm.kl_coef=0.0; set that too"),
    ({}, {"gpus": 4}, "gpus=4 does nothing with dry_run=False"),
    (
        {},
        {"environment.max_turns": 2},
        "environment.max_turns=2 does nothing with environment.name=''.*environment.tools",
    ),
    (TOOLS, {"environment.options": {"a": 1}}, "environment.options={'a': 1} does nothing with environment.name=''"),
    (
        OWN_SETS,
        {"data.path": "b.jsonl"},
        "data.path='b.jsonl' does nothing with data.sources={'a': 'a.jsonl'}; drop one",
    ),
]


@pytest.mark.parametrize("recipe, changes, message", WITHOUT_EFFECT)
def test_a_change_that_nothing_reads_is_refused(recipe, changes, message):
    recipe = change(GRPOConfig(), recipe)
    check_effects(changed := change(recipe, changes), changed)
    with pytest.raises(ValueError, match=message):
        check_effects(changed, recipe)


# A value that a field does not take, whatever the others are, and what the message says that it must be
TEMPERATURE = "a number, at least 0.01 and below inf"
NOT_TAKEN = [
    ("num_steps", 0, "a whole number, at least 1"),
    ("num_steps", True, "a whole number, at least 1"),  # True is an int to Python
    ("generator.temperature", (1.0, 0.009), TEMPERATURE),
    ("trainer.learning_rate", math.nan, "a number, at least 0 and below inf"),
    ("trainer.schedule", "line", "one of constant, linear, cosine"),
    ("trainer.lora_targets", ("query",), "one of q_proj, k_proj,"),
    ("algorithm.clip_low", 1.1, "None or a number, at least 0 and at most 1"),
    ("algorithm.loss_options", '{"dual_clip": 3', "a dict from names, each value None or"),
    ("algorithm", None, "an object of class AlgorithmConfig"),
    ("data.system_prompt", "f\udcfcr", "text"),
]


@pytest.mark.parametrize("path, value, must_be", NOT_TAKEN)
def test_a_field_refuses_what_it_does_not_take(path, value, must_be):
    with pytest.raises(ValueError) as error:
        validate(change(GRPOConfig(), {path: value}))
    assert str(error.value).startswith(path) and f"must be {must_be}" in str(error.value)


def test_a_field_takes_its_bounds_and_whole_numbers_for_numbers():
    at_bounds = {"generator.gpu_memory_utilization": 1, "algorithm.clip_low": 0, "checkpoint.interval": 0}
    validate(change(GRPOConfig(), {**at_bounds, "trainer.learning_rate": 0, "trainer.max_grad_norm": math.inf}))


@pytest.mark.parametrize("config_type", [GRPOConfig, SFTConfig])
def test_adapters_at_a_learning_rate_for_all_weights_are_said(config_type):
    """What they add to a weight in bfloat16 is rounded away until it is as large as half of its last digit."""
    lora = change(config_type(), {"trainer.lora_rank": 16, "trainer.learning_rate": 1e-6})
    (said,) = cautions(lora)
    assert "trainer.learning_rate=1e-06 hardly moves adapters" in said and "--trainer.learning-rate 1e-5" in said
    for rate in (0.0, 1e-5):
        assert cautions(change(lora, {"trainer.learning_rate": rate})) == []


def test_random_weights_at_a_rate_for_trained_ones_are_said():
    built = change(SFTConfig(), {"model.path": "toys.py:model"})
    (said,) = cautions(built)
    assert "learning_rate=1e-06 hardly moves a model that starts from random" in said and "-rate 1e-3" in said
    assert cautions(change(built, {"trainer.learning_rate": 1e-3})) == []


@pytest.mark.parametrize("coarse", [{"kv_cache_dtype": "fp8"}, {"quantization": "fp8_per_tensor"}])
def test_a_coarse_engine_without_a_correction_is_said(coarse):
    config = change(GRPOConfig(), {"generator.engine": coarse})
    assert cautions(config) == []
    none = {"algorithm.importance_correction": "none"}
    assert len(cautions(change(config, none))) == 1
    assert cautions(change(config, none | {"algorithm.old_logprobs": "generator"})) == []
    assert cautions(change(GRPOConfig(), none)) == []


@pytest.mark.parametrize(
    "sampling, named",
    [
        ({"top_p": 0.9, "min_p": 0.1, "top_k": 50}, ""),
        ({"min_tokens": 8, "bad_words": ["a b"], "top_p": 0.9}, ""),
        ({"min_tokens": 8, "top_p": 1.0}, "min_tokens"),
        ({"thinking_token_budget": 9, "top_p": 0.9}, "thinking_token_budget"),
        ({"top_p": 0.9, "repetition_penalty": 1.1, "seed": 1}, "repetition_penalty"),
        ({"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": False}, ""),
    ],
)
def test_sampling_from_another_distribution_is_said_in_any_precision(sampling, named):
    for dtype in ("bfloat16", "float32"):
        said = cautions(change(GRPOConfig(), {"generator.sampling": sampling, "model.dtype": dtype}))
        assert [f"sampling {named} the engine" in text for text in said] == [True] * bool(named)
    assert cautions(change(SFTConfig(), {"generator.sampling": sampling})) == []  # which trains on no samples


def test_an_engine_that_changes_probabilities_is_said():
    said = cautions(change(GRPOConfig(), {"generator.engine": {"logits_processors": ["mine:Up"], "block_size": 32}}))
    assert len(said) == 1 and "generator.engine logits_processors" in said[0]


def test_an_environment_is_reward_enough():
    environment = {"environment.name": "guess.py:Guess", "environment.options": {"high": 4}, "environment.max_turns": 1}
    config = change(GRPOConfig(), environment | {"reward.functions": {}, "sampling.dynamic": True})
    validate(config)
    assert (config.environment.enabled, config.environment.reward_name) == (True, "Guess")
    assert not SFTConfig().environment.enabled


def test_a_teacher_needs_neither_rewards_nor_groups():
    validate(config := change(GRPOConfig(), ONLY_TEACHER | {"group_size": 1}))
    assert config.needs_reference
    validate(change(config, {"reward.functions": {"math_reward": 0.0}, "evaluation.interval": 1}))


def test_self_distillation_holds_a_start_and_no_second_policy():
    """Its start is a model of its own, except with LoRA on the trainers; the policy never is. Tools go with it."""
    hint = HINT | {"roles.num_trainers": 2, "prompts_per_step": 4}
    lora, apart = {"trainer.lora_rank": 8}, {"roles.num_references": 1}
    for changes, has_model in [({}, True), (lora, False), (lora | apart, True), (SELF, False), (SELF | lora, False)]:
        validate(config := change(GRPOConfig(), hint | changes))
        assert config.needs_reference and config.reference_has_model == has_model
    validate(change(GRPOConfig(), hint | TOOLS | {"reward.functions": {"math_reward": 0.0}}))


# ---- Layouts


def test_world_size_names_both_numbers_and_a_layout_that_works():
    parts = r"\(4 trainer \+ 4 generator\) needs 8 processes, but torchrun started 6; .*for 6 processes: --roles"
    with pytest.raises(ValueError, match=parts):
        check_world_size(GRPOConfig(), 6)
    with pytest.raises(ValueError, match="needs 2 processes, but torchrun started 3; .* --num-trainers 3"):
        check_world_size(SFTConfig(num_trainers=2), 3)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 6, 8, 16])
@pytest.mark.parametrize("trainer_parallel, generator_parallel, overlap", [(1, 1, 1), (2, 1, 0), (1, 2, 0), (2, 4, 1)])
def test_suggested_roles_fit(num_ranks, trainer_parallel, generator_parallel, overlap):
    flags = ["--trainer.tensor-parallel", str(trainer_parallel), "--generator.tensor-parallel", str(generator_parallel)]
    flags += ["--overlap-steps", str(overlap), "--algorithm.kl-coef", "0.1", "--prompts-per-step", "12"]
    config = load(GRPOConfig, DEFAULT, [*flags, "--roles.num-generators", "4"])
    suggestion = suggest_roles(config, num_ranks)
    if suggestion.startswith("no layout"):
        largest = max(trainer_parallel, generator_parallel)
        assert num_ranks < trainer_parallel + generator_parallel or num_ranks % largest
    else:
        check_world_size(load(GRPOConfig, DEFAULT, [*flags, *suggestion.split()]), num_ranks)


@pytest.mark.parametrize(
    "roles, trainer_parallel, expected",
    [
        (RolesConfig(num_trainers=4, num_references=0), 4, 4),  # on the trainer ranks
        (RolesConfig(num_trainers=4, num_references=2), 4, 2),
        (RolesConfig(num_trainers=4, num_references=3), 2, 1),
    ],
)
def test_reference_is_sharded_as_far_as_its_ranks_allow(roles, trainer_parallel, expected):
    config = GRPOConfig(roles=roles, trainer=TrainerConfig(tensor_parallel=trainer_parallel))
    assert config.reference_tensor_parallel == expected


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, True),
        ({"trainer.lora_rank": 0}, False),  # without LoRA the policy's weights move
        ({"model.reference_path": "another"}, False),
        ({"roles.num_references": 1}, False),  # has ranks of its own
        ({"roles.num_references": 1, "roles.colocated": True}, True),  # num_references does not apply
    ],
)
def test_with_lora_the_reference_is_the_policy_without_adapters(changes, expected):
    start = {"roles.num_trainers": 2, "trainer.lora_rank": 8, "algorithm.kl_coef": 0.1}
    assert change(GRPOConfig(), start | changes).reference_is_base == expected


# ---- Command line


def test_command_line_overrides_any_field():
    config = load(
        GRPOConfig,
        "no/such/default.py",
        [
            DEFAULT,
            *["--num-steps", "7", "--model.dtype", "float32", "--trainer.learning-rate", "3e-5"],
            *["--roles.colocated", "--trainer.no-share-prompts", "--resume"],
            *["--reward.functions", "my/reward.py:short", "1", "thinking_reward", "0.5"],
            *["--data.columns", "answer", "gold", "--data.chat-template-kwargs", "enable_thinking", "true"],
        ],
    )
    assert config.num_steps == 7 and config.model.dtype == "float32" and config.trainer.learning_rate == 3e-5
    assert config.roles.colocated and not config.trainer.share_prompts and config.resume
    assert config.reward.functions == {"my/reward.py:short": 1.0, "thinking_reward": 0.5}
    assert config.data.columns == {"answer": "gold"}
    assert config.data.reward_columns == {"question": "question", "answer": "gold"}
    assert config.data.chat_template_kwargs == {"enable_thinking": True}
    # what was not named is the recipe's
    assert config.model.path == "Qwen/Qwen3-1.7B" and config.prompts_per_step == 64


def test_warnings_are_printed_by_the_first_rank_only(monkeypatch, capsys):
    load(GRPOConfig, DEFAULT, ["--data.prompt-template", "{question}"])
    assert "\nwarning: data.system_prompt is not used" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    load(GRPOConfig, DEFAULT, ["--data.prompt-template", "{question}"])
    assert capsys.readouterr().out == ""


# ---- Recipes


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_and_its_command_starts_as_many_ranks(path):
    config = read(path)
    validate(config)
    check_world_size(config, config.num_ranks)
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert f"configs/{path.name}" in docstring
    nodes = max([1, *map(int, re.findall(r"--n?nodes=(\d+)", docstring))])
    (per_node,) = set(re.findall(r"--nproc_per_node=(\d+)", docstring))
    assert int(per_node) * nodes == config.num_ranks
    script = "train_sft.py" if isinstance(config, SFTConfig) else "train_grpo.py"
    assert script in docstring
    assert config.run_dir == f"runs/{path.stem}"


SURPRISING = GRPOConfig(
    data=DataConfig(
        system_prompt='Say "hi"\nand \\boxed{}',
        answer_column="",
        sources={"a": "b/c[d]@e:f[:5%]"},
        weights={"a": 2},
        chat_template_kwargs={"a b": "'"},
    ),
    reward=RewardConfig(functions={"dir/file.py:f": 1e-30, "math_reward": 2}),
    trainer=TrainerConfig(max_grad_norm=math.inf),
    generator=GeneratorConfig(engine={"speculative_config": {"method": "ngram"}}, sampling={"n": [1, None]}),
    algorithm=AlgorithmConfig(loss_options={"max_importance_weight": math.inf, "deep": {"a": [None, True]}}),
)


@pytest.mark.parametrize("config", [*map(read, RECIPES), GRPOConfig(), SFTConfig(), SURPRISING])
def test_recipe_text_gives_the_same_config(config, tmp_path):
    (tmp_path / "config.py").write_text(as_recipe(config))
    assert load_recipe(str(tmp_path / "config.py"), type(config)) == config


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_config_of_a_run_takes_another_loss_as_its_recipe_does(recipe, tmp_path):
    """What followed from the first loss is not in the saved config, so nothing of it stays."""
    if isinstance(read(recipe), SFTConfig):
        return
    (tmp_path / "config.py").write_text(as_recipe(load(GRPOConfig, str(recipe), [])))
    flags = ["--algorithm.loss", "dapo"]
    fresh, saved = (load(GRPOConfig, "", [str(path), *flags]) for path in (recipe, tmp_path / "config.py"))
    assert saved == fresh and saved.algorithm.resolved == fresh.algorithm.resolved


def test_the_console_says_what_is_not_the_recipes_and_what_follows_from_the_loss(capsys):
    load(GRPOConfig, DEFAULT, ["--num-steps", "3", "--algorithm.loss", "dapo", "--algorithm.clip-high", "0.5"])
    told = capsys.readouterr().out
    for part in (DEFAULT, "num_steps = 3, not 200", "loss = 'dapo', not 'grpo'"):
        assert part in told
    assert "from algorithm.loss=dapo follow advantages='group_std', aggregation='token_mean', clip_low=0.2," in told
    assert "set to another value than follows: clip_high=0.5\n" in told
    assert "each ratio is 1" not in told
    load(GRPOConfig, DEFAULT, ["--algorithm.loss", "gspo"])
    assert "each ratio is 1, so gspo takes the steps that grpo takes" in capsys.readouterr().out
    load(GRPOConfig, DEFAULT, ["--algorithm.loss", "gspo", "--algorithm.num-mini-batches", "2"])
    assert "each ratio is 1" not in capsys.readouterr().out


@pytest.mark.parametrize("loss", PAPER_DEFAULTS)
def test_a_loss_brings_its_papers_defaults(loss):
    """Switched on the command line, also over a recipe; what the user gives stays."""
    completed = load(GRPOConfig, DEFAULT, ["--algorithm.loss", loss]).algorithm.resolved
    assert {name: getattr(completed, name) for name in PAPER_DEFAULTS[loss]} == PAPER_DEFAULTS[loss]
    given = load(GRPOConfig, DEFAULT, ["--algorithm.loss", loss, "--algorithm.clip-high", "0.3"]).algorithm.resolved
    assert given == dataclasses.replace(completed, clip_high=0.3)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, "truncate"),
        ({"old_logprobs": "generator"}, "none"),  # the ratio has the generator in it already
        ({"old_logprobs": "generator", "importance_correction": "mask_sequences"}, "mask_sequences"),
    ],
)
def test_default_correction(given, expected):
    assert AlgorithmConfig(**given).resolved.importance_correction == expected


def test_a_loss_of_ones_own_needs_no_correction_for_older_weights():
    loss = {"algorithm.loss": DPPO, "algorithm.old_logprobs": "generator"}
    validate(change(GRPOConfig(), {**loss, "overlap_steps": 1, **CARRY_8}))


def test_recipe_text_neither_continues_nor_deletes_the_run_it_describes():
    started = GRPOConfig(overwrite=True, resume=True, allow_changes=True)
    assert as_recipe(started) == as_recipe(GRPOConfig())
    assert as_recipe(SFTConfig(overwrite=True)) == as_recipe(SFTConfig())
    assert "\n    resume=False,\n    allow_changes=False,\n    overwrite=False,\n" in as_recipe(started)


def write(path: pathlib.Path, text: str) -> str:
    path.write_text(f"from grpo import config as c\n{text}\n")
    return str(path)


def test_a_recipe_starts_from_another_one(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    write(tmp_path / "base.py", "config = c.GRPOConfig(group_size=4, algorithm=c.AlgorithmConfig(kl_coef=0.1))")
    (tmp_path / "sub").mkdir()
    one = write(tmp_path / "sub/one.py", 'config = c.change("../base.py", {"algorithm.loss": "dapo", "num_steps": 3})')
    expected = GRPOConfig(group_size=4, num_steps=3, algorithm=AlgorithmConfig(kl_coef=0.1, loss="dapo"))
    assert load_recipe(one, GRPOConfig) == expected
    two = write(tmp_path / "two.py", 'config = c.change("sub/one.py", {"algorithm": c.AlgorithmConfig()})')
    assert load_recipe(two, GRPOConfig) == GRPOConfig(group_size=4, num_steps=3)


def test_a_path_of_a_recipe_starts_in_this_folder_or_else_in_the_recipes(tmp_path, monkeypatch):
    """Every kind of field that names a file: a name, a tuple, a table's names or values. A flag's path is of here."""
    names = ("mine.py", "rows.jsonl", "chat.jinja", "both.py", "here/both.py")
    (tmp_path / "here").mkdir()
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path / "here")
    named = {
        "algorithm.loss": "mine.py:loss",
        "reward.functions": {"mine.py:f": 1.0, "both.py:f": 1.0, "math_reward": 1.0},
        "data.path": "rows.jsonl:train[:9]",
        "data.prompt_template": "chat.jinja",
        "environment.tools": ("mine.py:tool", "python"),
        "model.path": "none/there",
    }
    recipe = load_recipe(write(tmp_path / "one.py", f"config = c.change(c.GRPOConfig(), {named!r})"), GRPOConfig)
    assert recipe.algorithm.loss == f"{tmp_path}/mine.py:loss"
    assert [*recipe.reward.functions] == [f"{tmp_path}/mine.py:f", "both.py:f", "math_reward"]
    assert recipe.data.path == f"{tmp_path}/rows.jsonl:train[:9]"
    assert recipe.data.prompt_template == f"{tmp_path}/chat.jinja"
    assert recipe.environment.tools == (f"{tmp_path}/mine.py:tool", "python")
    assert recipe.model.path == "none/there"
    flags = ["--algorithm.loss", "mine.py:x", "--environment.tools"]
    assert load(GRPOConfig, str(tmp_path / "one.py"), flags).algorithm.loss == "mine.py:x"


# What a recipe's lines do, from line 2 on, and the message after `path, `
BROKEN = {
    "\n\nconfig = c.GRPOConfig(": "line 4: SyntaxError: '(' was never closed",
    "config = c.AlgorithmConfig(\n    los='dapo'\n)": "line 2: TypeError: AlgorithmConfig.__init__() got an unexpected "
    "keyword argument 'los'",
    "config = c.change(c.GRPOConfig(), {'trainer.kl_coef': 1})": "line 2: there is no field trainer.kl_coef (did you "
    "mean algorithm.kl_coef?)",
    "\nconfig = c.change('absent.py', {})": "line 3: recipe {folder}/absent.py does not exist",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_recipe_that_raises_is_one_line_with_the_place(text, tmp_path):
    path = write(tmp_path / "mine.py", text)
    with pytest.raises(ValueError) as error:
        load_recipe(path, GRPOConfig)
    assert str(error.value).startswith(f"{path}, {BROKEN[text].format(folder=tmp_path)}")
    assert "\n" not in str(error.value)


# ---- Help


def test_every_field_has_a_sentence():
    tree = ast.parse(pathlib.Path(fields.__file__).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert {"GRPOConfig", "SFTConfig"} <= classes.keys()
    for name, node in classes.items():
        assert ast.get_docstring(node), f"{name} has no docstring"
        following = [*node.body[1:], None]
        for statement, after in zip(node.body, following, strict=True):
            if not isinstance(statement, ast.AnnAssign):
                continue
            if {node.id for node in ast.walk(statement.annotation) if isinstance(node, ast.Name)} & classes.keys():
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
