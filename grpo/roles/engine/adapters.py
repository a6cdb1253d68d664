"""LoRA's adapters in a running engine: put into vLLM's layers in place and in memory, and compared with the policy's.

vLLM reads an adapter from a folder, once, when a request first names it. Whoever hands it newer values under the same
name later is not told that it keeps the first ones. So a sync here removes the adapter before it puts the new one, and
a sync check compares what the layers hold with what the trainer holds, to the last bit: adapters move so little in a
step that log-probs may agree within the tolerance although one of them is old.

Left out: several adapters at once, and mixtures of experts.
"""

from typing import Any

import torch
from torch import Tensor

from grpo.config import TrainerConfig
from grpo.config.engine_options import LORA_RANKS
from grpo.models.export import peft_name
from grpo.roles.engine.shortcuts import add_one_adapter, model_runner_of

# vLLM's number of the only adapter
POLICY = 1


def adapter_options(trainer: TrainerConfig) -> dict[str, Any]:
    """Return vLLM's options for an engine that holds adapters beside its weights."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in LORA_RANKS if rank >= trainer.lora_rank),
        "lora_target_modules": list(trainer.lora_targets),
    }


def put_adapters(llm: Any, tensors: dict[str, Tensor], trainer: TrainerConfig) -> Any:
    """Write A and B, which have PEFT's names, into the layers of this rank's engine. Returns vLLM's LoRARequest.

    A request that carries it is sampled with the adapters, another one without. The layers' tensors stay where they
    are, so that captured CUDA graphs stay valid.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest

    manager = model_runner_of(llm).lora_manager._adapter_manager
    form = PEFTHelper(r=trainer.lora_rank, lora_alpha=trainer.lora_alpha, target_modules=[])
    adapters = LoRAModel.from_lora_tensors(POLICY, tensors, form, manager.device, manager.lora_config.lora_dtype)
    manager.remove_adapter(POLICY)  # otherwise vLLM keeps what it has under this number
    manager.add_adapter(adapters)
    manager.activate_adapter(POLICY)
    if manager.device.type == "cpu":  # from now on every request has this adapter
        for punica in manager.punica_wrapper_mapping.values():
            add_one_adapter(punica)
    return LoRARequest("policy", POLICY, "in memory")  # it must name a folder, which vLLM does not look for


def stale_adapters(llm: Any, tensors: dict[str, Tensor], trainer: TrainerConfig) -> list[str]:
    """Return the names of those A and B, which have PEFT's names, that this rank's engine does not sample with.

    Its share of each is compared to the last bit, with B multiplied by alpha / rank.
    """
    manager = model_runner_of(llm).lora_manager._adapter_manager
    if manager.lora_index_to_id != [POLICY]:
        return list(tensors)
    rank = trainer.lora_rank
    scale = trainer.lora_alpha / rank
    stale = set(tensors)
    for place, layer in manager.modules.items():
        parts = manager.packed_modules.get(place, [place])  # such as q_proj, k_proj and v_proj in qkv_proj
        for part, held_a, held_b in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
            name_a = peft_name(part, "A")
            name_b = peft_name(part, "B")
            if name_a not in tensors:  # of a layer without an adapter, beside others that have one
                continue
            if _holds_share(held_a[0, 0, :rank], tensors[name_a], layer):
                stale.remove(name_a)
            if _holds_share(held_b[0, 0, :, :rank], scale * tensors[name_b], layer):
                stale.remove(name_b)
    return sorted(stale)


def _holds_share(held: Tensor, whole: Tensor, layer: Any) -> bool:
    """Return whether `held` is this rank's share of `whole`, in which a dimension is cut or not.

    With fewer heads of keys and values than ranks, several ranks hold the same share.
    """
    for dimension, length in enumerate(held.shape):
        start = layer.tp_rank * whole.shape[dimension] // layer.tp_size
        whole = whole.narrow(dimension, start // length * length, length)
    return torch.equal(held, whole)
