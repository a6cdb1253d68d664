"""Which experts an engine chose for its tokens, of a mixture of experts, so that the trainer can take the same ones.

On GPUs vLLM tells them with what it sampled (`enable_return_routed_experts`). Its CPU backend does not, and they are
taken from its routers here, which is enough to see a run work without a GPU. Left out: what becomes of them.
"""

from functools import partial
from typing import Any

import numpy as np
import torch


class Routes:
    """The experts that an engine chooses in each step, as rows uint8 [tokens, L layers, E experts of a token]."""

    def __init__(self, llm: Any):
        """llm: a vllm.LLM of such a model, in this process; on a GPU one that tells its experts."""
        hf = llm.llm_engine.model_config.hf_text_config
        self.nothing = torch.empty(0, hf.num_hidden_layers, hf.num_experts_per_tok, dtype=torch.uint8)
        self._by_layer: dict[int, torch.Tensor] = {}  # of the forward at hand, on a CPU
        self.on_cpu = llm.llm_engine.vllm_config.device_config.device_type == "cpu"
        if self.on_cpu:
            for runner in expert_layers(llm):
                runner.router.set_capture_fn(partial(self._by_layer.__setitem__, runner.layer_id))

    def of_step(self, scheduled: Any, model_output: Any, outputs: Any) -> dict[str, np.ndarray]:
        """Rows of the tokens that each request was fed in a step, by vLLM's names of requests.

        scheduled, model_output, outputs: what vLLM's scheduler decided, got, and made of it.
        """
        if not self.on_cpu:
            told = (output for of_client in outputs.values() for output in of_client.outputs)
            return {output.request_id: output.routed_experts for output in told if output.routed_experts is not None}
        names = sorted(model_output.req_id_to_index, key=model_output.req_id_to_index.get)
        ends = np.cumsum([scheduled.num_scheduled_tokens[name] for name in names])
        chosen = torch.stack([self._by_layer[layer] for layer in sorted(self._by_layer)], 1).to(torch.uint8).numpy()
        return dict(zip(names, np.split(chosen, ends[:-1]), strict=True))


def take_routes(llm: Any, is_head: bool) -> Routes | None:
    """The routes of this replica's engine on its head; None on its other ranks."""
    if is_head:
        return Routes(llm)
    # their vLLM tells nothing either, and their scheduler would miss it
    llm.llm_engine.engine_core.engine_core.scheduler.aux_output_connector = None
    return None


def expert_layers(llm: Any) -> list[Any]:
    """vLLM's layers of experts in this rank's engine."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    (model,) = llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    return [module for module in model.modules() if isinstance(module, MoERunner)]
