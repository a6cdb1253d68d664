"""Checks of `generator.engine` and `generator.sampling`: vLLM's own arguments, and why some cannot be set.

vLLM is not imported here, because that takes seconds and only generators need it: the fields of its dataclasses are
read from its files. vLLM itself judges the values when an engine starts.
"""

import ast
import functools
import importlib.util
import pathlib
from typing import Any

from grpo.config.fields import GeneratorConfig, Table
from grpo.config.user_files import near_miss
from grpo.config.values import fits

# EngineArgs that the project sets itself, by what decides instead
ENGINE_SET_HERE = {
    "an engine reads the folder of model.path as the trainer does": (
        "model model_weights hf_config_path tokenizer skip_tokenizer_init revision code_revision tokenizer_revision "
        "config_format load_format"
    ),
    "a replica is generator.tensor_parallel neighbouring ranks of torchrun": (
        "pipeline_parallel_size data_parallel_size prefill_context_parallel_size distributed_executor_backend nnodes "
        "node_rank device_ids master_addr master_port"
    ),
    "the section generator alone sets sampling": "generation_config override_generation_config",
    "use model.dtype": "dtype",
    "use seed": "seed",
    "a weight sync merges LoRA's adapters into the weights": (
        "enable_lora max_loras max_lora_rank max_cpu_loras lora_dtype lora_target_modules fully_sharded_loras"
    ),
    "it is data.max_prompt_tokens + generator.max_completion_tokens": "max_model_len",
    "use generator.gpu_memory_utilization": "gpu_memory_utilization",
    "use generator.sleep": "enable_sleep_mode",
    "use generator.tensor_parallel": "tensor_parallel_size",
    "a weight sync writes experts where triton reads them, and others read them reordered": "moe_backend",
    "nothing reads which experts the engine took": "enable_return_routed_experts aux_output_config",
    "the trainer needs log-probs of the distribution that was sampled from (processed_logprobs)": "logprobs_mode",
}
# SamplingParams that the project sets itself
SAMPLING_SET_HERE = {
    "use group_size": "n",
    "every request has its own; use seed": "seed",
    "use generator.max_completion_tokens": "max_tokens",
    "use the field of that name in the section generator": "temperature stop stop_token_ids",
    "the generator takes token ids up to a stop token, each with its log-prob, and nothing else": (
        "ignore_eos logprobs flat_logprobs logprob_token_ids prompt_logprobs prompt_logprob_token_ids "
        "prompt_logprob_start detokenize skip_special_tokens spaces_between_special_tokens output_kind "
        "include_stop_str_in_output output_text_buffer_length stream_interval skip_clone trace_decode_token_ids "
        "routed_experts_prompt_start"
    ),
}
# SamplingParams that choose among the tokens of one distribution, whatever text came before
TRUNCATING = {"top_p", "top_k", "min_p"}
# SamplingParams that exclude some tokens by the text before, and leave the ratios of the others as they are
EXCLUDING = {"min_tokens", "allowed_token_ids", "bad_words", "structured_outputs"}
# SamplingParams that give tokens other probabilities than the policy's -> values that change nothing
RESHAPING: dict[str, tuple] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),  # it makes the end of a thought all but certain, and excludes nothing
}
# EngineArgs by which tokens get other probabilities than the policy's
RESHAPING_ENGINE = ("logits_processors", "watermark_config")
# With these names vLLM quantizes the weights itself, at the start and in every weight sync. With others ("fp8" among
# them) it expects a checkpoint that is quantized already, and a policy's new weights are not.
ONLINE_QUANTIZATION = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8", "mxfp4", "online")


def check_engine_options(generator: GeneratorConfig) -> None:
    """Refuse arguments that the project sets itself, names that vLLM does not have, and values that break a run.

    Raises ValueError with the reason and the field to use. Names are not checked if vLLM is not installed.
    """
    _check_names("engine", generator.engine, "vllm/engine/arg_utils.py", "EngineArgs", ENGINE_SET_HERE)
    _check_names("sampling", generator.sampling, "vllm/sampling_params.py", "SamplingParams", SAMPLING_SET_HERE)
    for name in ("max_num_seqs", "kv_cache_memory_bytes"):  # the estimate of memory needs them as numbers
        value: Any = generator.engine.get(name, 1)
        if not fits(value, int) or value < 1:
            raise ValueError(f"generator.engine {name}={value!r} must be a whole number, at least 1")
    quantization = generator.engine.get("quantization")
    if quantization is not None and quantization not in ONLINE_QUANTIZATION:
        raise ValueError(
            f"generator.engine quantization={quantization!r} expects a checkpoint that is quantized already, but "
            f"weight syncs bring others; use one that vLLM applies itself: {', '.join(ONLINE_QUANTIZATION)}"
        )
    speculates = any(generator.engine.get(name) for name in ("speculative_config", "spec_method", "spec_model"))
    if speculates and {*TRUNCATING, "logit_bias"} & {*generator.sampling}:
        raise ValueError(
            "vLLM ignores min_p and logit_bias with speculative decoding, and which ids top_p and top_k keep for a "
            "drafted token is not known; leave out the one or the other"
        )


def needs_texts(generator: GeneratorConfig) -> bool:
    """Return whether vLLM needs a tokenizer or the whole completion: for stop texts, options such as bad_words."""
    return bool(generator.stop) or not TRUNCATING.issuperset(generator.sampling)


def reshaping_options(sampling: Table) -> list[str]:
    """Return the names in `generator.sampling` that make tokens more or less likely than under the policy."""
    return [name for name, value in sampling.items() if value not in RESHAPING.get(name, (value,))]


def inexact_options(sampling: Table) -> list[str]:
    """Return those of `reshaping_options` by which the trainer's log-probs are not those of the engine.

    Completions carry the ids that were kept if top_p, top_k or min_p exclude some; those that another option excludes
    are not among these.
    """
    exact = TRUNCATING | EXCLUDING if truncates(sampling) else TRUNCATING
    return [name for name in reshaping_options(sampling) if name not in exact]


def truncates(sampling: Table) -> bool:
    """Return whether top_p, top_k or min_p exclude tokens, so that completions carry the ids that were kept."""
    return not TRUNCATING.isdisjoint(reshaping_options(sampling))


@functools.cache
def argument_names(file: str, class_name: str) -> tuple[str, ...]:
    """Read the fields of a dataclass of vLLM from its file (`vllm/...`). Empty if vLLM is not installed."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None:
        return ()
    source = (pathlib.Path(vllm.origin).parents[1] / file).read_text()
    classes = {part.name: part.body for part in ast.parse(source).body if isinstance(part, ast.ClassDef)}
    names = [ast.unparse(line.target) for line in classes[class_name] if isinstance(line, ast.AnnAssign)]
    return tuple(name for name in names if not name.startswith("_"))


def _check_names(table: str, options: Table, file: str, class_name: str, set_here: dict[str, str]) -> None:
    for name in options:
        for reason, names in set_here.items():
            if name in names.split():
                raise ValueError(f"generator.{table} {name} is set by the project: {reason}")
        names_of_vllm = argument_names(file, class_name)
        if names_of_vllm and name not in names_of_vllm:
            raise ValueError(
                f"generator.{table} {name}: vLLM's {class_name} has no argument of that name"
                f"{near_miss(name, names_of_vllm)}"
            )
