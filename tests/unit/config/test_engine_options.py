"""vLLM's own arguments in the config: which may be set, which are refused and why, how a command line gives them."""

import dataclasses
import os
import pathlib
import types

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from grpo.config import GeneratorConfig, GRPOConfig
from grpo.config.engine_options import (
    ENGINE_SET_HERE,
    ONLINE_QUANTIZATION,
    RESHAPING,
    RESHAPING_ENGINE,
    SAMPLING_SET_HERE,
    TRUNCATING,
    argument_names,
)
from grpo.config.recipes import load
from grpo.roles.engine.vllm_engine import check_engine, import_vllm, in_vllms_types
from tests.unit.config.started import started

DEFAULT = str(pathlib.Path(__file__).parents[3] / "configs" / "qwen3_1_7b_gsm8k.py")
# SamplingParams that change no probability: `watermarking` only with the engine's watermark_config
HARMLESS = {"extra_args", "skip_reading_prefix_cache", "repetition_detection", "watermarking"}
SPECULATING = "--generator.engine speculative_config '{}' spec_method ngram --generator.sampling"
# What a flag sets, and what the message has behind its name
REFUSED = {
    "engine model a": "the folder of model.path",
    "engine enable_lora true": "merges LoRA's adapters",
    "engine logprobs_mode raw_logprobs": "the trainer needs",
    "engine max_num_seqs 0": "=0 must be a whole number, at least 1",
    "engine kv_cache_memory_bytes 2G": "='2G' must be a whole number",
    "engine block_sise 16": "vLLM's EngineArgs .* no argument .* .did you mean block_size",
    "engine quantization fp8": "='fp8' expects a checkpoint that is quantized already",
    "sampling n 2": "use group_size",
    "sampling logprobs 5": "takes token ids",
    "sampling mintokens 3": "vLLM's SamplingParams .* no argument .* .did you mean min_tokens",
    "sampling _eos_token_id 3": "vLLM's SamplingParams has no argument",
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_would_break_a_run_is_refused_with_the_reason(option):
    table, name, _ = option.split()
    with pytest.raises(ValueError, match=f"^generator.{table} {name}.*{REFUSED[option]}"):
        started(f"--generator.{option}")


@pytest.mark.parametrize("ignored", ["logit_bias '{\"5\":1}'", "min_p 0.1", "top_p 0.9"])
def test_what_vllm_would_silently_ignore_is_refused(ignored):
    started(SPECULATING)
    with pytest.raises(ValueError, match="vLLM ignores min_p and logit_bias"):
        started(f"{SPECULATING} {ignored}")


@pytest.mark.parametrize(
    "options, way_out, others",
    [
        ({"quantization": "fp8_per_tensor"}, "quantization .*leave it out", (Qwen3Config, False)),
        # on a CPU vLLM ends by signal 11
        ({"enable_expert_parallel": True}, "enable_expert_parallel needs a GPU", (Qwen3MoeConfig, True)),
    ],
)
def test_what_a_mixture_of_experts_cannot_have_is_refused(options, way_out, others):
    engine = GeneratorConfig(engine=options)
    with pytest.raises(ValueError, match=f"^generator.engine {way_out}"):
        check_engine(engine, Qwen3MoeConfig(head_dim=64), on_gpu=False)
    kind, on_gpu = others
    check_engine(engine, kind(head_dim=64), on_gpu=on_gpu)


def test_names_are_those_of_the_installed_vllm():
    """Read from the source text, they are the fields of the imported classes; so are all names that are listed."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import SamplingParams
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES
    from vllm.engine.arg_utils import EngineArgs

    engine = argument_names("vllm/engine/arg_utils.py", "EngineArgs")
    sampling = argument_names("vllm/sampling_params.py", "SamplingParams")
    assert set(engine) == {f.name for f in dataclasses.fields(EngineArgs) if not f.name.startswith("_")}
    assert set(sampling) == {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert set(engine) >= {*" ".join(ENGINE_SET_HERE.values()).split()}
    assert set(sampling) >= {*" ".join(SAMPLING_SET_HERE.values()).split(), *TRUNCATING}
    assert set(ONLINE_QUANT_SHORTHAND_NAMES) >= set(ONLINE_QUANTIZATION)
    assert set(engine) >= {*RESHAPING_ENGINE}


def test_nothing_that_vllm_can_do_to_a_sample_is_unknown():
    """A new version's option would otherwise be taken for one that leaves the probabilities as they are."""
    sampling = argument_names("vllm/sampling_params.py", "SamplingParams")
    set_here = " ".join(SAMPLING_SET_HERE.values()).split()
    assert {*sampling} == {*set_here, *RESHAPING, *HARMLESS}


def test_values_are_json_where_they_parse_and_else_text():
    flags = "--generator.engine quantization fp8_per_tensor block_size 32 async_scheduling false "
    flags += 'max_num_batched_tokens None watermark 0.01 speculative_config {"method":"ngram"} '
    flags += '--generator.sampling bad_words ["a","b"] min_tokens 8'
    config = load(GRPOConfig, DEFAULT, flags.split())
    assert config.generator.engine == {
        "quantization": "fp8_per_tensor",
        "block_size": 32,
        "async_scheduling": False,
        "max_num_batched_tokens": None,
        "watermark": 0.01,
        "speculative_config": {"method": "ngram"},
    }
    assert config.generator.sampling == {"bad_words": ["a", "b"], "min_tokens": 8}


def test_sampling_values_from_json_get_vllms_types():
    """JSON has no numbers as names and no classes; a value that does not fit is one line."""
    options = {"logit_bias": {"5": 1}, "structured_outputs": {"choice": ["a", "b"]}, "min_tokens": 3}
    converted = in_vllms_types(options)
    assert converted["logit_bias"] == {5: 1.0} and converted["min_tokens"] == 3
    assert converted["structured_outputs"].choice == ["a", "b"]
    assert in_vllms_types({}) == {}
    with pytest.raises(ValueError, match="^generator.sampling .*'many'.*: vLLM says: Expected `int`, got"):
        in_vllms_types({"min_tokens": "many"})


def test_another_version_of_vllm_is_refused(monkeypatch):
    monkeypatch.setattr("grpo.roles.engine.vllm_engine._set_environment", lambda device: None)
    monkeypatch.setattr("importlib.import_module", lambda name: types.SimpleNamespace(__version__="0.33.1+cpu"))
    with pytest.raises(
        RuntimeError, match=r"vLLM 0.33.1\+cpu is installed, and it must be 0.32.0: bash launch/setup.sh"
    ):
        import_vllm(types.SimpleNamespace(device=None))
