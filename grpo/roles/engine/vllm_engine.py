"""vLLM's engines, one per replica, inside the torchrun ranks that sample: how they start, with which options."""

import importlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from grpo.config import DataConfig, GeneratorConfig, ModelConfig
from grpo.config.engine_options import needs_texts
from grpo.config.fields import CPU_KV_CACHE_GIB
from grpo.data.chat import load_tokenizer
from grpo.models.families import has_experts, has_states, head_dim_of, windows_of
from grpo.roles.engine.shortcuts import (
    WIDE_HEAD_DIMS,
    model_runner_of,
    widen_attention,
    widen_logprobs,
)
from grpo.roles.process_groups import Roles, engine_steps
from grpo.roles.shared_memory import remove_shared_memory, replica_name

VLLM_VERSION = "0.32.0"  # which shortcuts.py changes
# Attention on a CPU goes through whole blocks: 160 tokens are sampled 1.3 times as fast as with vLLM's default, 128
CPU_BLOCK_TOKENS = 32
# Those of vLLM's CPUAttentionBackend
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Engine options by which a user chooses attention; FlashAttention 3 reads a float8 cache faster than triton
CHOOSE_ATTENTION = ("attention_config", "attention_backend", "kv_cache_dtype")
# vLLM's environment, where the user has not set it
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # The ranks of an engine add up by vLLM's own kernels or NCCL. FlashInfer's, its default, are compiled by nvcc at
    # the first start, and would first try NVLink's multicast, which hosts that share their GPUs may forbid.
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}
HOPPER = (9, 0)  # H100 and H200, on which triton's attention was measured
# Engine options that vLLM's CPU backend gets wrong: seeded requests whose prompt is prefilled in pieces crash it, its
# sampler of drafted tokens divides by uninitialised memory where the temperature should be, and its kernel for experts
# ends the process by signal 11 where a rank has some of them.
WRONG_ON_CPU = {
    **dict.fromkeys(("enable_chunked_prefill", "max_num_batched_tokens"), "must prefill prompts whole"),
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model"), "samples drafted tokens at a wrong temperature"
    ),
    "enable_expert_parallel": "crashes with the experts of a layer on several ranks",
}


def check_engine(config: GeneratorConfig, hf: PretrainedConfig, *, on_gpu: bool) -> None:
    """Raise ValueError for what vLLM cannot do or gets wrong, on a GPU or on a CPU. It does not import vLLM."""
    if (has_experts(hf) or has_states(hf)) and "quantization" in config.engine:
        raise ValueError(
            "generator.engine quantization of a mixture of experts, or of gated delta nets, is not supported: nobody "
            "has seen vLLM quantize them again in a weight sync; leave it out"
        )
    if on_gpu:
        return
    if has_states(hf):
        raise ValueError(
            f"sampling from a {hf.model_type} model needs a GPU: vLLM's CPU backend has gated delta nets in bfloat16 "
            "alone, and not exactly; SFT without evaluation trains it on a CPU"
        )
    for name in config.engine:
        if name in WRONG_ON_CPU:
            raise ValueError(f"generator.engine {name} needs a GPU: vLLM's CPU backend {WRONG_ON_CPU[name]}")
    head_dim = head_dim_of(hf)
    if head_dim not in CPU_HEAD_DIMS:
        supported = ", ".join(map(str, CPU_HEAD_DIMS))
        raise ValueError(
            f"the model has head_dim={head_dim}, and vLLM's CPU backend only {supported}; make one of these"
        )


def import_vllm(roles: Roles) -> None:
    """Import vLLM, which takes seconds. Not collective: a rank does it while it waits for another one.

    Raises RuntimeError if it is another version than the pinned one.
    """
    _set_environment(roles.device)  # first, because vLLM reads some of it at its import
    importlib.import_module("vllm.entrypoints.llm")  # the package itself imports this only at its first use
    version = importlib.import_module("vllm").__version__
    if version.partition("+")[0] != VLLM_VERSION:
        raise RuntimeError(f"vLLM {version} is installed, and it must be {VLLM_VERSION}: bash launch/setup.sh")


def start_engine(
    config: GeneratorConfig,
    model: ModelConfig,
    data: DataConfig,
    seed: int,
    folder: str,
    roles: Roles,
    options: Mapping[str, Any],
):
    """Start this rank's part of its replica's `vllm.LLM`; seconds on a CPU, 20 to 95 on a GPU.

    options: of vLLM, from `options_of_model`. Collective over the replica, colocated over all ranks.
    """
    from vllm import LLM
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    head = roles.replica[0]
    # All ranks of the default group start together; colocated, that group is larger than one replica.
    world_rank = torch.distributed.get_rank()

    class ReplicaExecutor(ExecutorWithExternalLauncher):
        """Starts one rank of one replica, where vLLM's own executors would put every engine on the first GPU."""

        def _distributed_args(self) -> tuple[str, int, int]:
            # The part behind the colon names shared memory, so it must be unique to the replica.
            return f"env:{replica_name(head)}", world_rank, roles.device.index or 0

        def execute_model(self, *arguments: Any, **options: Any) -> Any:
            engine_steps[head] += 1  # for the watchdog: a rank that hangs has fewer than those that wait for it
            return super().execute_model(*arguments, **options)

    on_cpu = roles.device.type == "cpu"
    max_tokens = data.max_prompt_tokens + config.max_completion_tokens
    defaults = {"enable_prefix_caching": True, "disable_log_stats": True, "use_tqdm_on_load": False}
    defaults |= {"max_num_seqs": config.max_num_seqs}
    if on_cpu:
        defaults |= {"enable_chunked_prefill": False, "block_size": CPU_BLOCK_TOKENS, "enforce_eager": True}
        defaults["kv_cache_memory_bytes"] = int(CPU_KV_CACHE_GIB * 2**30)
        defaults["max_num_batched_tokens"] = max(8192, max_tokens)  # prompts are prefilled whole
    else:
        widen_logprobs()
        if "attention_config" in options:
            widen_attention()
    inductor_cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory() as tokenizer_folder:
        if needs_texts(config):  # from the model's folder vLLM would load another tokenizer, see `load_tokenizer`
            load_tokenizer(folder, data).save_pretrained(tokenizer_folder)
            shutil.copy(pathlib.Path(folder) / "config.json", tokenizer_folder)
        llm = LLM(
            model=folder,
            tensor_parallel_size=config.tensor_parallel,
            distributed_executor_backend=ReplicaExecutor,
            dtype=model.dtype,
            max_model_len=max_tokens,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enable_sleep_mode=config.sleep and not on_cpu,
            logprobs_mode="processed_logprobs",  # of the distribution sampled from; the default ignores temperature
            generation_config="vllm",  # sampling options come from our config alone
            config_format="hf",  # a Mistral folder may hold all in a second format too, which vLLM prefers
            load_format="safetensors",
            tokenizer=tokenizer_folder if needs_texts(config) else None,
            skip_tokenizer_init=not needs_texts(config),
            seed=seed,
            **(defaults | options | config.engine),
        )
    llm.llm_engine.engine_core._finalizer.atexit = False  # a notebook's end would destroy groups that are gone by then
    if inductor_cache:  # vLLM has set a folder of its own, in which a trainer on this rank would find nothing compiled
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = inductor_cache
    remove_shared_memory(replica_name(head))  # all ranks of the replica have joined
    return llm


def expert_layers(llm: Any) -> list[Any]:
    """Return vLLM's layers of experts in this rank's engine."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    model = model_runner_of(llm).get_model()
    return [module for module in model.modules() if isinstance(module, MoERunner)]


def options_of_model(
    hf: PretrainedConfig, engine: Mapping[str, Any], device: torch.device, tensor_parallel: int = 1
) -> dict[str, Any]:
    """Return vLLM's options for a model on this machine; `engine` has the user's own. tensor_parallel: its ranks."""
    options: dict[str, Any] = {}
    if has_states(hf):
        options["language_model_only"] = True  # of a folder with a vision encoder
        # states are kept at the ends of blocks of some 500 tokens, so hardly any prompt would be found again
        options["enable_prefix_caching"] = False
    if device.type == "cpu":
        return options
    if tensor_parallel > 1:  # see ENVIRONMENT
        options["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if has_experts(hf):  # these kernels read weights as a folder has them, so a sync can write them in place
        options["moe_backend"] = "triton"
    if has_states(hf):
        # on Hopper vLLM's own choice is compiled, by nvcc, at the first prompt
        options["gdn_prefill_backend"] = "triton"
        # as the trainer computes them; vLLM takes model.dtype where config.json has no mamba_ssm_dtype
        options["mamba_ssm_cache_dtype"] = "float32"
    chosen = any(name in engine for name in CHOOSE_ATTENTION)
    if any(window is not None for window in windows_of(hf)):  # triton's attention was measured without windows, states
        return options
    if not chosen and head_dim_of(hf) in WIDE_HEAD_DIMS and torch.cuda.get_device_capability(device) == HOPPER:
        options["attention_config"] = {"backend": "TRITON_ATTN"}
    return options


def _set_environment(device: torch.device) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if device.type == "cuda":  # what vLLM compiled runs on the GPU of that index alone, and its cache ignores the index
        root = pathlib.Path(os.environ.get("VLLM_CACHE_ROOT") or "~/.cache/vllm")
        gpu_folder = f"gpu{device.index or 0}"
        if root.name != gpu_folder:
            root /= gpu_folder
        os.environ["VLLM_CACHE_ROOT"] = str(root.expanduser())
    else:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # several engines would pile onto the same cores


def sampling_params(
    options: GeneratorConfig,
    stop_token_ids: list[int],
    more: Mapping[str, Any],
    temperature: float,
    seed: int,
    max_tokens: int,
):
    """Return the vllm.SamplingParams of one completion. more: the user's own, in vLLM's types."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        stop=list(options.stop),
        detokenize=bool(options.stop),  # the engine reads text only to find these strings
        skip_special_tokens=False,  # a stop text may be a special token's
        include_stop_str_in_output=True,
        logprobs=0,  # the sampled token's own
        seed=seed if temperature > 0 else None,  # greedy takes the likeliest token, whatever else is asked for
        skip_clone=True,  # nobody else has it
        **more,
    )


def broadcast_in_replica(value: Any) -> Any:
    """Give every rank of the replica the head's small picklable value. Collective over the replica."""
    from vllm.distributed import get_tp_group

    values = [value]
    torch.distributed.broadcast_object_list(values, group_src=0, group=get_tp_group().cpu_group)
    return values[0]


def destroy_groups() -> None:
    """Destroy vLLM's process groups, and with them the default one."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


def in_vllms_types(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `generator.sampling` from JSON into the types of SamplingParams; raises ValueError if they do not fit."""
    import msgspec
    from vllm import SamplingParams

    try:
        params = msgspec.convert(sampling, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"generator.sampling {dict(sampling)}: vLLM says: {error}") from error
    return {name: getattr(params, name) for name in sampling}
