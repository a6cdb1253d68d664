"""The memory arithmetic against sizes that are published and peaks that were measured, and the tables made with it."""

import functools
import json
import re
import shlex

import pytest
import transformers

from grpo import config as c
from grpo.config.checks import describe_roles
from grpo.config.recipes import load, load_recipe
from grpo.features.machine.fit import MARGIN_FRAC, decide, fit_engine
from grpo.features.machine.memory import PROCESS_GIB, Device, Needs, Sizes, sizes_of
from grpo.run.command_line import DEFAULT_RECIPES
from tests import ROOT
from tests.door import skipping_what_needs_a_deleted_feature
from tests.unit.models.test_hf_folder import (
    CODER_0_5B,
    GEMMA3_1B,
    LLAMA3_1_8B,
    MISTRAL_7B_V0_1,
    MISTRAL_7B_V0_3,
    OLMO3_7B,
    QWEN2_5_7B,
    QWEN3_0_6B,
    QWEN3_1_7B,
    QWEN3_4B,
    QWEN3_5_TEXT,
    QWEN3_8B,
    QWEN3_30B_A3B,
    SMOLLM3_3B,
)
from tests.unit.test_readme import table

KL = "--algorithm.kl-coef 0.1"
GPU_GIB = 79.2  # of an H100, of 80 GB
GIB = 2**30
GPUS = Device(8, "GPU", 80)


def sizes(raw: dict) -> Sizes:
    return _sizes(json.dumps(raw))


@functools.cache
def _sizes(raw: str) -> Sizes:
    return sizes_of(transformers.AutoConfig.for_model(**json.loads(raw)))


def needs(raw: dict, config: c.GRPOConfig | c.SFTConfig, device: Device = GPUS, **frozen: dict) -> Needs:
    """What a run of this model needs. frozen: config.json of other models beside it."""
    if raw["model_type"] == "qwen3_5_text":
        pytest.importorskip("grpo.features.qwen3_5")
    models = {name.replace("_", " "): sizes(other) for name, other in ({"reference": raw} | frozen).items()}
    return Needs(config, sizes(raw), models, device)


@functools.cache
def config_of(flags: str = "") -> c.GRPOConfig:
    with skipping_what_needs_a_deleted_feature():
        return load(c.GRPOConfig, DEFAULT_RECIPES[c.GRPOConfig], flags.split())


def decided(raw: dict, config: c.GRPOConfig | c.SFTConfig, gpu_gib: float | None) -> Needs:
    """What it needs with all that the config leaves to GPUs of that size, or to a CPU."""
    device = Device(8, "GPU", gpu_gib) if gpu_gib else Device(0, "CPU", 20)
    return decide(needs(raw, config, device), config.roles)


PUBLISHED = {  # number of parameters as the hub counts them
    "Qwen3-0.6B": (QWEN3_0_6B, 596_049_920),
    "Qwen3-1.7B": (QWEN3_1_7B, 1_720_574_976),
    "Qwen3-8B": (QWEN3_8B, 8_190_735_360),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
    "Qwen2.5-7B": (QWEN2_5_7B, 7_615_616_512),
    "Llama-3.1-8B": (LLAMA3_1_8B, 8_030_261_248),
    "SmolLM3-3B": (SMOLLM3_3B, 3_075_098_624),
    "Gemma-3-1B": (GEMMA3_1B, 999_885_952),
    "OLMo-3-7B": (OLMO3_7B, 7_298_011_136),
    "Mistral-7B-v0.3": (MISTRAL_7B_V0_3, 7_248_023_552),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters_is_the_published_one(name):
    raw, expected = PUBLISHED[name]
    assert sizes(raw).parameters == expected


# Peaks in torch (docs/evidence/speed.md; the 8B one on two of four H200), GiB, with micro-batches of 16,384 tokens and
# chunks of 4,096. The last two are of earlier code: off them goes the table of positions that each layer had of its own
# then. All but Qwen3-4B's are of a time when a trained LM head held its last chunk's gradient for too long (1.2 GiB).
OLD_TABLE = 40960 * 256 * 4 / 2**30
LORA_16 = {"lora_rank": 16}
HALF = {"micro_batch_tokens": 8192}
MEASURED = {
    "Qwen3-1.7B, nothing recomputed": (QWEN3_1_7B, 1, "none", {}, 68.3),
    "Qwen3-1.7B, logits": (QWEN3_1_7B, 1, "logits", {}, 66.0),
    "Qwen3-1.7B, LoRA": (QWEN3_1_7B, 1, "none", LORA_16, 39.0),
    "Qwen3-1.7B, selective": (QWEN3_1_7B, 1, "selective", {}, 46.3),
    "Qwen3-4B, selective": (QWEN3_4B, 1, "selective", {}, 95.2),
    "Qwen3-4B, full": (QWEN3_4B, 1, "full", HALF, 72.8),
    "Qwen3-4B, LoRA": (QWEN3_4B, 1, "none", LORA_16, 71.0),
    "Qwen3-8B, LoRA": (QWEN3_8B, 1, "none", LORA_16 | HALF, 58.8),
    "Qwen3-1.7B, FSDP 2": (QWEN3_1_7B, 2, "selective", {}, 28.6 - 28 * OLD_TABLE),
    "Qwen3-8B, FSDP 2": (QWEN3_8B, 2, "selective", {}, 98 - 36 * OLD_TABLE),
}


@pytest.mark.parametrize("name", MEASURED)
def test_trainer_is_within_20_percent_of_what_was_measured_and_the_margin_covers_it(name):
    raw, num_trainers, kind, fields, peak = MEASURED[name]
    trainer = c.TrainerConfig(activation_checkpointing=kind, **fields)
    config = c.SFTConfig(num_trainers=num_trainers, trainer=trainer)
    estimate = sum(needs(raw, config).training.values())
    assert estimate == pytest.approx(peak, rel=0.2)
    assert peak <= estimate * (1 + MARGIN_FRAC) + PROCESS_GIB


# GiB of the GPU, changes of the recipe of 0.5B, and what torch or nvidia-smi showed at most
OF_24_GIB = {"generator.engine": {"kv_cache_memory_bytes": 4_500_000_000, "max_num_seqs": 512}}
MEASURED_WITH_AN_ENGINE = {
    "an H200": (139.8, {}, 38.9),
    "24 GiB": (24.0, OF_24_GIB, 20.0),
    "16 GiB, asleep": (16.0, OF_24_GIB | {"generator.sleep": True, "trainer.moments": "bfloat16"}, 17.5),
}


@pytest.mark.parametrize("name", MEASURED_WITH_AN_ENGINE)
def test_every_role_on_one_gpu_is_within_20_percent_of_what_was_measured(name):
    gpu_gib, changes, peak = MEASURED_WITH_AN_ENGINE[name]
    recipe = c.change(str(ROOT / "configs/qwen2_5_coder_0_5b_gsm8k.py"), changes)
    assert decided(CODER_0_5B, recipe, gpu_gib).peak == pytest.approx(peak, rel=0.2)


LORA = f"{KL} --roles.colocated --roles.num-trainers 1 --trainer.lora-rank 16"
# Model, flags, other models, part of what stays between two steps, bytes; Qwen3-1.7B has 2 trainers. LoRA of 8B: of
# each of 36 blocks q and o 4096 + 4096, k and v 4096 + 1024, three of 4096 + 12288
AT_REST = {
    "moments": (QWEN3_1_7B, "--trainer.moments bfloat16", {}, "weights and moments", 1_720_574_976 * 8 / 2),
    "reference": (QWEN3_1_7B, KL, {}, "reference", 1_720_574_976),
    "one that moves": (QWEN3_1_7B, f"{KL} --algorithm.reference-interval 5", {}, "reference", 2 * 1_720_574_976),
    "teacher": (QWEN3_1_7B, KL, {"reference": QWEN3_8B}, "reference", 8_190_735_360),
    "ranks of its own": (QWEN3_1_7B, f"{KL} --roles.num-references 1", {}, "reference", 0),
    "judge": (QWEN3_1_7B, "", {"reward_model": QWEN3_8B}, "reward model", 8_190_735_360),
    "LoRA's base": (QWEN3_8B, LORA, {}, "frozen weights", 8_190_735_360 * 2),
    "adapters": (QWEN3_8B, LORA, {}, "weights and moments", 36 * 16 * (2 * 8192 + 2 * 5120 + 3 * 16384) * 12),
    "base as reference": (QWEN3_8B, LORA, {}, "reference", 0),
    "another one": (QWEN3_8B, f"{LORA} --model.reference-path a/b", {}, "reference", 8_190_735_360 * 2),
}


@pytest.mark.parametrize("name", AT_REST)
def test_what_stays_between_two_steps_by_hand(name):
    raw, flags, frozen, part, num_bytes = AT_REST[name]
    found = needs(raw, config_of(f"--roles.num-trainers 2 {flags}"), **frozen).resting
    assert found.get(part, 0) * GIB == pytest.approx(num_bytes)


def test_a_step_that_fills_no_micro_batch_needs_less():
    """2 prompts x 4 completions of at most 100 + 28 tokens are 1,024, 8 examples of 128 too, where 16,384 may be."""
    small = config_of(
        "--prompts-per-step 2 --group-size 4 --data.max-prompt-tokens 100 --generator.max-completion-tokens 28"
    )
    examples = c.SFTConfig(sequences_per_step=8, max_sequence_tokens=128)
    activations = [needs(QWEN3_1_7B, config).training["activations"] for config in (small, examples, config_of())]
    assert [gib / activations[0] for gib in activations] == [1, 1, 16]


def test_rows_and_checkpointing_are_the_fastest_that_fit():
    long = "--generator.max-completion-tokens 32768"
    judge = "--reward.model judge"
    for raw, num_trainers, gpu_gib, flags, kind, tokens in (
        (QWEN3_1_7B, 2, GPU_GIB, "", "none", 16_384),
        (QWEN3_8B, 4, GPU_GIB, "", "selective", 16_384),
        (QWEN3_8B, 4, 64, "", "selective", 8192),
        (QWEN3_8B, 4, 64, judge, "full", 16_384),  # a reward model was told 16,384
        (QWEN3_8B, 4, GPU_GIB, long, "full", 33_280),
        (QWEN3_8B, 4, 44, "", "full", 1536),  # rows of 8,192 do not fit
        (QWEN3_8B, 4, 40, "", "full", 1536),  # nothing fits
        (QWEN3_8B, 4, None, "", "none", 16_384),  # a CPU
    ):
        config = decided(raw, config_of(f"--roles.num-trainers {num_trainers} {flags}"), gpu_gib).config
        assert (config.trainer.activation_checkpointing, config.trainer.micro_batch_tokens) == (kind, tokens)
        assert decided(raw, config, 1).config == config


def test_ranks_that_share_rows_hold_a_part_of_their_activations():
    flags = "--roles.num-trainers 4 --trainer.activation-checkpointing full --trainer.context-parallel"
    alone, shared = (needs(QWEN3_8B, config_of(f"{flags} {ranks}")).training for ranks in (1, 4))
    assert shared.pop("activations") == pytest.approx(alone.pop("activations") / 4)
    assert shared == alone


def test_experts_and_states_count_where_they_compute():
    """Qwen3-30B-A3B on 8 trainers: states and what is gathered have all 128 experts, a token's activations those of 8.

    Of a block the inputs are kept; of one, attention's values twice and of 8 experts inputs and outputs in 6 bytes and
    four of their width. In Qwen3.5's text a layer with states computes with 180 bytes for each of 16 x 128 values.
    """
    flags = "--roles.num-trainers 8 --trainer.moments bfloat16 --trainer.activation-checkpointing full"
    parts = needs(QWEN3_30B_A3B, config_of(flags)).training
    block = 2048 * (2 * 4096 + 2 * 512 + 128 + 3 * 128 * 768) + 2 * 2048 + 2 * 128
    assert parts["weights and moments"] == pytest.approx(30_532_122_624 * 8 / 8 / GIB)
    assert parts["gathered weights"] == pytest.approx(2 * (2 * block + 2 * 151936 * 2048 + 2048) / GIB)
    attention = 2 * 2048 + 2 * (4096 + 512) + 512 + 4096
    bytes_of_a_token = 2 * (48 * 2048 + attention) + 8 * (2048 * (2 + 4) + 4 * 768 * 2) + 128 * 4
    assert parts["activations"] == pytest.approx(16384 * bytes_of_a_token / GIB, rel=0.1)
    outputs = 2 * 8 * 256 + 2 * 2 * 256 + 1024 + 2 * 3584 + 1024
    bytes_of_a_token = 2 * (24 * 1024 + 2.8 * outputs) + 160 * 16 * 128
    assert needs(QWEN3_5_TEXT, config_of(flags)).training["activations"] == pytest.approx(
        16384 * bytes_of_a_token / GIB, rel=0.1
    )


def test_an_engine_by_hand():
    """Llama-3.1-8B: 2 bytes a weight; a token's cache is 2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB, in fp8
    half of it. Mistral-7B-v0.1 has as much of 4,096 tokens of 6,144, its window. Gemma-3-1B: 1 KiB a token and layer,
    512 tokens in 22 layers and 6,144 in 4. Qwen3.5's text, 6 layers of 24 with attention: 12 KiB a token, and 1 MiB of
    states in each of the 18 others.
    """
    two = config_of("--generator.tensor-parallel 2")
    assert needs(LLAMA3_1_8B, config_of()).engine_weights == pytest.approx(2 * 8_030_261_248 / GIB)
    assert needs(LLAMA3_1_8B, two).engine_weights == pytest.approx(8_030_261_248 / GIB)
    long = config_of("--data.max-prompt-tokens 4096 --generator.max-completion-tokens 2048")
    for raw, config, kib in (
        (LLAMA3_1_8B, config_of(), 128 * 1536),
        (LLAMA3_1_8B, two, 64 * 1536),
        (LLAMA3_1_8B, config_of("--generator.engine kv_cache_dtype fp8"), 64 * 1536),
        (MISTRAL_7B_V0_1, long, 128 * 4096),
        (GEMMA3_1B, long, 22 * 512 + 4 * 6144),
        (QWEN3_5_TEXT, config_of(), 12 * 1536 + 18 * 1024),
    ):
        assert needs(raw, config).sequence == pytest.approx(kib / 2**20)


# Flags, sequences that an engine gets, GiB of the GPU -> how many it decodes at once, and MiB of KV cache, None for all
# that vLLM's share leaves. Qwen3-1.7B: a token's cache is 2 x 28 layers x 8 heads x 128 x 2 bytes = 112 KiB, 1536
# tokens 168 MiB, half of them 84; weights are 3.2 GiB, 3 are left alone.
ENGINES = {
    "all, 128 of 168 MiB": ("", 128, 80, 128, 128 * 168),
    "more than vLLM takes by itself": ("", 5000, 800, 1024, 1024 * 168),
    "as many as 68 - 6.2 GiB hold": ("", 1000, 80, 753, None),
    "no fewer than 256 for a small cache": ("", 512, 16, 256, None),
    "two ranks share weights and cache": ("--generator.tensor-parallel 2", 2000, 40, 716, None),
    "a token of each in a step": ("--generator.engine max_num_batched_tokens 300", 512, 80, 300, None),
    "short": ("--generator.max-completion-tokens 16 --data.max-prompt-tokens 16", 8, 80, 8, 1024),
    "conversations, which wait for tools": ("--environment.tools python", 128, 80, 128, None),
    "drafts": ("--generator.engine spec_method ngram", 128, 80, 128, None),
    "a CPU, room for two": ("", 512, None, 256, 336),
    "a CPU, no less than 64": (
        "--generator.max-completion-tokens 8 --data.max-prompt-tokens 8",
        16,
        None,
        16,
        64,
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_decodes_what_it_gets_with_the_cache_that_this_needs(name):
    flags, num_asked, gpu_gib, number, mib = ENGINES[name]
    device = Device(8, "GPU", gpu_gib) if gpu_gib else Device(0, "CPU", 20)
    engine = fit_engine(needs(QWEN3_1_7B, config_of(flags), device), num_asked).config.generator.engine
    assert engine["max_num_seqs"] == number
    assert engine.get("kv_cache_memory_bytes") == (mib and mib * 2**20)


def test_an_engine_has_what_the_user_says_and_other_caches_are_left_to_vllm():
    named = c.change(config_of(), {"generator.engine": {"kv_cache_memory_bytes": 5, "max_num_seqs": 3}})
    for device in (Device(8, "GPU", 80), Device(0, "CPU", 20)):
        assert fit_engine(needs(QWEN3_1_7B, named, device), 512).config == named
    for raw in (MISTRAL_7B_V0_1, QWEN3_5_TEXT):  # windows, states
        left = fit_engine(needs(raw, config_of()), 1)
        assert "kv_cache_memory_bytes" not in left.config.generator.engine


def test_sequences_that_engines_get_at_one_time():
    """64 prompts x 8, or 80; 256 held-out prompts, greedy and then 8 samples each."""
    samples = "--evaluation.num-samples 8"
    flags = ("", "--sampling.carry-over 16", samples, f"{samples} --evaluation.interval 0")
    assert [config_of(more).completions_at_once for more in flags] == [512, 640, 2048, 512]


def test_the_table_of_layouts_has_the_memory_and_fits():
    """Each trainer's GiB as the arithmetic gives them, within 80 GB, with what a sleeping engine keeps."""
    rows = table("GPUs")
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8]
    for gpus, roles, trainer, command in rows:
        words = shlex.split(command.strip("`"))
        assert words[:3] == ["torchrun", f"--nproc_per_node={gpus}", "train_grpo.py"]
        config = config_of(" ".join(words[3:]))
        assert config.num_ranks == int(gpus) and config.model.path == "Qwen/Qwen3-1.7B"
        for part in describe_roles(config.roles).split(" + ") if gpus != "1" else ():
            assert part in roles
        of_row = decided(QWEN3_1_7B, config, GPU_GIB)
        assert of_row.config.trainer.activation_checkpointing == "none"
        assert float(trainer) == round(sum(of_row.training.values()), 1), gpus
        assert of_row.peak < 74.7


def test_recipes_say_the_memory_of_their_weights():
    """`7.6e9 x 16 / 4 ranks =\n28 GiB` in a recipe's docstring is right."""
    num_said = 0
    for path in sorted((ROOT / "configs").glob("*.py")):
        said = re.search(r"([\d.]+e9) x (\d+) / (\d+) ranks =\s+([\d.]+) GiB", path.read_text())
        if said:
            num_said += 1
            parameters, in_bytes, ranks, gib = map(float, said.groups())
            of_qwen = needs(QWEN3_1_7B, load_recipe(str(path), c.GRPOConfig, c.SFTConfig))
            assert in_bytes == pytest.approx(of_qwen.states * GIB / of_qwen.num_trained + 4)
            assert gib == pytest.approx(parameters * in_bytes / ranks / 2**30, abs=0.5)
    assert num_said == 11


OF_LLAMA = {"sft_llama3_1_8b.py": LLAMA3_1_8B, "sft_llama3_1_8b_lora.py": LLAMA3_1_8B}
OF_QWEN3 = dict.fromkeys(("sft_qwen3_8b.py", "sft_qwen3_8b_lora.py", "grpo_qwen3_8b_lora.py"), QWEN3_8B)
OF_MOE = dict.fromkeys(("qwen3_30b_a3b_8x80.py", "qwen3_30b_a3b_8x141.py", "qwen3_30b_a3b_lora.py"), QWEN3_30B_A3B)
SAYING = OF_LLAMA | OF_QWEN3 | OF_MOE | {"sft_qwen3_1_7b.py": QWEN3_1_7B}
ON_141_GB = {"qwen3_30b_a3b_8x141.py", "qwen3_30b_a3b_lora.py"}


@pytest.mark.parametrize("name", SAYING)
def test_recipes_of_sft_lora_and_experts_say_what_a_trainer_holds(name):
    said = re.search(r"and the rest\s+about (\d+) GiB", (ROOT / "configs" / name).read_text())
    config = load_recipe(str(ROOT / "configs" / name), c.GRPOConfig, c.SFTConfig)
    gpu_gib = 139.8 if name in ON_141_GB else GPU_GIB
    of_recipe = decided(SAYING[name], config, gpu_gib)
    total = sum(of_recipe.training.values())
    assert float(said[1]) == round(total) and total < 0.94 * gpu_gib
    assert of_recipe.peak < gpu_gib  # with an engine that sleeps, if it has one
