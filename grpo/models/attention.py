"""Attention within the documents of packed rows: what torchtitan's FlexAttention leaves to be wished for.

Both take what `document_masks` says of a micro-batch: where documents begin, and the longest one.
"""

import grpo.models.titan_on_cpu  # noqa: F401

# isort: split

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module

from grpo.config import ModelConfig
from grpo.types import MicroBatch

HOPPER, BLACKWELL = 9, 10  # major compute capabilities; on others its backward is not deterministic, or it does not run


def choose_attention(model: ModelConfig, device: torch.device) -> str:
    """`model.attention`, or what "auto" takes: the fastest that runs here.

    Raises ValueError for a kind that does not.
    """
    on_gpu = device.type == "cuda"
    flash_runs = on_gpu and _has_flash_attention() and model.dtype == "bfloat16"
    if model.attention == "flash" and not flash_runs:
        raise ValueError(
            "model.attention flash needs a GPU such as H100 or B200, bfloat16 and the package flash-attn-4; "
            "take --model.attention auto"
        )
    if model.attention != "auto":
        return model.attention
    return "flash" if flash_runs else "flex" if on_gpu else "documents"


def config_of(kind: str, deterministic: bool) -> Module.Config:
    """Of flash, flex or documents. The others are deterministic in any case."""
    if kind == "flash":
        return FlashAttention.Config(deterministic=deterministic)
    return {"flex": FlexAttention, "documents": DocumentAttention}[kind].Config()


@functools.cache
def _has_flash_attention() -> bool:
    capable = torch.cuda.get_device_capability()[0] in (HOPPER, BLACKWELL)
    return capable and all(importlib.util.find_spec(name) for name in ("flash_attn", "flash_attn.cute"))


class DocumentAttention(VarlenAttention):
    """Packed attention for any device: documents as rows of one padded scaled dot-product attention.

    Exact, and quick where documents are short or of similar length; not for long rows on GPUs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config):
        Module.__init__(self)  # the parent's constructor asks for GPU kernels

    # torchtitan declares shardings for these argument names
    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, enable_gqa=False, **unused):
        bounds = attention_masks.cu_seq_q.to(q_BLNH.device)
        starts_S, lengths_S = bounds[:-1], bounds.diff()
        offsets_T = torch.arange(int(lengths_S.max()), device=bounds.device)
        real_ST = offsets_T < lengths_S[:, None]
        # padding repeats the last token of all; it comes after its document, where causal attention never looks
        index_ST = (starts_S[:, None] + offsets_T).clamp(max=int(bounds[-1]) - 1)
        q, k, v = (x.flatten(0, 1)[index_ST].transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)[real_ST].view(q_BLNH.shape)


class FlashAttention(DocumentAttention):
    """The kernels of the package flash-attn-4, on Hopper and Blackwell: up to 1.6 times flex attention's speed.

    Source: Shah et al. 2024, arXiv:2407.08608. torch has a hook for this package, which wants an earlier version of it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(DocumentAttention.Config):
        deterministic: bool = True
        """Whether the backward adds in one order always."""

    def __init__(self, config):
        super().__init__(config)
        self.deterministic = config.deterministic

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, **unused):
        scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        q_TNH, k_TNH, v_TNH = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
        documents = attention_masks.cu_seq_q, attention_masks.max_q
        out_TNH, _ = flash_attention(q_TNH, k_TNH, v_TNH, *documents, scale, self.deterministic)
        return out_TNH.view(q_BLNH.shape)


def document_masks(micro: MicroBatch) -> VarlenMetadata:
    """As `create_varlen_metadata_for_document` makes it of the positions, which would wait for the device."""
    bounds, longest = micro.document_starts, micro.longest_document
    return VarlenMetadata(cu_seq_q=bounds, cu_seq_k=bounds, max_q=longest, max_k=longest)


def for_compiler(masks: VarlenMetadata) -> VarlenMetadata:
    """The same, so that compiled code serves any number of documents of any length.

    The longest one's length must stay on the CPU: from a GPU each use of it would wait for all that was launched.
    """
    torch._dynamo.maybe_mark_dynamic(masks.cu_seq_q, 0)
    longest = torch.tensor(masks.max_q)  # a number would be compiled in
    return masks._replace(cu_seq_k=masks.cu_seq_q, max_q=longest, max_k=longest)


def keep_kernels_apart() -> None:
    """Give this GPU's index and kind a folder of its own in the package's cache, which is read as it is imported.

    It does not find all kernels by the kind of GPU, and those of one GPU were never loaded on another.
    """
    if folder := os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        major, minor = torch.cuda.get_device_capability()
        part = f"sm{major}{minor}-gpu{torch.cuda.current_device()}"
        os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = os.path.join(folder, part)


@functools.cache
def kernels() -> tuple[Callable, Callable]:
    """The package's forward and backward, which it imports on a GPU only."""
    keep_kernels_apart()
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return _flash_attn_fwd, _flash_attn_bwd


@torch.library.custom_op("grpo::flash_attention", mutates_args=())
def flash_attention(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    bounds_S: torch.Tensor,
    longest: torch.Tensor,
    scale: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within documents: (output [T, N, H], logsumexp [N, T] in float32).

    bounds_S: int32, the documents' first places and T. longest: of their lengths, int64 on the CPU.
    deterministic: of the backward.
    """
    forward, _ = kernels()
    documents = _documents(bounds_S, longest)
    out, logsumexp, *_ = forward(q_TNH, k_TKH, v_TKH, softmax_scale=scale, causal=True, return_lse=True, **documents)
    return out, logsumexp


@flash_attention.register_fake
def _(q_TNH, k_TKH, v_TKH, bounds_S, longest, scale, deterministic):
    return q_TNH.new_empty(q_TNH.shape), q_TNH.new_empty(q_TNH.shape[1], q_TNH.shape[0], dtype=torch.float32)


@torch.library.custom_op("grpo::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    grad_TNH: torch.Tensor,
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    out_TNH: torch.Tensor,
    logsumexp_NT: torch.Tensor,
    bounds_S: torch.Tensor,
    longest: torch.Tensor,
    scale: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    _, backward = kernels()
    documents = _documents(bounds_S, longest)
    values = q_TNH, k_TKH, v_TKH, out_TNH, grad_TNH, logsumexp_NT
    return backward(*values, softmax_scale=scale, causal=True, deterministic=deterministic, **documents)


@flash_attention_backward.register_fake
def _(grad_TNH, q_TNH, k_TKH, v_TKH, out_TNH, logsumexp_NT, bounds_S, longest, scale, deterministic):
    return tuple(value.new_empty(value.shape) for value in (q_TNH, k_TKH, v_TKH))


def _documents(bounds_S: torch.Tensor, longest: torch.Tensor) -> dict[str, object]:
    """Of queries and keys alike."""
    return {
        "cu_seqlens_q": bounds_S,
        "cu_seqlens_k": bounds_S,
        "max_seqlen_q": int(longest),
        "max_seqlen_k": int(longest),
    }


def _keep(ctx, inputs, output):
    *tensors, ctx.scale, ctx.deterministic = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad_TNH, _):
    q_TNH, k_TKH, v_TKH, bounds_S, longest, out_TNH, logsumexp_NT = ctx.saved_tensors
    values = grad_TNH.contiguous(), q_TNH, k_TKH, v_TKH, out_TNH, logsumexp_NT
    gradients = flash_attention_backward(*values, bounds_S, longest, ctx.scale, ctx.deterministic)
    return *gradients, None, None, None, None


flash_attention.register_autograd(_backward, setup_context=_keep)


class SelectiveCheckpointing(SelectiveAC):
    """torchtitan's, which keeps attention's output, also where it does not know the kernel."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {torch.ops.grpo.flash_attention.default}
