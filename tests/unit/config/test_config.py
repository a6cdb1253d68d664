"""What a user can get wrong, what a recipe becomes, and that --help explains every field."""

import ast
import dataclasses
import math
import operator
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
    SFTConfig,
    TrainerConfig,
    change,
    fields,
)
from grpo.config.checks import cautions, check_world_size, validate
from grpo.config.recipes import as_recipe, load, load_recipe
from tests.door import skipping_what_needs_a_deleted_feature
from tests.unit.config.started import started

ROOT = pathlib.Path(__file__).parents[3]
RECIPES = sorted((ROOT / "configs").glob("*.py"))
DPPO = "configs/examples/methods/dppo.py:dppo"
DEFAULT = str(ROOT / "configs" / "qwen3_1_7b_gsm8k.py")


def read(path: pathlib.Path) -> GRPOConfig | SFTConfig:
    return load_recipe(str(path), GRPOConfig, SFTConfig)


# ---- Checks

TEACHER = "--model.reference-path teacher"
ONLY_TEACHER = f"{TEACHER} --reward.functions --algorithm.distill-coef 1"
MOVES = "--algorithm.kl-coef 0.1 --algorithm.reference-interval"
CORRECTION = "--algorithm.importance-correction"
# Flags, and what the message has. The defaults are 4 trainers, 4 generators, 32 prompts of 8 completions
REFUSED_IN_GRPO = {
    "--roles.num-generators 7 --generator.tensor-parallel 2": "7 generator ranks .* use 6",
    "--roles.num-references 2": "nobody would read what roles.num_references .*num-references 0",
    "--generator.sleep": "generator.sleep needs roles.colocated",
    "--generator.temperature 0.5 1 1.5 --group-size 2": "3 values .* group_size=2",
    "--prompts-per-step 3 --group-size 2": "3 x group_size=2 = 6 completions .* over 4 .*-step 4",
    "--trainer.tensor-parallel 3": "4 trainer ranks .*tensor_parallel=3 x .*data_replicas=1; use 3",
    "--trainer.expert-parallel 3": "4 trainer ranks .*expert_parallel=3; use 1",
    "--trainer.expert-parallel 2 --trainer.activation-checkpointing full": "take selective",
    "--trainer.context-parallel 3": "4 trainer ranks .*context_parallel=3 x .*; use 3",
    "--trainer.micro-batch-tokens 1535": "1536 tokens .*micro_batch_tokens=1535; .* at least 1536",
    "--trainer.moments bfloat16 --trainer.adam-beta2 0.999": "adam_beta2=0.999 takes 0.001 of .* at most 0.996",
    "--trainer.optimizer muon --trainer.lora-rank 8": "muon does not go with trainer.lora_rank=8: .*optimizer adamw",
    "--algorithm.loss ppo": "algorithm.loss='ppo' is unknown; use grpo, dr_grpo, dapo",
    "--algorithm.loss dppo": "algorithm.loss='dppo' is unknown; .* configs/examples/methods/dppo.py:dppo",
    "--algorithm.advantages gruop_std": "algorithm.advantages='gruop_std' is unknown; use group_std, group_mean",
    "--algorithm.num-mini-batches 33": "num_mini_batches=33 .* raise prompts_per_step=32",
    f"--algorithm.old-logprobs generator {CORRECTION} truncate": "importance_correction=truncate .* twice",
    f"{CORRECTION} mask_tokens {CORRECTION}-low 1.5": "1 must lie between .*low=1.5 and .*high=2.0",
    "--algorithm.distill-coef 1": "distill_coef needs model.reference_path: name a teacher",
    f"{MOVES} 5 {TEACHER}": "reference_interval does not go with .* model.reference_path",
    f"{MOVES} 5 --roles.num-references 1": "reference_interval needs .* --roles.num-references 0",
    f"{MOVES} 5 --trainer.data-replicas 2": "reference_interval needs .* --trainer.data-replicas 1",
    "--group-size 1 --algorithm.advantages rloo": "advantages=rloo makes",
    "--sampling.dynamic --group-size 1 --algorithm.advantages none": "dynamic needs a group_size of at",
    "--overlap-steps 1 --roles.colocated": "overlap_steps .* with roles.colocated: .* set --overlap-steps 0",
    f"--overlap-steps 1 {CORRECTION} none": "importance_correction=none with old_logprobs=policy",
    f"--overlap-steps 1 {CORRECTION} none --algorithm.loss {DPPO}": "none with old_logprobs=policy",
    f"--sampling.carry-over 1 {CORRECTION} mask_sequences": "=mask_sequences with old_logprobs=policy",
    "--overlap-steps 1 --algorithm.old-logprobs generator": "importance_correction=none with old_logprobs=generator",
    "--sampling.carry-over 32": "carry_over=32 must be below prompts_per_step=32",
    "--sampling.carry-over 8 --generator.stop END": "generator.stop, .* does not go with sampling.carry_over",
    "--reward.functions": "reward.functions is empty",
    f"{ONLY_TEACHER} --sampling.dynamic": "reward.functions is empty",
    "--reward.passes accuracy": "reward.passes='accuracy' .* name one of math_reward, thinking_reward",
    # values that a field does not take
    "--num-steps 0": "num_steps=0 must be a whole number, at least 1",
    "--generator.temperature 1 0.009": "temperature=.* each entry a number, at least 0.01 and below inf",
    "--algorithm.clip-low 1.1": "algorithm.clip_low=1.1 must be None or a number, at least 0 and at most 1",
    # a flag that nothing reads, because another one is off
    "--algorithm.kl-in reward": "kl_in='reward' does nothing without algorithm.kl_coef; set that too",
    "--gpus 4": "gpus=4 does nothing without dry_run",
    "--environment.max-turns 2": "environment.max_turns=2 does nothing without environment.name environment.tools",
    "--trainer.lora-alpha 64": "lora_alpha=64 does nothing without trainer.lora_rank",
}
OWN_SETS = "--data.path a a.jsonl"
REFUSED_IN_SFT = {
    "--trainer.micro-batch-tokens 1000": "2048 tokens .*micro_batch_tokens=1000",
    "--num-trainers 3 --trainer.tensor-parallel 2": "3 trainer ranks .*tensor_parallel=2",
    "--checkpoint.interval 4 --checkpoint.keep-best accuracy": "interval=4 must be a multiple of evaluation.interval=0",
    f"{OWN_SETS} --evaluation.interval 2": "data.path has 1 data sets, so say what is held out: set evaluation.path",
    f"{OWN_SETS} --data.weights gsm 1": "data.weights has 'gsm', not in data.path",
    f"{OWN_SETS} --data.weights a 0": "data.weights=.*'a': 0.* above 0",
    "--data.path": "data.path is empty",
    "--data.prompt-template 'no place'": "data.prompt_template='no place' has no {question}.* .jinja",
}


@pytest.mark.parametrize(
    "kind, flags",
    [(GRPOConfig, flags) for flags in REFUSED_IN_GRPO] + [(SFTConfig, flags) for flags in REFUSED_IN_SFT],
)
def test_what_cannot_work_is_refused_with_the_numbers(kind, flags):
    with pytest.raises(ValueError, match=(REFUSED_IN_GRPO | REFUSED_IN_SFT)[flags]) as refused:
        started(flags, kind)
    assert "\n" not in str(refused.value)


# What only a recipe can write, and what the message says that it must be
NOT_TAKEN = [
    ("num_steps", True, "a whole number, at least 1"),  # True is an int to Python
    ("trainer.learning_rate", math.nan, "a number, at least 0 and below inf"),
    ("trainer.schedule", "line", "one of constant, linear, cosine"),
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


def test_one_or_several_data_sets_are_written_in_one_field():
    sources = started("--data.path a a.jsonl b b.jsonl --data.weights b 3").data.all_sources
    assert [(s.label, s.path, s.weight) for s in sources] == [("a", "a.jsonl", 1), ("b", "b.jsonl", 3)]


LORA = "--trainer.lora-rank 16 --trainer.learning-rate"
# In bfloat16 what adapters add is rounded away until it is as large as half of the last digit
HARDLY_MOVES = "learning_rate=1e-06 hardly moves"
COARSE = f"{CORRECTION} none --generator.engine"
SAID = "with {} the engine draws from another distribution"
# Flags, and a part of the one warning, or nothing
CAUTIONS = {
    f"{LORA} 1e-6": f"{HARDLY_MOVES} adapters",
    f"{LORA} 0": "",
    f"{LORA} 1e-5": "",
    f"{COARSE} kv_cache_dtype fp8": "coarser policy",
    f"{COARSE} quantization fp8_per_tensor": "coarser policy",
    f"{COARSE} quantization fp8_per_tensor --algorithm.old-logprobs generator": "",
    "--generator.engine quantization fp8_per_tensor": "",  # truncate makes up for it
    "--generator.engine logits_processors mine:Up block_size 32": SAID.format("logits_processors"),
    "--generator.sampling top_p 0.9 min_p 0.1 top_k 50": "",
    "--generator.sampling min_tokens 8 top_p 0.9": "",
    "--generator.sampling min_tokens 8 top_p 1.0": SAID.format("min_tokens"),
    "--generator.sampling thinking_token_budget 9 top_p 0.9": SAID.format("thinking_token_budget"),
    "--generator.sampling top_p 0.9 repetition_penalty 1.1": SAID.format("repetition_penalty"),
    "--generator.sampling top_p 1.0 top_k -1 min_p 0.0 repetition_penalty 1.0": "",
    "--data.prompt-template {question}": "data.system_prompt is not used",
    "--data.prompt-template '{system_prompt} {question}'": "",
}


@pytest.mark.parametrize("flags", CAUTIONS)
def test_what_may_surprise_is_said_once(flags):
    said = list(cautions(started(flags)))
    assert [CAUTIONS[flags] in text for text in said] == [True] * bool(CAUTIONS[flags])


def test_the_first_rank_alone_prints_it(monkeypatch, capsys):
    flags = ["--data.prompt-template", "{question}"]
    load(GRPOConfig, DEFAULT, flags)
    assert "\nwarning: data.system_prompt is not used" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    load(GRPOConfig, DEFAULT, flags)
    assert capsys.readouterr().out == ""


ON_TRAINERS = "--roles.num-trainers 2 --prompts-per-step 4 --algorithm.kl-coef 0.1 --trainer.lora-rank 8"
# Flags that are taken, and what follows from them
FOLLOWS = {
    f"{ONLY_TEACHER} --group-size 1": {"needs_reference": True},
    f"{ONLY_TEACHER} --group-size 1 --reward.functions math_reward 0 --evaluation.interval 1": {},
    # with LoRA the reference is the policy without adapters
    ON_TRAINERS: {"reference_has_model": False},
    f"{ON_TRAINERS} --trainer.lora-rank 0": {"reference_has_model": True},
    f"{ON_TRAINERS} --model.reference-path another": {"reference_has_model": True},
    f"{ON_TRAINERS} --roles.num-references 1": {"reference_has_model": True},
    f"{ON_TRAINERS} --roles.num-references 1 --roles.colocated": {"reference_has_model": False},
    # the reference is sharded as far as its ranks allow
    "--trainer.tensor-parallel 4": {"reference_tensor_parallel": 4},
    "--algorithm.kl-coef 1 --trainer.tensor-parallel 4 --roles.num-references 2": {"reference_tensor_parallel": 2},
    "--algorithm.kl-coef 1 --trainer.tensor-parallel 2 --roles.num-references 3": {"reference_tensor_parallel": 1},
    # the ratio has the generator in it already; a loss of the user's has its own way with older weights
    "--num-steps 3": {"algorithm.resolved.importance_correction": "truncate"},
    "--algorithm.old-logprobs generator": {"algorithm.resolved.importance_correction": "none"},
    f"--algorithm.old-logprobs generator --algorithm.loss {DPPO} --overlap-steps 1 --sampling.carry-over 8": {},
}


@pytest.mark.parametrize("flags", FOLLOWS)
def test_what_follows_from_flags(flags):
    config = started(flags)
    assert {path: operator.attrgetter(path)(config) for path in FOLLOWS[flags]} == FOLLOWS[flags]


# ---- Layouts


def test_world_size_names_both_numbers_and_a_layout_that_works():
    parts = r"\(4 trainer \+ 4 generator\) needs 8 processes, but torchrun started 6; .*=8 .* --dry-run --gpus 6 names"
    with pytest.raises(ValueError, match=parts):
        check_world_size(GRPOConfig(), 6)
    with pytest.raises(ValueError, match="needs 2 processes, but torchrun started 3; .*=2 "):
        check_world_size(SFTConfig(num_trainers=2), 3)


# ---- Command line


def test_command_line_overrides_any_field():
    flags = "--num-steps 7 --model.dtype float32 --trainer.learning-rate 3e-5 --roles.colocated --resume "
    flags += "--trainer.no-share-prompts --reward.functions my/reward.py:short 1 thinking_reward 0.5 "
    flags += "--data.columns answer gold --data.chat-template-kwargs enable_thinking true"
    config = load(GRPOConfig, "no/such/default.py", [DEFAULT, *flags.split()])
    assert config.num_steps == 7 and config.model.dtype == "float32" and config.trainer.learning_rate == 3e-5
    assert config.roles.colocated and not config.trainer.share_prompts and config.resume
    assert config.reward.functions == {"my/reward.py:short": 1.0, "thinking_reward": 0.5}
    assert config.data.reward_columns == {"question": "question", "answer": "gold"}
    assert config.data.chat_template_kwargs == {"enable_thinking": True}
    assert config.prompts_per_step == 64  # the recipe's


# ---- Recipes


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_and_its_command_starts_as_many_ranks(path):
    config = read(path)
    with skipping_what_needs_a_deleted_feature():
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
        path={"a": "b/c[d]@e:f[:5%]"},
        weights={"a": 2},
        chat_template_kwargs={"a b": "'"},
    ),
    reward=RewardConfig(functions={"dir/file.py:f": 1e-30, "math_reward": 2}),
    trainer=TrainerConfig(max_grad_norm=math.inf),
    generator=GeneratorConfig(engine={"speculative_config": {"method": "ngram"}}, sampling={"n": [1, None]}),
    algorithm=AlgorithmConfig(loss_options={"temperature_positive": math.inf, "deep": {"a": [None, True]}}),
)


@pytest.mark.parametrize("config", [*map(read, RECIPES), GRPOConfig(), SFTConfig(), SURPRISING])
def test_recipe_text_gives_the_same_config(config, tmp_path):
    (tmp_path / "config.py").write_text(as_recipe(config))
    assert load_recipe(str(tmp_path / "config.py"), type(config)) == config


def test_the_config_of_a_run_takes_another_loss_as_its_recipe_does(tmp_path):
    """What followed from the first loss is not in the saved config, so nothing of it stays."""
    saved = tmp_path / "config.py"
    saved.write_text(as_recipe(load(GRPOConfig, DEFAULT, [])))
    fresh, again = (load(GRPOConfig, recipe, ["--algorithm.loss", "dapo"]) for recipe in (DEFAULT, str(saved)))
    assert again == fresh and again.algorithm.resolved == fresh.algorithm.resolved


def test_the_console_says_what_is_not_the_recipes_and_what_follows_from_the_loss(capsys):
    load(GRPOConfig, DEFAULT, ["--num-steps", "3", "--algorithm.loss", "dapo", "--algorithm.clip-high", "0.5"])
    told = capsys.readouterr().out
    for part in (DEFAULT, "num_steps = 3, not 200", "loss = 'dapo', not 'grpo'", "clip_high = 0.5, not None"):
        assert part in told
    assert "from algorithm.loss=dapo follow advantages='group_std', aggregation='token_mean', clip_low=0.2," in told


@pytest.mark.parametrize("loss", PAPER_DEFAULTS)
def test_a_loss_brings_its_papers_defaults(loss):
    """Switched on the command line; what the user gives stays."""
    completed = started(f"--algorithm.loss {loss}").algorithm.resolved
    assert {name: getattr(completed, name) for name in PAPER_DEFAULTS[loss]} == PAPER_DEFAULTS[loss]
    given = started(f"--algorithm.loss {loss} --algorithm.clip-high 0.3").algorithm.resolved
    assert given == dataclasses.replace(completed, clip_high=0.3)


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


# What a recipe's lines do, from line 2 on, and the message after `path, `
BROKEN = {
    "\n\nconfig = c.GRPOConfig(": "line 4: SyntaxError: '(' was never closed",
    "config = c.AlgorithmConfig(\n    los='dapo'\n)": "line 2: TypeError: AlgorithmConfig.__init__() got an unexpected "
    "keyword argument 'los'",
    "config = c.change(c.GRPOConfig(), {'trainer.kl_coef': 1})": "line 2: there is no field trainer.kl_coef (did you "
    "mean algorithm.kl_coef?)",
    "\nexec('(')": "line 3: SyntaxError: '(' was never closed (<string>, line 1)",
    "\nconfig = c.change('absent.py', {})": "line 3: recipe {folder}/absent.py is no file",
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
