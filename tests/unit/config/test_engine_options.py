"""vLLM's own arguments in the config: which may be set, which are refused and why, how a command line gives them."""

import dataclasses
import os
import pathlib
import types

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from grpo.config import GeneratorConfig, GRPOConfig, change
from grpo.config.checks import validate
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

DEFAULT = str(pathlib.Path(__file__).parents[3] / "configs" / "qwen3_1_7b_gsm8k.py")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
# SamplingParams that change no probability: `watermarking` only with the engine's watermark_config
HARMLESS = {"extra_args", "skip_reading_prefix_cache", "repetition_detection", "watermarking"}
# (table, its entries, what the message has behind their names)
REFUSED = [
    ("engine", {"model": "a"}, "the folder of model.path"),
    ("engine", {"tensor_parallel_size": 2}, "use generator.tensor_parallel"),
    ("engine", {"enable_sleep_mode": True}, "use generator.sleep"),
    ("engine", {"enable_lora": True}, "merges LoRA's adapters"),
    ("engine", {"logprobs_mode": "raw_logprobs"}, "the trainer needs"),
    ("engine", {"moe_backend": "cutlass"}, "a weight sync writes experts where triton reads them"),
    ("engine", {"enable_return_routed_experts": True}, "nothing reads which experts"),
    ("engine", {"max_num_seqs": 0}, "=0 must be a whole number, at least 1"),
    ("engine", {"kv_cache_memory_bytes": "2G"}, "='2G' must be a whole number"),
    ("engine", {"block_sise": 16}, "vLLM's EngineArgs .* no argument .* .did you mean block_size"),
    ("engine", {"quantization": "fp8"}, "='fp8' expects a checkpoint that is quantized already"),
    ("sampling", {"n": 2}, "use group_size"),
    ("sampling", {"temperature": 0.7}, "use the field of that name in the section generator"),
    ("sampling", {"max_tokens": 7}, "use generator.max_completion_tokens"),
    ("sampling", {"logprobs": 5}, "takes token ids"),
    ("sampling", {"ignore_eos": True}, "up to a stop token"),
    ("sampling", {"mintokens": 3}, "vLLM's SamplingParams .* no argument .* .did you mean min_tokens"),
    ("sampling", {"_eos_token_id": 3}, "vLLM's SamplingParams has no argument"),
]


@pytest.mark.parametrize("table, options, message", REFUSED)
def test_what_would_break_a_run_is_refused_with_the_reason(table, options, message):
    (name,) = options
    with pytest.raises(ValueError, match=f"^generator.{table} {name}.*{message}"):
        validate(change(GRPOConfig(), {f"generator.{table}": options}))


def test_what_a_mixture_of_experts_cannot_have_is_refused():
    engine = GeneratorConfig(engine={"quantization": "fp8_per_tensor"})
    with pytest.raises(ValueError, match="^generator.engine quantization .*leave it out"):
        check_engine(engine, Qwen3MoeConfig(head_dim=64), on_gpu=False)
    check_engine(engine, Qwen3Config(head_dim=64), on_gpu=False)


def test_experts_on_several_ranks_need_a_gpu():
    """On a CPU vLLM ends by signal 11."""
    engine = GeneratorConfig(engine={"enable_expert_parallel": True})
    with pytest.raises(ValueError, match="^generator.engine enable_expert_parallel needs a GPU"):
        check_engine(engine, Qwen3MoeConfig(head_dim=64), on_gpu=False)
    check_engine(engine, Qwen3MoeConfig(head_dim=64), on_gpu=True)


def test_what_vllm_would_silently_ignore_is_refused():
    speculating = {"generator.engine": {"speculative_config": NGRAM}}
    validate(change(GRPOConfig(), speculating))
    for changes in (
        speculating | {"generator.sampling": {"logit_bias": {"5": 1.0}}},
        {"generator.engine": {"spec_method": "ngram"}, "generator.sampling": {"min_p": 0.1}},
        speculating | {"generator.sampling": {"top_p": 0.9}},
    ):
        with pytest.raises(ValueError, match="vLLM ignores min_p and logit_bias"):
            validate(change(GRPOConfig(), changes))


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
    config = load(
        GRPOConfig,
        DEFAULT,
        [
            *("--generator.engine", "quantization", "fp8_per_tensor", "block_size", "32", "async_scheduling", "false"),
            *("speculative_config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'),
            *("max_num_batched_tokens", "None", "watermark", "0.01"),
            *("--generator.sampling", "bad_words", '["a b", "c"]', "min_tokens", "8"),
            *("--reward.options", "math_reward", '{"tolerance": 0.1}'),
        ],
    )
    assert config.reward.options == {"math_reward": {"tolerance": 0.1}}
    assert config.generator.engine == {
        "quantization": "fp8_per_tensor",
        "block_size": 32,
        "async_scheduling": False,
        "speculative_config": NGRAM,
        "max_num_batched_tokens": None,
        "watermark": 0.01,
    }
    assert config.generator.sampling == {"bad_words": ["a b", "c"], "min_tokens": 8}


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
