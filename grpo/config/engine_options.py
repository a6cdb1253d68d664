"""What of vLLM's own arguments a user may set in `generator.engine` and `generator.sampling`, and why not the rest.

vLLM is not imported here, which takes seconds and belongs to the generators: its argument names are read from its
source text. Values are vLLM's to judge, when an engine starts.
"""

import ast
import functools
import importlib.util
import pathlib

from grpo.config.fields import GeneratorConfig, Table
from grpo.config.user_files import near_miss
from grpo.config.values import fits

FILES = "an engine reads the folder of model.path as the trainer does"
REPLICA = "a replica is generator.tensor_parallel neighbouring ranks of torchrun"
TOKENS = "the generator takes token ids up to a stop token, each with its log-prob, and nothing else"

# EngineArgs that the project sets itself, and what decides instead
ENGINE_SET_HERE = {
    **dict.fromkeys(("model", "model_weights", "hf_config_path", "tokenizer", "skip_tokenizer_init"), FILES),
    **dict.fromkeys(("revision", "code_revision", "tokenizer_revision", "config_format", "load_format"), FILES),
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size"), REPLICA),
    **dict.fromkeys(("distributed_executor_backend", "nnodes", "node_rank", "device_ids"), REPLICA),
    **dict.fromkeys(("master_addr", "master_port"), REPLICA),
    **dict.fromkeys(("generation_config", "override_generation_config"), "the section generator alone sets sampling"),
    "dtype": "use model.dtype",
    "seed": "use seed",
    "max_model_len": "it is data.max_prompt_tokens + generator.max_completion_tokens",
    "gpu_memory_utilization": "use generator.gpu_memory_utilization",
    "enable_sleep_mode": "use generator.sleep",
    "tensor_parallel_size": "use generator.tensor_parallel",
    "moe_backend": "a weight sync writes experts where triton reads them, and others read them reordered",
    **dict.fromkeys(
        ("enable_return_routed_experts", "aux_output_config"), "nothing reads which experts the engine took"
    ),
    "logprobs_mode": "the trainer needs log-probs of the distribution that was sampled from (processed_logprobs)",
}
# SamplingParams that the project sets itself
SAMPLING_SET_HERE = {
    "n": "use group_size",
    "seed": "every request has its own; use seed",
    "max_tokens": "use generator.max_completion_tokens",
    **{name: f"use generator.{name}" for name in ("temperature", "stop", "stop_token_ids")},
    **dict.fromkeys(("ignore_eos", "logprobs", "flat_logprobs", "logprob_token_ids", "prompt_logprobs"), TOKENS),
    **dict.fromkeys(("prompt_logprob_token_ids", "prompt_logprob_start", "detokenize", "skip_special_tokens"), TOKENS),
    **dict.fromkeys(("spaces_between_special_tokens", "output_kind", "include_stop_str_in_output"), TOKENS),
    **dict.fromkeys(("output_text_buffer_length", "stream_interval", "skip_clone"), TOKENS),
}
# SamplingParams that choose among the tokens of one distribution, whatever came before
TRUNCATING = ("top_p", "top_k", "min_p")
# SamplingParams after which tokens no longer have the policy's probabilities -> values with which they still do
RESHAPING = {
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
}
# vLLM quantizes the checkpoint's weights itself, at the start and again in every weight sync. Under its other names
# ("fp8" among them) it expects a checkpoint that is quantized already, which a policy's new weights are not.
ONLINE_QUANTIZATION = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8", "mxfp4", "online")


def check_engine_options(generator: GeneratorConfig) -> None:
    """Refuse what the project sets itself, names that vLLM does not have, and what would break a contract of a run.

    Raises ValueError with the reason and the field to use. Without vLLM at hand its names are not checked.
    """
    _check_names("engine", generator.engine, "vllm/engine/arg_utils.py", "EngineArgs", ENGINE_SET_HERE)
    _check_names("sampling", generator.sampling, "vllm/sampling_params.py", "SamplingParams", SAMPLING_SET_HERE)
    for name in ("max_num_seqs", "kv_cache_memory_bytes"):  # memory is counted with them before an engine starts
        value = generator.engine.get(name, 1)
        if not fits(value, int) or value < 1:
            raise ValueError(f"generator.engine {name}={value!r} must be a whole number, at least 1")
    quantization = generator.engine.get("quantization")
    if quantization is not None and quantization not in ONLINE_QUANTIZATION:
        raise ValueError(
            f"generator.engine quantization={quantization!r} expects a checkpoint that is quantized already, but "
            f"weight syncs bring others; use one that vLLM applies itself: {', '.join(ONLINE_QUANTIZATION)}"
        )
    speculates = any(generator.engine.get(name) for name in ("speculative_config", "spec_method", "spec_model"))
    if speculates and {"min_p", "logit_bias"} & {*generator.sampling}:
        raise ValueError("vLLM ignores min_p and logit_bias with speculative decoding; leave out the one or the other")


def needing_texts(sampling: Table) -> list[str]:
    """Return the names in `generator.sampling` for which vLLM may need a tokenizer, or all of a completion."""
    return [name for name in sampling if name not in TRUNCATING]


def reshaping_options(sampling: Table) -> list[str]:
    """Return the names in `generator.sampling` that make the sampled distribution another one than the policy's."""
    return [name for name, value in sampling.items() if value not in RESHAPING.get(name, (value,))]


@functools.cache
def argument_names(file: str, class_name: str) -> tuple[str, ...]:
    """Return the fields of a class of vLLM, read from its source file (`vllm/...`); none if vLLM is not installed."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None:
        return ()
    tree = ast.parse((pathlib.Path(vllm.origin).parents[1] / file).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    names = (node.target.id for node in found.body if isinstance(node, ast.AnnAssign))
    return tuple(name for name in names if not name.startswith("_"))


def _check_names(table: str, options: Table, file: str, class_name: str, set_here: dict[str, str]) -> None:
    for name in options:
        if name in set_here:
            raise ValueError(f"generator.{table} {name} is set by the project: {set_here[name]}")
        known = argument_names(file, class_name)
        if known and name not in known:
            near = near_miss(name, [other for other in known if other not in set_here])
            raise ValueError(f"generator.{table} {name}: vLLM's {class_name} has no argument of that name{near}")
