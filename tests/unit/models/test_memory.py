"""The memory arithmetic against sizes that are published and peaks that were measured, and the tables made with it."""

import dataclasses
import functools
import json
import pathlib
import re
import shlex

import pytest
import torch
import transformers

from grpo import config as c
from grpo.config.checks import describe_roles
from grpo.config.recipes import load, load_recipe
from grpo.models.experts import moe_config
from grpo.models.memory import (
    MARGIN_FRAC,
    MARGIN_GIB,
    Sizes,
    fit_engine,
    fit_trainer,
    generator_gib,
    largest_row,
    reference_gib,
    sizes_of,
    state_bytes,
    trainer_gib,
    trainer_moments,
    trainer_peak,
)
from grpo.run.command_line import DEFAULT_RECIPES
from tests.tiny_models import QWEN3_MOE, SMALL
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
def test_trainer_is_within_15_percent_of_what_was_measured_and_the_margin_covers_it(name):
    raw, num_trainers, fields, peak = MEASURED[name]
    config = c.SFTConfig(num_trainers=num_trainers, trainer=c.TrainerConfig(**fields))
    estimate = sum(trainer_gib(sizes(raw), config).values())
    assert estimate == pytest.approx(peak, rel=0.15)
    assert peak <= estimate * (1 + MARGIN_FRAC) + MARGIN_GIB


def test_parts_of_a_trainer_by_hand():
    """Qwen3-1.7B on 2 trainers: 1.72e9 x 16 / 2 = 12.8 GiB; 4096 x 151936 logits, which exist twice in 2 bytes; the
    gradients of the head, 151936 x 2048 x 4, and of a block; of each token and block the input 2048, attention's output
    2048, and half of what the linear layers give, 2 x 2048 + 2 x 1024 + 2 x 6144 + 2048; of one block 1.85 times that.
    """
    parts = trainer_gib(sizes(QWEN3_1_7B), config_of("--roles.num-trainers", 2))
    assert parts["weights, gradients and moments"] == pytest.approx(1_720_574_976 * 16 / 2 / 2**30)
    rounded = trainer_gib(sizes(QWEN3_1_7B), config_of("--roles.num-trainers", 2, "--trainer.moments", "bfloat16"))
    assert rounded["weights, gradients and moments"] == pytest.approx(1_720_574_976 * 12 / 2 / 2**30)
    assert parts["logits"] == pytest.approx(4096 * 151936 * 2 * 2 / 2**30)
    eager = trainer_gib(sizes(QWEN3_1_7B), config_of("--roles.num-trainers", 2, "--trainer.no-compile"))
    assert eager["logits"] == pytest.approx(4096 * 151936 * (3 * 4 + 2) / 2**30)
    outputs = 2 * 2048 + 2 * 1024 + 2 * 6144 + 2048
    values = 28 * (2048 + 2048 + outputs / 2) + 1.85 * outputs
    assert parts["activations"] == pytest.approx(values * 2 * 16384 / 2**30)
    # two blocks of 50.3e6 weights, their norms', the embeddings of 311e6 and the last norm, in bfloat16
    block = 2048 * (2048 + 1024 + 1024 + 2048 + 3 * 6144) + 2 * 2048 + 2 * 128
    assert parts["gathered weights"] == pytest.approx(2 * (2 * block + 151936 * 2048 + 2048) / 2**30)
    gradients = 6 * block + 4 * 151936 * 2048
    assert parts["gradients before they are shared out"] == pytest.approx(gradients / 2**30)
    assert "reference" not in parts
    with_kl = trainer_gib(sizes(QWEN3_1_7B), config_of("--roles.num-trainers", 2, "--algorithm.kl-coef", 0.1))
    assert with_kl["reference"] == pytest.approx(1_720_574_976 * 2 / 2 / 2**30)
    apart = config_of("--roles.num-trainers", 2, "--roles.num-references", 1, "--algorithm.kl-coef", 0.1)
    assert "reference" not in trainer_gib(sizes(QWEN3_1_7B), apart)
    hint = ("--algorithm.distill-coef", 1, "--algorithm.teacher-template", "{answer}", "--roles.num-trainers", 2)
    assert trainer_gib(sizes(QWEN3_1_7B), config_of(*hint))["reference"] == with_kl["reference"]
    by_itself = trainer_gib(sizes(QWEN3_1_7B), config_of(*hint, "--algorithm.teacher", "policy"))
    assert "reference" not in by_itself  # the policy is its own teacher
    weights, logits = pytest.approx(1_720_574_976 * 2 / 2**30), pytest.approx(4096 * 151936 * 4 / 2**30)
    at_work = pytest.approx(1.85 * outputs * 2 * 16384 / 2**30)
    forward = {"gathered weights": 0, "logits": logits, "activations": at_work}  # a single rank gathers nothing
    assert reference_gib(sizes(QWEN3_1_7B), apart) == {"weights": weights} | forward

    larger = dataclasses.replace(sizes(QWEN3_1_7B), reference=sizes(QWEN3_8B))  # a teacher
    assert trainer_gib(larger, config_of(*hint))["reference"] == pytest.approx(8_190_735_360 * 2 / 2 / 2**30)
    assert reference_gib(larger, apart) == reference_gib(sizes(QWEN3_8B), apart)


def test_a_step_that_fills_no_micro_batch_needs_less():
    """2 prompts x 4 completions of at most 100 + 28 tokens are 1,024, and 8 examples of 128 too, where 16,384 may be.

    Held-out examples may fill a micro-batch all the same.
    """
    small = ("--prompts-per-step", 2, "--group-size", 4, "--data.max-prompt-tokens", 100)
    small += ("--generator.max-completion-tokens", 28)
    examples = c.SFTConfig(sequences_per_step=8, max_sequence_tokens=128)
    validated = dataclasses.replace(examples, validation=c.ValidationConfig(interval=1))
    assert [largest_row(config) for config in (config_of(*small), examples)] == [1024, 1024]
    assert [largest_row(config) for config in (config_of(), validated)] == [16384, 16384]
    share = (
        trainer_gib(sizes(QWEN3_1_7B), config_of(*small))["activations"]
        / trainer_gib(sizes(QWEN3_1_7B), config_of())["activations"]
    )
    assert share == pytest.approx(1024 / 16384)


def test_checkpointing_is_the_fastest_that_fits():
    for raw, num_trainers, gpu_gib, kind in (
        (QWEN3_1_7B, 2, GPU_GIB, "none"),
        (QWEN3_8B, 4, GPU_GIB, "selective"),
        (QWEN3_8B, 4, 40, "full"),  # nothing fits
        (QWEN3_8B, 4, None, "none"),  # a CPU
    ):
        config = config_of("--roles.num-trainers", num_trainers)
        decided = fit_trainer(sizes(raw), config, gpu_gib)
        assert decided.trainer.activation_checkpointing == kind
        assert fit_trainer(sizes(raw), decided, 1) == decided


def test_parts_of_a_trainer_with_lora_by_hand():
    """Qwen3-8B, rank 16: of each block q and o 4096 + 4096, k and v 4096 + 1024, three of 4096 + 12288; 36 blocks."""
    flags = ("--roles.colocated", "--roles.num-trainers", 1, "--algorithm.kl-coef", 0.1, "--trainer.lora-rank", 16)
    parts = trainer_gib(sizes(QWEN3_8B), config_of(*flags))
    adapters = 36 * 16 * (2 * 8192 + 2 * 5120 + 3 * 16384)
    assert adapters == 43_646_976
    assert parts["frozen weights"] == pytest.approx(8_190_735_360 * 2 / 2**30)
    assert parts["adapters, gradients and moments"] == pytest.approx(adapters * 16 / 2**30)
    assert "weights, gradients and moments" not in parts and "reference" not in parts
    other = trainer_gib(sizes(QWEN3_8B), config_of(*flags, "--model.reference-path", "another"))
    assert other["reference"] == pytest.approx(8_190_735_360 * 2 / 2**30)
    few = trainer_gib(sizes(QWEN3_8B), config_of(*flags, "--trainer.lora-targets", "q_proj", "v_proj"))
    assert few["adapters, gradients and moments"] == pytest.approx(36 * 16 * (8192 + 5120) * 16 / 2**30)


def test_checkpointing_and_tensor_parallelism_save_memory():
    def activations(*flags: str) -> float:
        return trainer_gib(sizes(QWEN2_5_7B), config_of(*flags))["activations"]

    # torchtitan keeps the biased q 3584, k 512, v 512, then o 3584, up 18944; attention's output, the input: 3584 each
    of_one_block = activations() / 28
    assert activations() == pytest.approx(34304 * 2 * 28 * 16384 / 2**30 + 1.9 * of_one_block, rel=0.2)
    assert activations("--trainer.tensor-parallel", "2") == activations() / 2
    full, none = (activations("--trainer.activation-checkpointing", kind) for kind in ("full", "none"))
    assert full < activations() / 4 and none > 1.5 * activations()
    # x, x + o 3584 each, attention's output 3584, q and k twice 3584 + 512, v 512, four of 18944
    assert none == pytest.approx((3 * 3584 + 2 * 4096 + 512 + 4 * 18944) * 2 * 29 * 16384 / 2**30, rel=0.1)
    # what goes through adapters is computed again
    few, all_targets = (("--trainer.lora-rank", 16, *more) for more in (("--trainer.lora-targets", "q_proj"), ()))
    assert activations(*all_targets) < activations(*few) < activations()


def test_parts_of_a_mixture_of_experts_by_hand():
    """Qwen3-30B-A3B on 8 trainers, all blocks computed again: the states and what is gathered have all 128 experts, a
    token's activations those of 8. Of a block 2048 x (2 x 4096 + 2 x 512 + 128 + 3 x 128 x 768) + two norms of 2048 and
    two of 128; its gradients in 2 bytes, and in 4 to be summed.
    """
    block = 2048 * (2 * 4096 + 2 * 512 + 128 + 3 * 128 * 768) + 2 * 2048 + 2 * 128
    for tokens, total in (8192, 57), (16384, 61), (32768, 70):
        flags = "--roles.num-trainers", 8, "--trainer.moments", "bfloat16", "--trainer.micro-batch-tokens", tokens
        flags += "--trainer.activation-checkpointing", "full", "--trainer.logprob-chunk-tokens", 2048
        parts = trainer_gib(sizes(QWEN3_30B_A3B), config_of(*flags))
        assert parts["weights, gradients and moments"] == pytest.approx(30_532_122_624 * 12 / 8 / 2**30)
        assert parts["gathered weights"] == pytest.approx(2 * (2 * block + 2 * 151936 * 2048 + 2048) / 2**30)
        assert parts["gradients before they are shared out"] == pytest.approx((6 * block + 4 * 151936 * 2048) / 2**30)
        # inputs of 48 blocks; of one its input and the sum after attention, q 4096 and k 512 twice, v, attention's
        # output; the rows' inputs in 2 bytes and outputs in 4, four of the width; the scores in 4
        attention = 2 * 2048 + 2 * (4096 + 512) + 512 + 4096
        bytes_of_a_token = 2 * (48 * 2048 + attention) + 8 * (2048 * (2 + 4) + 4 * 768 * 2) + 128 * 4
        assert parts["activations"] == pytest.approx(tokens * bytes_of_a_token / 2**30, rel=0.1)
        assert sum(parts.values()) == pytest.approx(total, rel=0.1)  # by estimates made before


def test_what_experts_keep_is_what_torch_saves():
    """A tiny mixture without its input and weights, and the difference between it and dense blocks of width 1."""
    config = c.SFTConfig(trainer=c.TrainerConfig(activation_checkpointing="none"))
    raw = QWEN3_1_7B | SMALL | QWEN3_MOE
    mixture, dense = (trainer_gib(sizes(r), config)["activations"] for r in (raw, raw | DENSE))
    num_blocks = raw["num_hidden_layers"] + 1  # and one at work
    of_a_token = (mixture - dense) * 2**30 / config.trainer.micro_batch_tokens / num_blocks
    hf = transformers.AutoConfig.for_model(**raw)
    module = moe_config(hf).build().bfloat16()
    x_BTD = torch.randn(1, 512, 64, dtype=torch.bfloat16, requires_grad=True)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(x_BTD)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    for other in (x_BTD, *module.parameters()):
        storages.pop(other.untyped_storage().data_ptr(), None)
    assert of_a_token == pytest.approx(sum(storages.values()) / 512, rel=0.2)


def test_generator_by_hand():
    """Llama-3.1-8B: 2 bytes a weight; a token's cache is 2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB."""
    parts = generator_gib(
        sizes(LLAMA3_1_8B), config_of()
    )  # 512 completions on 4 engines of at most 256, 1536 tokens each
    assert parts["weights"] == pytest.approx(2 * 8_030_261_248 / 2**30)
    assert parts["KV cache, if all run at full length"] == pytest.approx(128 * 128 * 1536 / 2**20)
    halves = generator_gib(sizes(LLAMA3_1_8B), config_of("--generator.tensor-parallel", "2"))
    assert halves["weights"] == parts["weights"] / 2
    # two engines have 256 completions each, and share their cache
    assert halves["KV cache, if all run at full length"] == parts["KV cache, if all run at full length"]


def test_the_cache_of_a_window_holds_no_more_than_the_window():
    """Mistral-7B-v0.1: 128 KiB a token as Llama-3.1-8B, 4,096 tokens of 6,144. Gemma-3-1B: 1 KiB a token and layer,
    512 tokens in 22 layers and 6,144 in 4. 128 sequences each.
    """
    lengths = "--data.max-prompt-tokens", 4096, "--generator.max-completion-tokens", 2048
    for raw, kib_of_a_sequence in (MISTRAL_7B_V0_1, 128 * 4096), (GEMMA3_1B, 22 * 512 + 4 * 6144):
        parts = generator_gib(sizes(raw), config_of(*lengths))
        assert parts["KV cache, if all run at full length"] == pytest.approx(128 * kib_of_a_sequence / 2**20)


def test_states_take_the_place_of_a_cache_and_what_a_layer_computes_with_them_counts_once():
    """Qwen3.5's text, 6 layers of 24 with attention: a token's cache is 2 x 6 x 2 heads x 256 x 2 bytes = 12 KiB. The
    18 others have 16 heads of 128 x 128 states of 4 bytes, 1 MiB each. 128 sequences of 1,536 tokens.

    A layer with states computes with 160 bytes for each of 16 x 128 values and 16,384 tokens.
    """
    parts = generator_gib(sizes(QWEN3_5_TEXT), config_of())
    assert parts["KV cache, if all run at full length"] == pytest.approx(128 * (12 * 1536 / 1024 + 18) / 1024)
    full = config_of("--roles.num-trainers", 2, "--trainer.activation-checkpointing", "full")
    # of a block with attention: query with gate, key, value, output; the feed-forward layer's three
    outputs = 2 * 8 * 256 + 2 * 2 * 256 + 1024 + 2 * 3584 + 1024
    block = 2.8 * outputs * 2 + 24 * 1024 * 2
    activations = trainer_gib(sizes(QWEN3_5_TEXT), full)["activations"]
    assert activations == pytest.approx(16384 * (block + 160 * 16 * 128) / 2**30)


# Flags, sequences that an engine gets, GiB of the GPU -> how many it decodes at once. Qwen3-1.7B: a token's cache is
# 2 x 28 layers x 8 heads x 128 x 2 bytes = 112 KiB, 1536 tokens 168 MiB, half of them 84; weights are 3.2 GiB, 3 are
# left alone.
AT_ONCE = {
    "all": ([], 128, 80, 128),
    "more than vLLM takes by itself": ([], 5000, 800, 1024),
    "as many as 68 - 6.2 GiB hold": ([], 1000, 80, 753),
    "as many as 32 - 6.2 GiB hold": (["--generator.gpu-memory-utilization", 0.4], 512, 80, 314),
    "as many as 70 GiB hold": (["--generator.engine", "kv_cache_memory_bytes", 70 * 2**30], 1000, 80, 853),
    "no fewer than 256 for a small cache": ([], 512, 16, 256),
    "of twice the length": (["--generator.max-completion-tokens", 2560], 512, 80, 376),
    "two ranks share weights and cache": (["--generator.tensor-parallel", 2], 2000, 40, 716),
    "a token of each in a step": (["--generator.engine", "max_num_batched_tokens", 300], 512, 80, 300),
    "a CPU's 336 MiB, two sequences": ([], 512, None, 256),
    "what the user says": (["--generator.engine", "max_num_seqs", 700], 512, 16, 700),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_an_engine_decodes_what_it_gets_as_far_as_its_cache_goes(name):
    flags, num_asked, gpu_gib, expected = AT_ONCE[name]
    decided = fit_engine(sizes(QWEN3_1_7B), config_of(*flags), num_asked, gpu_gib)
    assert decided.generator.max_num_seqs == decided.generator.engine["max_num_seqs"] == expected


@pytest.mark.parametrize("num_asked, tokens, mib", [(16, 16, 64), (64, 16, 112), (512, 16, 256), (512, 1536, 336)])
def test_an_engine_on_a_cpu_has_a_cache_for_its_sequences(num_asked, tokens, mib):
    """Between 64 and 256 MiB, and room for two: 112 KiB a token."""
    config = config_of("--data.max-prompt-tokens", tokens // 2, "--generator.max-completion-tokens", tokens // 2)
    decided = fit_engine(sizes(QWEN3_1_7B), config, num_asked, gpu_gib=None)
    assert decided.generator.engine["kv_cache_memory_bytes"] == mib * 2**20
    named = c.change(config, {"generator.engine": {"kv_cache_memory_bytes": 5, "max_num_seqs": 3}})
    assert fit_engine(sizes(QWEN3_1_7B), named, num_asked, gpu_gib=None) == named


# Flags, sequences that an engine gets, GiB of the GPU -> MiB of KV cache, None for all that vLLM's share leaves
CACHES = {
    "128 sequences of 168 MiB": ([], 128, 80, 128 * 168),
    "as many as are decoded at once": (["--generator.engine", "max_num_seqs", 8], 512, 80, 8 * 168),
    "short sequences": (["--generator.max-completion-tokens", 16, "--data.max-prompt-tokens", 16], 8, 80, 1024),
    "half of the room": ([], 188, 80, 188 * 168),
    "more than half of 61.8 GiB": ([], 189, 80, None),
    "two ranks share a cache": (["--generator.tensor-parallel", 2], 128, 80, 128 * 84),
    "conversations, which wait for tools": (["--environment.tools", "calculator"], 128, 80, None),
    "drafts": (["--generator.engine", "spec_method", "ngram"], 128, 80, None),
}


@pytest.mark.parametrize("name", CACHES)
def test_an_engine_on_a_gpu_takes_the_cache_that_its_sequences_need(name):
    flags, num_asked, gpu_gib, mib = CACHES[name]
    decided = fit_engine(sizes(QWEN3_1_7B), config_of(*flags), num_asked, gpu_gib)
    assert decided.generator.engine.get("kv_cache_memory_bytes") == (mib and mib * 2**20)


@pytest.mark.parametrize("raw", [MISTRAL_7B_V0_1, QWEN3_5_TEXT], ids=["windows", "states"])
def test_windows_and_states_leave_the_cache_to_vllm(raw):
    assert "kv_cache_memory_bytes" not in fit_engine(sizes(raw), config_of(), 1, 80).generator.engine


def test_a_trainer_beside_a_small_cache_has_the_rest_of_the_gpu():
    """128 sequences of 168 MiB and weights of 3.2 GiB beside it, not 70 % of 80 GiB, and 3 GiB to compute."""
    flags = "--roles.colocated", "--roles.num-trainers", 1, "--generator.gpu-memory-utilization", 0.7
    config = config_of(*flags)
    decided = fit_engine(sizes(QWEN3_1_7B), config, 128, 80)
    of_share = trainer_moments(sizes(QWEN3_1_7B), config, 80)["while it trains"]["an engine"]
    of_cache = trainer_moments(sizes(QWEN3_1_7B), decided, 80)["while it trains"]["an engine"]
    assert of_share == pytest.approx(56)
    assert of_cache == pytest.approx(3.2 + 21 + 3, abs=0.1)


def test_sequences_that_engines_get_at_one_time():
    """64 prompts x 8; 256 held-out prompts of each set, greedy and then 8 samples each."""
    assert config_of().completions_at_once == 512 and config_of().num_engines == 4
    assert config_of("--sampling.carry-over", 16).completions_at_once == 640
    assert config_of("--evaluation.num-samples", 8).completions_at_once == 2048
    assert config_of("--evaluation.num-samples", 8, "--evaluation.interval", 0).completions_at_once == 512
    two_sets = config_of("--evaluation.sets", "a", "a.jsonl", "b", "b.jsonl", "--prompts-per-step", 32)
    assert two_sets.completions_at_once == 512 and two_sets.completions_per_step == 256
    decided = fit_engine(sizes(QWEN3_1_7B), config_of("--generator.gpu-memory-utilization", 0.2), 512, 80)
    of_two = generator_gib(sizes(QWEN3_1_7B), config_of("--roles.num-generators", 2, "--roles.num-trainers", 2))
    full_length = "KV cache, if all run at full length"
    assert generator_gib(sizes(QWEN3_1_7B), decided)[full_length] == pytest.approx(128 * 168 / 1024)
    assert of_two[full_length] == pytest.approx(256 * 168 / 1024)


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
        config = fit_trainer(sizes(QWEN3_1_7B), config, GPU_GIB)
        assert config.trainer.activation_checkpointing == "none"
        total = sum(trainer_gib(sizes(QWEN3_1_7B), config).values())
        assert float(trainer) == round(total, 1), gpus
        assert float(weights) == round(generator_gib(sizes(QWEN3_1_7B), config)["weights"], 1)
        assert trainer_peak(sizes(QWEN3_1_7B), config, GPU_GIB) == pytest.approx(total) and total < 74.5


def test_recipes_say_the_memory_of_their_weights():
    """`7.6e9 x 16 / 4 ranks =\n28 GiB` in a recipe's docstring is right."""
    of_moe = ("qwen3_30b_a3b_8x80.py", "qwen3_30b_a3b_8x141.py")
    of_sft = ("sft_llama3_1_8b.py", "sft_qwen3_8b.py", "sft_qwen3_1_7b.py")
    for name in (
        "qwen2_5_7b_gsm8k.py",
        "llama3_1_8b_gsm8k.py",
        "qwen3_8b_gsm8k.py",
        "qwen3_1_7b_gsm8k.py",
        *of_sft,
        *of_moe,
    ):
        said = re.search(
            r"([\d.]+e9) x (\d+) / (\d+) ranks =\s+([\d.]+) GiB", (ROOT / "configs" / name).read_text(), re.DOTALL
        )
        parameters, in_bytes, ranks, gib = map(float, said.groups())
        trainer = load_recipe(str(ROOT / "configs" / name), c.GRPOConfig, c.SFTConfig).trainer
        assert in_bytes == state_bytes(trainer) and gib == pytest.approx(
            parameters * in_bytes / ranks / 2**30, rel=0.02
        )


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
    config = fit_trainer(sizes(SAYING[name]), config, gpu_gib)
    total = sum(trainer_gib(sizes(SAYING[name]), config).values())
    assert float(said[1]) == round(total) and total < 0.94 * gpu_gib
    assert trainer_peak(sizes(SAYING[name]), config, gpu_gib) < gpu_gib  # with an engine that sleeps, if it has one


def test_lora_of_8b_colocated_fits_one_gpu_because_the_engine_sleeps():
    """79.2 GiB as CUDA has them: while the engine samples, the trainer holds 15.3 + 0.7 GiB."""
    config = load_recipe(str(ROOT / "configs" / "grpo_qwen3_8b_lora.py"), c.GRPOConfig)
    config = fit_trainer(sizes(QWEN3_8B), config, GPU_GIB)
    engine, trainer = 79.2 * config.generator.gpu_memory_utilization, trainer_gib(sizes(QWEN3_8B), config)
    at_rest = trainer["frozen weights"] + trainer["adapters, gradients and moments"]
    assert config.generator.sleep and "reference" not in trainer
    assert sum(trainer.values()) + engine > 79.2 > 70 > at_rest + engine
    assert engine - generator_gib(sizes(QWEN3_8B), config)["weights"] == pytest.approx(32, abs=0.5)


def test_a_reference_stays_while_the_engine_samples():
    """1.72 billion parameters: 12 bytes each of weight and moments, 2 of the reference; the engine has 72 GiB."""
    flags = "--roles.colocated", "--roles.num-trainers", 1, "--roles.num-references", 0, "--generator.sleep"
    flags += "--generator.gpu-memory-utilization", 0.9, "--trainer.activation-checkpointing", "full"
    alone, beside = (
        trainer_peak(sizes(QWEN3_1_7B), config_of(*flags, "--algorithm.kl-coef", kl_coef), 80) for kl_coef in (0, 0.1)
    )
    assert alone == pytest.approx(72 + 1_720_574_976 * 12 / 2**30)
    assert beside - alone == pytest.approx(1_720_574_976 * 2 / 2**30)
