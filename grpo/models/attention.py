"""Attention within the documents of packed rows, and to a prompt that they share.

"flash" is faster than torchtitan's FlexAttention, "documents" runs on CPUs. Both take `document_masks` of a
micro-batch: where documents begin, the longest one, and the keys of a shared prompt that they attend to.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.protocols.module import Module

from grpo.config import ModelConfig
from grpo.types import MicroBatch, SharedPrompts

# Major compute capabilities on which flash-attn-4 runs and has a deterministic backward: Hopper and Blackwell
FLASH_CAPABILITIES = (9, 10)


def choose_attention(model: ModelConfig, device: torch.device) -> str:
    """Return `model.attention`, or for "auto" the fastest kind that runs here. Raises ValueError if a kind does not."""
    on_gpu = device.type == "cuda"
    flash_runs = on_gpu and _has_flash_attention() and model.dtype == "bfloat16"
    if model.attention == "flash" and not flash_runs:
        raise ValueError(
            "model.attention flash needs a GPU such as H100 or B200, bfloat16 and the package flash-attn-4; "
            "take --model.attention auto"
        )
    if model.attention != "auto":
        return model.attention
    if flash_runs:
        return "flash"
    return "flex" if on_gpu else "documents"


def attention_config(kind: str) -> Module.Config:
    """Return torchtitan's config of flash, flex or documents. All of them always add gradients in the same order."""
    return {"flash": FlashAttention, "flex": FlexAttention, "documents": DocumentAttention}[kind].Config()


@functools.cache
def _has_flash_attention() -> bool:
    capable = torch.cuda.get_device_capability()[0] in FLASH_CAPABILITIES
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
        """Attend to a document's own keys and those of its shared prompt. Returns [B, L, N, H]."""
        bounds = attention_masks.cu_seq_q
        shared = attention_masks.shared
        index_SQ, real_SQ = _as_rows(bounds)
        index_SK = index_SQ
        visible = {"is_causal": True}  # hides the padding too, which follows its document
        if shared is not None:
            key_bounds = attention_masks.cu_seq_k
            places_SK, real_SK = _as_rows(key_bounds)
            index_SK = shared.keys_K[places_SK]
            # the last queries and the last keys are those of the same tokens
            before_S = key_bounds.diff() - bounds.diff()
            last_SQ = torch.arange(index_SQ.shape[1], device=bounds.device) + before_S[:, None]
            seen_SQK = torch.arange(index_SK.shape[1], device=bounds.device) <= last_SQ[:, :, None]
            visible = {"attn_mask": seen_SQK[:, None]}
        q = q_BLNH.flatten(0, 1)[index_SQ].transpose(1, 2)
        k = k_BLNH.flatten(0, 1)[index_SK].transpose(1, 2)
        v = v_BLNH.flatten(0, 1)[index_SK].transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=enable_gqa, **visible)
        return out.transpose(1, 2)[real_SQ].view(q_BLNH.shape)


def _as_rows(bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay documents out as rows of one length: (index of each place, whether the place is not padding)."""
    lengths_S = bounds.diff()
    offsets_T = torch.arange(int(lengths_S.max()), device=bounds.device)
    index_ST = (bounds[:-1, None] + offsets_T).clamp(max=int(bounds[-1]) - 1)  # padding repeats the last place of all
    return index_ST, offsets_T < lengths_S[:, None]


class FlashAttention(DocumentAttention):
    """The package flash-attn-4 (Shah et al. 2024, arXiv:2407.08608): up to 1.6 times as fast as flex on long documents.

    torch has a hook for this package, which wants an earlier version of it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(DocumentAttention.Config):
        pass

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, **unused):
        """Attend to a document's own keys and those of its shared prompt. Returns [B, L, N, H]."""
        if scale is None:
            scale = q_BLNH.shape[-1] ** -0.5
        shared = attention_masks.shared
        out_TNH, _ = flash_attention(
            q_BLNH.flatten(0, 1),
            k_BLNH.flatten(0, 1),
            v_BLNH.flatten(0, 1),
            attention_masks.cu_seq_q,
            attention_masks.cu_seq_k,
            attention_masks.max_q,
            attention_masks.max_k,
            shared and shared.keys_K,
            shared and shared.own_T,
            shared and shared.reused_R,
            shared and shared.uses_RU,
            scale,
        )
        return out_TNH.view(q_BLNH.shape)


class DocumentMasks(NamedTuple):
    """torchtitan's VarlenMetadata, and the keys that documents share."""

    cu_seq_q: torch.Tensor
    """int32 [documents + 1]."""
    cu_seq_k: torch.Tensor
    max_q: int | torch.Tensor
    max_k: int | torch.Tensor
    shared: SharedPrompts | None


def document_masks(micro: MicroBatch) -> DocumentMasks:
    """Return a micro-batch's documents. torchtitan would derive them from the positions, and wait for the device."""
    bounds = micro.document_starts
    longest = micro.longest_document
    shared = micro.shared
    if shared is None:
        return DocumentMasks(bounds, bounds, longest, longest, None)
    return DocumentMasks(bounds, shared.key_starts, longest, shared.longest, shared)


def shared_prompt_mask(micro: MicroBatch) -> Callable[..., torch.Tensor]:
    """Return flex attention's mask of one row, besides the causal one: a query sees its document and its prompt."""
    starts = micro.document_starts
    shared = micro.shared
    document_T = torch.searchsorted(starts[1:], torch.arange(micro.ids_BT.numel(), device=starts.device), right=True)
    prompt_T = document_T[shared.keys_K[shared.key_starts[:-1]]][document_T]  # its own document's number without one

    def sees(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (document_T[query] == document_T[key]) | (prompt_T[query] == document_T[key])

    return sees


def for_compiler(masks: DocumentMasks) -> DocumentMasks:
    """Return masks for compiled code that serves any number of documents of any length.

    The longest document's length stays on the CPU: reading it from a GPU would wait for everything launched before.
    """
    resized = [masks.cu_seq_q]
    shared = masks.shared
    if shared:
        resized += [masks.cu_seq_k, shared.keys_K, shared.own_T, shared.reused_R, shared.uses_RU]
        torch._dynamo.maybe_mark_dynamic(shared.uses_RU, 1)
    for tensor in resized:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    # numbers would be compiled in
    return masks._replace(max_q=torch.tensor(masks.max_q), max_k=torch.tensor(masks.max_k))


@torch.compiler.disable
def allow_any_length(block: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Have a block compiled for rows of any length at once, not only when a second length comes.

    This is a hook of the forward, because FSDP's hook replaces the tensors that a block gets. With tensor parallelism
    the compiler ignores it.
    """
    h_BTD, _, positions_BT = inputs
    torch._dynamo.maybe_mark_dynamic(h_BTD, 1)
    torch._dynamo.maybe_mark_dynamic(positions_BT, 1)


def keep_kernels_apart() -> None:
    """Give each GPU its own folder in the package's cache, because the package confuses kernels of some GPUs."""
    folder = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    if folder:
        major, minor = torch.cuda.get_device_capability()
        part = f"sm{major}{minor}-gpu{torch.cuda.current_device()}"
        os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = os.path.join(folder, part)


@functools.cache
def kernels() -> tuple[Callable, Callable]:
    """Import the package's forward and backward, which works on a GPU only."""
    keep_kernels_apart()  # before the import, which reads the folder
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return _flash_attn_fwd, _flash_attn_bwd


@torch.library.custom_op("grpo::flash_attention", mutates_args=())
def flash_attention(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    bounds_S: torch.Tensor,
    key_bounds_S: torch.Tensor,
    longest: torch.Tensor,
    longest_keys: torch.Tensor,
    keys_K: torch.Tensor | None,
    own_T: torch.Tensor | None,
    reused_R: torch.Tensor | None,
    uses_RU: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute causal attention within documents: (output [T, N, H], logsumexp [N, T] in float32).

    bounds_S: int32, the documents' first places and T. longest: their largest length, int64 on the CPU. key_bounds_S,
    longest_keys: the same for their keys. A document's own keys come last. keys_K, own_T, reused_R, uses_RU: as in
    SharedPrompts; None where documents share no keys.
    """
    forward, _ = kernels()
    options = _options(bounds_S, key_bounds_S, longest, longest_keys, scale)
    out, logsumexp, *_ = forward(q_TNH, _repeated(k_TKH, keys_K), _repeated(v_TKH, keys_K), return_lse=True, **options)
    return out, logsumexp


@flash_attention.register_fake
def _(q_TNH, *rest):
    return q_TNH.new_empty(q_TNH.shape), q_TNH.new_empty(q_TNH.shape[1], q_TNH.shape[0], dtype=torch.float32)


@torch.library.custom_op("grpo::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    grad_TNH: torch.Tensor,
    out_TNH: torch.Tensor,
    logsumexp_NT: torch.Tensor,
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    bounds_S: torch.Tensor,
    key_bounds_S: torch.Tensor,
    longest: torch.Tensor,
    longest_keys: torch.Tensor,
    keys_K: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, and of k and v as the documents attend to them, always added in the same order."""
    _, backward = kernels()
    options = _options(bounds_S, key_bounds_S, longest, longest_keys, scale)
    k, v = _repeated(k_TKH, keys_K), _repeated(v_TKH, keys_K)
    return backward(q_TNH, k, v, out_TNH, grad_TNH, logsumexp_NT, deterministic=True, **options)[:3]


@flash_attention_backward.register_fake
def _(grad_TNH, out_TNH, logsumexp_NT, q_TNH, k_TKH, v_TKH, bounds_S, key_bounds_S, longest, longest_keys, keys_K, *_):
    num_keys = (k_TKH if keys_K is None else keys_K).shape[0]
    return q_TNH.new_empty(q_TNH.shape), *(x.new_empty(num_keys, *x.shape[1:]) for x in (k_TKH, v_TKH))


def _options(bounds_S, key_bounds_S, longest, longest_keys, scale: float) -> dict[str, object]:
    """Return the kernels' options. Their causal mask lets a document's last query see all of its keys."""
    return {
        "max_seqlen_q": int(longest),
        "max_seqlen_k": int(longest_keys),
        "cu_seqlens_q": bounds_S,
        "cu_seqlens_k": key_bounds_S,
        "softmax_scale": scale,
        "causal": True,
    }


def _repeated(values_TKH: torch.Tensor, keys_K: torch.Tensor | None) -> torch.Tensor:
    """Lay out keys or values document after document, with those of shared prompts repeated."""
    if keys_K is None:
        return values_TKH
    return values_TKH.index_select(0, keys_K)


def _added_up(
    gradient_KKH: torch.Tensor, own_T: torch.Tensor, reused_R: torch.Tensor, uses_RU: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the input of `_repeated`. Repeated keys' are always added in one order, in float32."""
    gradient_RUKH = gradient_KKH[uses_RU.clamp(min=0)].masked_fill((uses_RU < 0)[..., None, None], 0)
    sums_RKH = gradient_RUKH.sum(1, dtype=torch.float32).to(gradient_KKH.dtype)
    return gradient_KKH.index_select(0, own_T).index_copy(0, reused_R, sums_RKH)


def _keep(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx, grad_TNH, _):
    *tensors, own_T, reused_R, uses_RU = ctx.saved_tensors
    gradients = flash_attention_backward(grad_TNH.contiguous(), *tensors, ctx.scale)
    if own_T is not None:  # here and not in the kernels' operator, so that it is compiled
        of_q, *of_keys_and_values = gradients
        gradients = of_q, *(_added_up(gradient, own_T, reused_R, uses_RU) for gradient in of_keys_and_values)
    return *gradients, *[None] * 9


flash_attention.register_autograd(_backward, setup_context=_keep)


class SelectiveCheckpointing(SelectiveAC):
    """torchtitan's selective checkpointing, which here keeps the output of flash-attn-4 too."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        """Return the operations whose outputs are kept for the backward."""
        return super().get_save_ops() | {torch.ops.grpo.flash_attention.default}
