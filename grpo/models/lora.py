"""LoRA (Hu et al. 2021, arXiv:2106.09685): a frozen weight W acts as W + alpha / rank * B A, with A and B of low rank.

A is [rank, inputs] and B [outputs, rank], both held in float32 whatever W is held in, and cast for a forward as master
weights are. B starts at 0, so the policy starts as its base to the last bit. They are sharded like W, B's rows as W's
rows and A's columns as W's columns, so that each rank merges its own shard.

torchtitan 0.3.0 has a LoRA converter. It is not used: v_proj cannot be chosen without k_proj; adapters are held in the
base's dtype; the start of A depends on the sharding; and it can neither merge a sharded weight nor switch adapters off.
"""

import contextlib
import math
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import get_args

import spmd_types as spmd
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import dense_param_placement

from grpo.config import TrainerConfig
from grpo.config.fields import LoRATarget
from grpo.models.experts import local_part
from grpo.models.families import family_of, has_states

ADAPTERS = ("lora_a", "lora_b")


class LoRALinear(Linear):
    """A linear layer with its own parameters, which do not learn, and an adapter, which does."""

    def __init__(
        self,
        base: Linear,
        name: str,
        trainer: TrainerConfig,
        seed: int,
    ):
        """Take over the parameters of `base`, torchtitan's `name` within the model; nothing is sharded yet."""
        nn.Module.__init__(self)
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.name = name
        self.weight = base.weight
        self.bias = base.bias
        rank = trainer.lora_rank
        self.scale = trainer.lora_alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features, dtype=torch.float32))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, rank, dtype=torch.float32))
        self.adapted = True
        own_seed = zlib.crc32(f"{seed} {name}".encode())
        draw = partial(draw_uniform, bound=1 / math.sqrt(base.in_features), seed=own_seed)
        self._param_init = base._param_init | {"lora_a": draw, "lora_b": nn.init.zeros_}
        sharding = base._sharding_config
        self._sharding_config = sharding
        if sharding is not None:
            states = sharding.state_shardings
            adapter = dict.fromkeys(ADAPTERS, dense_param_placement(tp=spmd.R))
            is_by_rows = states["weight"] == dense_param_placement(tp=spmd.S(0))
            adapter["lora_b" if is_by_rows else "lora_a"] = states["weight"]
            self._sharding_config = replace(sharding, state_shardings=states | adapter)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer with its adapter, or without it where adapters are off."""
        if not self.adapted:
            return super().forward(input)
        a = self.lora_a.to(self.weight.dtype)
        b = self.lora_b.to(self.weight.dtype)
        if isinstance(self.weight, DTensor):  # with tensor parallelism
            low_rank = F.linear(F.linear(input, a), b)
            return super().forward(input) + self.scale * low_rank
        return merged_linear(input, self.weight, self.bias, a, b, self.scale)


@torch.library.custom_op("grpo::merged_linear", mutates_args=())
def merged_linear(
    input: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    a_RI: Tensor,
    b_OR: Tensor,
    scale: float,
) -> Tensor:
    """Multiply input [.., I] by (weight + scale * B A)^T and add the bias. Weight and bias have no gradients.

    The merged weight is rounded to the weight's dtype. Except for the rounding of A and B, generators sample with the
    same weight. One large product replaces two thin ones and a sum, in the backward too. The backward merges again;
    the compiler, if it saw this function's body, would keep the merged weight instead.
    """
    merged_OI = torch.addmm(weight_OI, b_OR, a_RI, alpha=scale)
    return F.linear(input, merged_OI, bias_O)


@merged_linear.register_fake
def _(input, weight_OI, bias_O, a_RI, b_OR, scale):
    return input.new_empty(*input.shape[:-1], weight_OI.shape[0])


@torch.library.custom_op("grpo::merged_linear_backward", mutates_args=())
def merged_linear_backward(
    grad: Tensor,
    input: Tensor,
    weight_OI: Tensor,
    a_RI: Tensor,
    b_OR: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of input, A, B: G W', scale * (G B)^T X and scale * G^T (X A^T), with W' the merged weight."""
    grad_NO = grad.flatten(0, -2)
    input_NI = input.flatten(0, -2)
    grad_input_NI = grad_NO @ torch.addmm(weight_OI, b_OR, a_RI, alpha=scale)
    grad_a = (grad_NO @ (b_OR * scale)).T @ input_NI
    grad_b = grad_NO.T @ (input_NI @ (a_RI * scale).T)
    return grad_input_NI.view(input.shape), grad_a, grad_b


@merged_linear_backward.register_fake
def _(grad, input, weight_OI, a_RI, b_OR, scale):
    return input.new_empty(input.shape), torch.empty_like(a_RI), torch.empty_like(b_OR)


def _keep(ctx, inputs, output):
    input, weight_OI, _, a_RI, b_OR, ctx.scale = inputs
    ctx.save_for_backward(input, weight_OI, a_RI, b_OR)


def _backward(ctx, grad):
    grad_input, grad_a, grad_b = merged_linear_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale)
    return grad_input, None, None, grad_a, grad_b, None


merged_linear.register_autograd(_backward, setup_context=_keep)


def adapted_paths(hf: transformers.PretrainedConfig, trainer: TrainerConfig) -> list[str]:
    """Return the paths of `trainer.lora_targets` in a block.

    All targets, the default, mean all that the model has. In a mixture of experts these are attention's. Raises
    ValueError for a target that the model does not have.
    """
    if trainer.lora_rank and has_states(hf):
        raise ValueError(
            f"trainer.lora_rank={trainer.lora_rank}: the gated delta nets of a {hf.model_type} model take no adapters; "
            "leave it out, which trains all weights"
        )
    linears = family_of(hf).linears
    targets = trainer.lora_targets
    lacking = [target for target in targets if target not in linears]
    if lacking and {*targets} != {*get_args(LoRATarget)}:
        raise ValueError(
            f"trainer.lora_targets: experts take no adapters, and in a {hf.model_type} model {', '.join(lacking)} are "
            f"experts; choose among {', '.join(linears)}, or leave lora_targets out, which means all of these"
        )
    return [path for target, path in linears.items() if target in targets]


def add_adapters(
    module: Decoder,
    paths: list[str],
    trainer: TrainerConfig,
    seed: int,
) -> None:
    """Put adapters at `paths` of every block, before the module is sharded; A follows from `seed`."""
    for index, block in module.layers.items():
        for path in paths:
            parent, _, attribute = path.rpartition(".")
            base = block.get_submodule(path)
            adapted = LoRALinear(base, f"layers.{index}.{path}", trainer, seed)
            setattr(block.get_submodule(parent), attribute, adapted)


def is_adapter(name: str) -> bool:
    """Say whether a parameter's name is that of an adapter."""
    return name.endswith(ADAPTERS)


def adapted_layers(module: nn.Module) -> list[LoRALinear]:
    """List the adapted layers of a model, or of a part of it; none without LoRA."""
    return [layer for layer in module.modules() if isinstance(layer, LoRALinear)]


@contextlib.contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Switch the adapters off within a `with` block: a forward is then the base's."""
    layers = adapted_layers(module)
    for layer in layers:
        layer.adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapted = True


@torch.no_grad()
def merged_weight(layer: LoRALinear, dtype: torch.dtype) -> Tensor:
    """Return W + alpha / rank * B A in `dtype`, computed in float32, sharded as W. Collective over the role's ranks.

    Each rank needs its own rows of B, and all rows of A in the columns that it has of W.
    """
    weight = layer.weight
    a = layer.lora_a
    if isinstance(a, DTensor):
        placements = [p if p.is_shard(1) else Replicate() for p in a.placements]
        a = a.redistribute(placements=placements)
    merged = torch.addmm(
        local_part(weight).float(),
        local_part(layer.lora_b),
        local_part(a),
        alpha=layer.scale,
    ).to(dtype)
    if not isinstance(weight, DTensor):
        return merged
    return DTensor.from_local(
        merged,
        weight.device_mesh,
        weight.placements,
        shape=weight.shape,
        stride=weight.stride(),
        run_check=False,
    )


def draw_uniform(parameter: Tensor, bound: float, seed: int) -> None:
    """Fill a parameter uniformly within +-bound, as PEFT starts A, with the same numbers for every sharding."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.rand(parameter.shape, generator=generator) * (2 * bound) - bound
    if isinstance(parameter, DTensor):  # each rank takes its part of its own copy
        whole = distribute_tensor(
            whole,
            parameter.device_mesh,
            parameter.placements,
            src_data_rank=None,
        )
    parameter.copy_(whole)
