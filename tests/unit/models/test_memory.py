"""The memory arithmetic against sizes that are published and peaks that were measured, and the tables made with it."""

import dataclasses
import functools
import json
import pathlib
import re
import shlex

import pytest
import transformers

from grpo import config as c
from grpo.config.checks import describe_roles
from grpo.config.recipes import load, load_recipe
from grpo.run.command_line import DEFAULT_RECIPES
from grpo.run.machine import (
    MARGIN_FRAC,
    MARGIN_GIB,
    Device,
    Sizes,
    decide,
    engine_weights_gib,
    fit_engine,
    largest_row,
    reference_gib,
    sequence_gib,
    sizes_of,
    trained_bytes,
    trained_parameters,
    trainer_gib,
    trainer_moments,
    trainer_peak,
)
from tests.unit.models.test_hf_folder import (
    GEMMA3_1B,
    GRANITE3_2B,
    LLAMA3_1_8B,
    MISTRAL_7B_V0_1,
    MISTRAL_7B_V0_3,
    OLMO3_7B,
    QWEN2_5_7B,
    QWEN3_1_7B,
    QWEN3_5_TEXT,
    SMOLLM3_3B,
)
from tests.unit.test_readme import table

ROOT = pathlib.Path(__file__).parents[3]
DENSE = {"model_type": "qwen3", "intermediate_size": 1}
GPU_GIB = 79.2  # of an H100, of 80 GB
QWEN3_0_6B = QWEN3_1_7B | {"hidden_size": 1024, "intermediate_size": 3072}
QWEN3_8B = QWEN3_1_7B | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}
QWEN3_8B |= {"num_hidden_layers": 36, "tie_word_embeddings": False}
QWEN3_30B_A3B = QWEN3_1_7B | {"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_attention_heads": 32}
QWEN3_30B_A3B |= {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
QWEN3_30B_A3B |= {"norm_topk_prob": True, "tie_word_embeddings": False}
QWEN3_4B = QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}


def sizes(raw: dict) -> Sizes:
    return _sizes(json.dumps(raw))


@functools.cache
def _sizes(raw: str) -> Sizes:
    return sizes_of(transformers.AutoConfig.for_model(**json.loads(raw)))


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
    "Granite-3.1-2B": (GRANITE3_2B, 2_533_531_648),
    "Mistral-7B-v0.3": (MISTRAL_7B_V0_3, 7_248_023_552),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters_is_the_published_one(name):
    raw, expected = PUBLISHED[name]
    assert sizes(raw).parameters == expected


def config_of(*flags: str) -> c.GRPOConfig:
    return load(c.GRPOConfig, DEFAULT_RECIPES[c.GRPOConfig], [str(flag) for flag in flags])


# Peaks in torch (configs/SPEED.md; the 8B one on two of four H200), GiB, with micro-batches of 16,384 tokens and
# chunks of 4,096. The last two are of earlier code: off them goes the table of positions that each layer had of its own
# then. All but Qwen3-4B's are of a time when a trained LM head held its last chunk's gradient for too long (1.2 GiB).
OLD_TABLE = 40960 * 256 * 4 / 2**30
LORA_8B = {"activation_checkpointing": "none", "lora_rank": 16, "micro_batch_tokens": 8192}
MEASURED = {
    "Qwen3-1.7B, nothing recomputed": (QWEN3_1_7B, 1, {"activation_checkpointing": "none"}, 68.3),
    "Qwen3-1.7B, logits": (QWEN3_1_7B, 1, {"activation_checkpointing": "logits"}, 66.0),
    "Qwen3-1.7B, LoRA": (QWEN3_1_7B, 1, {"activation_checkpointing": "none", "lora_rank": 16}, 39.0),
    "Qwen3-1.7B, selective": (QWEN3_1_7B, 1, {"activation_checkpointing": "selective"}, 46.3),
    "Qwen3-4B, selective": (QWEN3_4B, 1, {"activation_checkpointing": "selective"}, 95.2),
    "Qwen3-4B, full": (QWEN3_4B, 1, {"activation_checkpointing": "full", "micro_batch_tokens": 8192}, 72.8),
    "Qwen3-4B, LoRA": (QWEN3_4B, 1, {"activation_checkpointing": "none", "lora_rank": 16}, 71.0),
    "Qwen3-8B, LoRA": (QWEN3_8B, 1, LORA_8B, 58.8),
    "Qwen3-1.7B, FSDP 2": (QWEN3_1_7B, 2, {}, 28.6 - 28 * OLD_TABLE),
    "Qwen3-8B, FSDP 2": (QWEN3_8B, 2, {}, 98 - 36 * OLD_TABLE),
}


@pytest.mark.parametrize("name", MEASURED)
def test_trainer_is_within_20_percent_of_what_was_measured_and_the_margin_covers_it(name):
    raw, num_trainers, fields, peak = MEASURED[name]
    config = c.SFTConfig(num_trainers=num_trainers, trainer=c.TrainerConfig(**fields))
    estimate = sum(trainer_gib(sizes(raw), config).values())
    assert estimate == pytest.approx(peak, rel=0.2)
    assert peak <= estimate * (1 + MARGIN_FRAC) + MARGIN_GIB


def test_parts_of_a_trainer_by_hand():
    """Qwen3-1.7B on 2 trainers: 1.72e9 x 16 / 2 = 12.8 GiB; 4096 x 151936 logits, which exist twice in 2 bytes; the
    gradients of the head, 151936 x 2048 x 4, and of a block; of each token and block twice the width 2048 and half of
    what the linear layers give, 2 x 2048 + 2 x 1024 + 2 x 6144 + 2048; of one block 1.85 times that.
    """
    two = ("--roles.num-trainers", 2)
    parts = trainer_gib(sizes(QWEN3_1_7B), config_of(*two))
    outputs = 2 * 2048 + 2 * 1024 + 2 * 6144 + 2048
    # two blocks of 50.3e6 weights, their norms', the embeddings of 311e6 and the last norm, in bfloat16
    block = 2048 * (2048 + 1024 + 1024 + 2048 + 3 * 6144) + 2 * 2048 + 2 * 128
    by_hand = {
        "states": 1_720_574_976 * 16 / 2,
        "gradients before they are shared out": 6 * block + 4 * 151936 * 2048,
        "gathered weights": 2 * (2 * block + 151936 * 2048 + 2048),
        "logits": 4096 * 151936 * 2 * 2,
        "activations": (28 * (2 * 2048 + outputs / 2) + 1.85 * outputs) * 2 * 16384,
    }
    assert parts == pytest.approx({part: size / 2**30 for part, size in by_hand.items()})

    def changed(part: str, *flags: object) -> float | None:
        return trainer_gib(sizes(QWEN3_1_7B), config_of(*two, *flags)).get(part)

    assert changed("states", "--trainer.moments", "bfloat16") == pytest.approx(parts["states"] * 12 / 16)
    assert changed("logits", "--trainer.no-compile") == pytest.approx(parts["logits"] * (3 * 4 + 2) / 4)
    frozen = pytest.approx(1_720_574_976 * 2 / 2 / 2**30)
    hint = ("--algorithm.distill-coef", 1, "--algorithm.teacher-template", "{answer}")
    assert changed("reference", "--algorithm.kl-coef", 0.1) == changed("reference", *hint) == frozen
    assert changed("reference", *hint, "--algorithm.teacher", "policy") is None  # the policy is its own teacher
    apart = ("--roles.num-references", 1, "--algorithm.kl-coef", 0.1)
    assert changed("reference", *apart) is None
    # a single rank gathers nothing
    forward = {"gathered weights": 0, "logits": parts["logits"], "activations": 1.85 * outputs * 2 * 16384 / 2**30}
    weights = {"reference": 1_720_574_976 * 2 / 2**30}
    assert reference_gib(sizes(QWEN3_1_7B), config_of(*two, *apart)) == pytest.approx(weights | forward)
    larger = dataclasses.replace(sizes(QWEN3_1_7B), reference=sizes(QWEN3_8B))  # a teacher
    assert trainer_gib(larger, config_of(*two, *hint))["reference"] == pytest.approx(8_190_735_360 * 2 / 2 / 2**30)
    assert reference_gib(larger, config_of(*apart)) == reference_gib(sizes(QWEN3_8B), config_of(*apart))
    judged = dataclasses.replace(sizes(QWEN3_1_7B), reward_model=sizes(QWEN3_8B))
    assert trainer_gib(judged, config_of(*two))["reward model"] == pytest.approx(8_190_735_360 * 2 / 2 / 2**30)
    alone = reference_gib(judged, config_of("--roles.num-references", 2, "--reward.model", "a/judge"))
    assert alone["reward model"] == pytest.approx(8_190_735_360 * 2 / 2 / 2**30) and "reference" not in alone


def test_a_step_that_fills_no_micro_batch_needs_less():
    """2 prompts x 4 completions of at most 100 + 28 tokens are 1,024, and 8 examples of 128 too, where 16,384 may be.

    Held-out examples may fill a micro-batch all the same.
    """
    small = config_of("--prompts-per-step", 2, "--group-size", 4, "--data.max-prompt-tokens", 100)
    small = c.change(small, {"generator.max_completion_tokens": 28})
    examples = c.SFTConfig(sequences_per_step=8, max_sequence_tokens=128)
    validated = c.change(examples, {"validation.interval": 1})
    rows = [largest_row(config) for config in (small, examples, config_of(), validated)]
    assert rows == [1024, 1024, 16384, 16384]
    of_small, of_full = (trainer_gib(sizes(QWEN3_1_7B), config)["activations"] for config in (small, config_of()))
    assert of_small / of_full == pytest.approx(1024 / 16384)


def decided(raw: dict, config: c.GRPOConfig | c.SFTConfig, gpu_gib: float | None) -> c.GRPOConfig | c.SFTConfig:
    """The config with all that it leaves to GPUs of that size, or to a CPU."""
    device = Device(8, "GPU", gpu_gib) if gpu_gib else Device(0, "CPU", 20)
    return decide(sizes(raw), config, config.roles, device)[0]


def test_checkpointing_is_the_fastest_that_fits():
    for raw, num_trainers, gpu_gib, kind in (
        (QWEN3_1_7B, 2, GPU_GIB, "none"),
        (QWEN3_8B, 4, GPU_GIB, "selective"),
        (QWEN3_8B, 4, 40, "full"),  # nothing fits
        (QWEN3_8B, 4, None, "none"),  # a CPU
    ):
        config = decided(raw, config_of("--roles.num-trainers", num_trainers), gpu_gib)
        assert config.trainer.activation_checkpointing == kind
        assert decided(raw, config, 1) == config


def test_parts_of_a_trainer_with_lora_by_hand():
    """Qwen3-8B, rank 16: of each block q and o 4096 + 4096, k and v 4096 + 1024, three of 4096 + 12288; 36 blocks."""
    lora = ("--roles.colocated", "--roles.num-trainers", 1, "--algorithm.kl-coef", 0.1, "--trainer.lora-rank", 16)

    def parts(*flags: object) -> dict[str, float]:
        return trainer_gib(sizes(QWEN3_8B), config_of(*lora, *flags))

    assert parts()["frozen weights"] == pytest.approx(8_190_735_360 * 2 / 2**30)
    assert parts()["states"] == pytest.approx(36 * 16 * (2 * 8192 + 2 * 5120 + 3 * 16384) * 16 / 2**30)
    assert "reference" not in parts()
    assert parts("--model.reference-path", "a/b")["reference"] == pytest.approx(8_190_735_360 * 2 / 2**30)
    few = parts("--trainer.lora-targets", "q_proj", "v_proj")
    assert few["states"] == pytest.approx(36 * 16 * (8192 + 5120) * 16 / 2**30)


def test_checkpointing_and_tensor_parallelism_save_memory():
    """Qwen2.5-7B: x, x + o 3584 each, attention's output 3584, q and k twice 3584 + 512, v 512, four of 18944."""

    def activations(*flags: object) -> float:
        return trainer_gib(sizes(QWEN2_5_7B), config_of(*flags))["activations"]

    full, none = (activations("--trainer.activation-checkpointing", kind) for kind in ("full", "none"))
    assert full < activations() / 4 and activations() < none / 1.5
    assert none == pytest.approx((3 * 3584 + 2 * 4096 + 512 + 4 * 18944) * 2 * 29 * 16384 / 2**30, rel=0.1)
    assert activations("--trainer.tensor-parallel", "2") == activations() / 2
    assert activations("--trainer.lora-rank", 16) < activations()  # what goes through adapters is computed again


def test_parts_of_a_mixture_of_experts_by_hand():
    """Qwen3-30B-A3B on 8 trainers, all blocks computed again: the states and what is gathered have all 128 experts, a
    token's activations those of 8. Of a block 2048 x (2 x 4096 + 2 x 512 + 128 + 3 x 128 x 768) + two norms of 2048 and
    two of 128. Activations: inputs of 48 blocks; of one its input and the sum after attention, q 4096 and k 512 twice,
    v, attention's output; the rows' inputs in 2 bytes and outputs in 4, four of the width; the scores in 4.
    """
    flags = ("--roles.num-trainers", 8, "--trainer.moments", "bfloat16", "--trainer.activation-checkpointing", "full")
    parts = trainer_gib(sizes(QWEN3_30B_A3B), config_of(*flags))
    block = 2048 * (2 * 4096 + 2 * 512 + 128 + 3 * 128 * 768) + 2 * 2048 + 2 * 128
    assert parts["states"] == pytest.approx(30_532_122_624 * 12 / 8 / 2**30)
    assert parts["gathered weights"] == pytest.approx(2 * (2 * block + 2 * 151936 * 2048 + 2048) / 2**30)
    attention = 2 * 2048 + 2 * (4096 + 512) + 512 + 4096
    bytes_of_a_token = 2 * (48 * 2048 + attention) + 8 * (2048 * (2 + 4) + 4 * 768 * 2) + 128 * 4
    assert parts["activations"] == pytest.approx(16384 * bytes_of_a_token / 2**30, rel=0.1)


def test_an_engine_by_hand():
    """Llama-3.1-8B: 2 bytes a weight; a token's cache is 2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB, in fp8
    half of it. Mistral-7B-v0.1 has as much of 4,096 tokens of 6,144, its window. Gemma-3-1B: 1 KiB a token and layer,
    512 tokens in 22 layers and 6,144 in 4.
    """
    two = config_of("--generator.tensor-parallel", "2")
    assert engine_weights_gib(sizes(LLAMA3_1_8B), config_of()) == pytest.approx(2 * 8_030_261_248 / 2**30)
    assert engine_weights_gib(sizes(LLAMA3_1_8B), two) == pytest.approx(8_030_261_248 / 2**30)
    long = config_of("--data.max-prompt-tokens", 4096, "--generator.max-completion-tokens", 2048)
    for raw, config, kib in (
        (LLAMA3_1_8B, config_of(), 128 * 1536),
        (LLAMA3_1_8B, two, 64 * 1536),
        (LLAMA3_1_8B, config_of("--generator.engine", "kv_cache_dtype", "fp8"), 64 * 1536),
        (MISTRAL_7B_V0_1, long, 128 * 4096),
        (GEMMA3_1B, long, 22 * 512 + 4 * 6144),
    ):
        assert sequence_gib(sizes(raw), config) == pytest.approx(kib / 2**20)


def test_states_take_the_place_of_a_cache_and_what_a_layer_computes_with_them_counts_once():
    """Qwen3.5's text, 6 layers of 24 with attention: a token's cache is 2 x 6 x 2 heads x 256 x 2 bytes = 12 KiB. The
    18 others have 16 heads of 128 x 128 states of 4 bytes, 1 MiB each. A sequence has 1,536 tokens.

    A layer with states computes with 160 bytes for each of 16 x 128 values and 16,384 tokens.
    """
    assert sequence_gib(sizes(QWEN3_5_TEXT), config_of()) == pytest.approx((12 * 1536 / 1024 + 18) / 1024)
    full = config_of("--roles.num-trainers", 2, "--trainer.activation-checkpointing", "full")
    # of a block with attention: query with gate, key, value, output; the feed-forward layer's three
    outputs = 2 * 8 * 256 + 2 * 2 * 256 + 1024 + 2 * 3584 + 1024
    block = 2.8 * outputs * 2 + 24 * 1024 * 2
    activations = trainer_gib(sizes(QWEN3_5_TEXT), full)["activations"]
    assert activations == pytest.approx(16384 * (block + 160 * 16 * 128) / 2**30)


# Flags, sequences that an engine gets, GiB of the GPU -> how many it decodes at once, and MiB of KV cache, None for all
# that vLLM's share leaves. Qwen3-1.7B: a token's cache is 2 x 28 layers x 8 heads x 128 x 2 bytes = 112 KiB, 1536
# tokens 168 MiB, half of them 84; weights are 3.2 GiB, 3 are left alone.
ENGINES = {
    "all, 128 of 168 MiB": ([], 128, 80, 128, 128 * 168),
    "more than vLLM takes by itself": ([], 5000, 800, 1024, 1024 * 168),
    "as many as 68 - 6.2 GiB hold": ([], 1000, 80, 753, None),
    "no fewer than 256 for a small cache": ([], 512, 16, 256, None),
    "of twice the length": (["--generator.max-completion-tokens", 2560], 512, 80, 376, None),
    "two ranks share weights and cache": (["--generator.tensor-parallel", 2], 2000, 40, 716, None),
    "a token of each in a step": (["--generator.engine", "max_num_batched_tokens", 300], 512, 80, 300, None),
    "short": (["--generator.max-completion-tokens", 16, "--data.max-prompt-tokens", 16], 8, 80, 8, 1024),
    "more than half of 61.8 GiB": ([], 189, 80, 189, None),
    "conversations, which wait for tools": (["--environment.tools", "python"], 128, 80, 128, None),
    "drafts": (["--generator.engine", "spec_method", "ngram"], 128, 80, 128, None),
    "a CPU, room for two": ([], 512, None, 256, 336),
    "a CPU, 112 KiB a token": (
        ["--generator.max-completion-tokens", 8, "--data.max-prompt-tokens", 8],
        64,
        None,
        64,
        112,
    ),
    "a CPU, no less than 64": (
        ["--generator.max-completion-tokens", 8, "--data.max-prompt-tokens", 8],
        16,
        None,
        16,
        64,
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_decodes_what_it_gets_with_the_cache_that_this_needs(name):
    flags, num_asked, gpu_gib, number, mib = ENGINES[name]
    engine = fit_engine(sizes(QWEN3_1_7B), config_of(*flags), num_asked, gpu_gib).generator.engine
    assert engine["max_num_seqs"] == number
    assert engine.get("kv_cache_memory_bytes") == (mib and mib * 2**20)


@pytest.mark.parametrize("gpu_gib", [80, None])
def test_an_engine_has_what_the_user_says(gpu_gib):
    named = c.change(config_of(), {"generator.engine": {"kv_cache_memory_bytes": 5, "max_num_seqs": 3}})
    assert fit_engine(sizes(QWEN3_1_7B), named, 512, gpu_gib) == named


@pytest.mark.parametrize("raw", [MISTRAL_7B_V0_1, QWEN3_5_TEXT], ids=["windows", "states"])
def test_windows_and_states_leave_the_cache_to_vllm(raw):
    assert "kv_cache_memory_bytes" not in fit_engine(sizes(raw), config_of(), 1, 80).generator.engine


def test_a_trainer_beside_a_small_cache_has_the_rest_of_the_gpu():
    """128 sequences of 168 MiB and weights of 3.2 GiB beside it, not 70 % of 80 GiB, and 3 GiB to compute."""
    flags = "--roles.colocated", "--roles.num-trainers", 1, "--generator.gpu-memory-utilization", 0.7
    config = config_of(*flags)
    decided = fit_engine(sizes(QWEN3_1_7B), config, 128, 80)
    of_share = trainer_moments(sizes(QWEN3_1_7B), config, 80)[""]["an engine"]
    of_cache = trainer_moments(sizes(QWEN3_1_7B), decided, 80)[""]["an engine"]
    assert of_share == pytest.approx(56)
    assert of_cache == pytest.approx(3.2 + 21 + 3, abs=0.1)


def test_sequences_that_engines_get_at_one_time():
    """64 prompts x 8; 256 held-out prompts of each set, greedy and then 8 samples each."""
    assert config_of().completions_at_once == 512 and config_of().num_engines == 4
    assert config_of("--sampling.carry-over", 16).completions_at_once == 640
    assert config_of("--evaluation.num-samples", 8).completions_at_once == 2048
    assert config_of("--evaluation.num-samples", 8, "--evaluation.interval", 0).completions_at_once == 512


def test_the_table_of_layouts_has_the_memory_and_fits():
    """Each trainer's and engine's GiB as the arithmetic gives them, within 80 GB (74.5 GiB)."""
    rows = table("GPUs")
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8]
    for gpus, roles, trainer, weights, command in rows:
        words = shlex.split(command.strip("`"))
        assert words[:3] == ["torchrun", f"--nproc_per_node={gpus}", "train_grpo.py"]
        config = config_of(*words[3:])
        assert config.num_ranks == int(gpus) and config.model.path == "Qwen/Qwen3-1.7B"
        for part in describe_roles(config.roles).split(" + ") if gpus != "1" else ():
            assert part in roles
        config = decided(QWEN3_1_7B, config, GPU_GIB)
        assert config.trainer.activation_checkpointing == "none"
        total = sum(trainer_gib(sizes(QWEN3_1_7B), config).values())
        assert float(trainer) == round(total, 1), gpus
        assert float(weights) == round(engine_weights_gib(sizes(QWEN3_1_7B), config), 1)
        assert trainer_peak(sizes(QWEN3_1_7B), config, GPU_GIB) == pytest.approx(total) and total < 74.5


def test_recipes_say_the_memory_of_their_weights():
    """`7.6e9 x 16 / 4 ranks =\n28 GiB` in a recipe's docstring is right."""
    num_said = 0
    for path in sorted((ROOT / "configs").glob("*.py")):
        said = re.search(r"([\d.]+e9) x (\d+) / (\d+) ranks =\s+([\d.]+) GiB", path.read_text())
        if said:
            num_said += 1
            parameters, in_bytes, ranks, gib = map(float, said.groups())
            trainer = load_recipe(str(path), c.GRPOConfig, c.SFTConfig).trainer
            qwen = sizes(QWEN3_1_7B)
            assert in_bytes == trained_bytes(qwen, trainer) / trained_parameters(qwen, trainer)
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
    config = decided(SAYING[name], config, gpu_gib)
    total = sum(trainer_gib(sizes(SAYING[name]), config).values())
    assert float(said[1]) == round(total) and total < 0.94 * gpu_gib
    assert trainer_peak(sizes(SAYING[name]), config, gpu_gib) < gpu_gib  # with an engine that sleeps, if it has one


def test_a_reference_stays_while_the_engine_samples():
    """1.72 billion parameters: 12 bytes each of weight and moments, 2 of the reference; the engine has 72 GiB."""
    flags = "--roles.colocated", "--roles.num-trainers", 1, "--roles.num-references", 0, "--generator.sleep"
    flags += "--generator.gpu-memory-utilization", 0.9, "--trainer.activation-checkpointing", "full"
    alone, beside = (
        trainer_peak(sizes(QWEN3_1_7B), config_of(*flags, "--algorithm.kl-coef", kl_coef), 80) for kl_coef in (0, 0.1)
    )
    assert alone == pytest.approx(72 + 1_720_574_976 * 12 / 2**30)
    assert beside - alone == pytest.approx(1_720_574_976 * 2 / 2**30)
