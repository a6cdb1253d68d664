"""Attention within the documents of packed rows, and to a prompt that they share; in some layers within a window.

"flash" is faster than torchtitan's FlexAttention, "documents" runs on CPUs. Both take `document_masks` of a
micro-batch: where documents begin, the longest one, the keys of a shared prompt that they attend to, and the window.
A window of w tokens lets a token attend to itself and to the w - 1 tokens before it.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.protocols.module import Module

from grpo.config import ModelConfig
from grpo.models import own_config
from grpo.models.context import AttentionByHeads
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


@functools.cache
def _has_flash_attention() -> bool:
    major, _ = torch.cuda.get_device_capability()
    packages = ("flash_attn", "flash_attn.cute")
    return major in FLASH_CAPABILITIES and all(map(importlib.util.find_spec, packages))


@own_config
class DocumentAttention(AttentionByHeads, VarlenAttention):
    """Packed attention for any device: documents as rows of one padded scaled dot-product attention.

    Exact, and quick where documents are short or of similar length; not for long rows on GPUs.
    """

    def __init__(self, config):
        Module.__init__(self)  # the parent's constructor asks for GPU kernels

    def attend(
        self,
        q_BLNH,
        k_BLNH,
        v_BLNH,
        *,
        attention_masks,
        scale=None,
        enable_gqa=False,
        **unused,
    ):
        """Attend to a document's own keys and those of its shared prompt. Returns [B, L, N, H]."""
        index_SQ, real_SQ = _as_rows(attention_masks.cu_seq_q)
        index_SK = index_SQ
        visible = {"is_causal": True}  # hides the padding too, which follows its document
        if attention_masks.shared or attention_masks.cuts:
            index_SK, _ = _as_rows(attention_masks.cu_seq_k)
            seen_SQK = _seen_keys(attention_masks, index_SQ.shape[1], index_SK.shape[1])
            visible = {"attn_mask": seen_SQK[:, None]}
        if attention_masks.shared:
            index_SK = attention_masks.shared.keys_K[index_SK]
        q = _gathered(q_BLNH, index_SQ)
        k = _gathered(k_BLNH, index_SK)
        v = _gathered(v_BLNH, index_SK)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            enable_gqa=enable_gqa,
            **visible,
        )
        return out.transpose(1, 2)[real_SQ].view(q_BLNH.shape)


def _gathered(values_BLNH: Tensor, index_SL: Tensor) -> Tensor:
    """Return the values of these places as [S, N, L, H]. Gradients of a place are always added in one order.

    With several threads on a CPU, `values[index]` adds them as they come.
    """
    num_heads = values_BLNH.shape[2]
    rows_SLD = F.embedding(index_SL, values_BLNH.flatten(0, 1).flatten(1))
    return rows_SLD.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _as_rows(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Lay documents out as rows of one length: (index of each place, whether the place is not padding)."""
    lengths_S = bounds.diff()
    offsets_T = torch.arange(int(lengths_S.max()), device=bounds.device)
    last_place = int(bounds[-1]) - 1
    index_ST = bounds[:-1, None] + offsets_T
    index_ST = index_ST.clamp(max=last_place)  # padding repeats the last place of all
    return index_ST, offsets_T < lengths_S[:, None]


def _seen_keys(
    masks: "DocumentMasks",
    num_queries: int,
    num_keys: int,
) -> Tensor:
    """Say which keys each query sees, both laid out as rows: bool [documents, queries, keys].

    The last queries and the last keys of a document are those of the same tokens.
    """
    key_K = torch.arange(num_keys, device=masks.cu_seq_k.device)
    num_before_S = masks.cu_seq_k.diff() - masks.cu_seq_q.diff()
    query_Q = torch.arange(num_queries, device=key_K.device)
    own_SQ = num_before_S[:, None] + query_Q
    own_SQ1 = own_SQ.clamp(max=num_keys - 1)[:, :, None]  # so that padding sees something too
    seen_SQK = key_K <= own_SQ1
    if masks.cuts:
        seen_SQK &= key_K > own_SQ1 - masks.window
    return seen_SQK


@own_config
class FlashAttention(DocumentAttention):
    """The package flash-attn-4 (Shah et al. 2024, arXiv:2407.08608): up to 1.6 times as fast as flex on long documents.

    torch has a hook for this package, which wants an earlier version of it.
    """

    def attend(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, **unused):
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
            shared and shared.reused_Q,
            shared and shared.uses_QU,
            attention_masks.window,
            scale,
        )
        return out_TNH.view(q_BLNH.shape)


@own_config
class FlexByHeads(AttentionByHeads, FlexAttention):
    """torchtitan's FlexAttention."""

    attend = FlexAttention.forward


# By `model.attention`. All of them always add gradients in the same order.
ATTENTIONS = {"flash": FlashAttention, "flex": FlexByHeads, "documents": DocumentAttention}

# Outside of compiled blocks torchtitan has torch compile many kernels of flex attention and time them: on Hopper 7 for
# the forward and 13 for the backward, which in float32 takes minutes. So it compiles the one that it knows to be good.
FlexAttention._compiled_flex_attn = torch.compile(
    flex_attention,
    options=FlexAttention.inductor_configs | {"max_autotune": False, "coordinate_descent_tuning": False},
)


class DocumentMasks(NamedTuple):
    """torchtitan's VarlenMetadata, the keys that documents share, and the window of a layer."""

    cu_seq_q: Tensor
    """int32 [documents + 1]."""
    cu_seq_k: Tensor
    max_q: int | Tensor
    max_k: int | Tensor
    shared: SharedPrompts | None
    window: int | None = None
    """Tokens that a query sees, its own included; None for all before it."""

    @property
    def cuts(self) -> bool:
        """True if the window hides a key of the longest document."""
        return self.window is not None and bool(self.max_k > self.window)


def document_masks(micro: MicroBatch, window: int | None = None) -> DocumentMasks:
    """Return a micro-batch's documents. torchtitan would derive them from the positions, and wait for the device."""
    bounds = micro.document_starts
    longest = micro.longest_document
    shared = micro.shared
    if shared is None:
        return DocumentMasks(bounds, bounds, longest, longest, None, window)
    return DocumentMasks(
        bounds,
        shared.key_starts,
        longest,
        shared.longest,
        shared,
        window,
    )


def window_mask(positions_BT: Tensor, window: int) -> Callable[..., Tensor]:
    """Return flex attention's mask of a window, besides those that keep documents apart.

    It goes by positions: a shared prompt lies further away in its row than in the text.
    """

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return positions_BT[b, query] - positions_BT[b, key] < window

    return sees


def shared_prompt_mask(micro: MicroBatch) -> Callable[..., Tensor]:
    """Return flex attention's mask of one row, besides the causal one: a query sees its document and its prompt."""
    starts = micro.document_starts
    shared = micro.shared
    place_T = torch.arange(micro.ids_BT.numel(), device=starts.device)
    document_T = torch.searchsorted(starts[1:], place_T, right=True)
    first_keys = shared.keys_K[shared.key_starts[:-1]]
    prompt_T = document_T[first_keys][document_T]  # its own document's number without one

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        document = document_T[key]
        return (document_T[query] == document) | (prompt_T[query] == document)

    return sees


def for_compiler(masks: DocumentMasks) -> DocumentMasks:
    """Return masks for compiled code that serves any number of documents of any length.

    The longest document's length stays on the CPU: reading it from a GPU would wait for everything launched before.
    """
    resized = [masks.cu_seq_q]
    shared = masks.shared
    if shared:
        resized += [
            masks.cu_seq_k,
            shared.keys_K,
            shared.own_T,
            shared.reused_Q,
            shared.uses_QU,
        ]
        torch._dynamo.maybe_mark_dynamic(shared.uses_QU, 1)
    for tensor in resized:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    # numbers would be compiled in
    max_q = torch.tensor(masks.max_q)
    max_k = torch.tensor(masks.max_k)
    return masks._replace(max_q=max_q, max_k=max_k)


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
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    bounds_S: Tensor,
    key_bounds_S: Tensor,
    longest: Tensor,
    longest_keys: Tensor,
    keys_K: Tensor | None,
    own_T: Tensor | None,
    reused_Q: Tensor | None,
    uses_QU: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within documents: (output [T, N, H], logsumexp [N, T] in float32).

    bounds_S: int32, the documents' first places and T. longest: their largest length, int64 on the CPU. key_bounds_S,
    longest_keys: the same for their keys. A document's own keys come last. keys_K, own_T, reused_Q, uses_QU: as in
    SharedPrompts; None where documents share no keys. window: as in DocumentMasks.
    """
    forward, _ = kernels()
    options = _options(
        bounds_S,
        key_bounds_S,
        longest,
        longest_keys,
        window,
        scale,
    )
    k_KKH = _repeated(k_TKH, keys_K)
    v_KKH = _repeated(v_TKH, keys_K)
    out_TNH, logsumexp_NT, *_ = forward(
        q_TNH,
        k_KKH,
        v_KKH,
        return_lse=True,
        **options,
    )
    return out_TNH, logsumexp_NT


@flash_attention.register_fake
def _(q_TNH, *rest):
    num_tokens, num_heads, _ = q_TNH.shape
    out_TNH = q_TNH.new_empty(q_TNH.shape)
    logsumexp_NT = q_TNH.new_empty(num_heads, num_tokens, dtype=torch.float32)
    return out_TNH, logsumexp_NT


@torch.library.custom_op("grpo::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    grad_TNH: Tensor,
    out_TNH: Tensor,
    logsumexp_NT: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    bounds_S: Tensor,
    key_bounds_S: Tensor,
    longest: Tensor,
    longest_keys: Tensor,
    keys_K: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, and of k and v as the documents attend to them, always added in the same order."""
    _, backward = kernels()
    options = _options(
        bounds_S,
        key_bounds_S,
        longest,
        longest_keys,
        window,
        scale,
    )
    k_KKH = _repeated(k_TKH, keys_K)
    v_KKH = _repeated(v_TKH, keys_K)
    gradients = backward(
        q_TNH,
        k_KKH,
        v_KKH,
        out_TNH,
        grad_TNH,
        logsumexp_NT,
        deterministic=True,
        **options,
    )
    return gradients[:3]


@flash_attention_backward.register_fake
def _(
    grad_TNH,
    out_TNH,
    logsumexp_NT,
    q_TNH,
    k_TKH,
    v_TKH,
    bounds_S,
    key_bounds_S,
    longest,
    longest_keys,
    keys_K,
    *_,
):
    num_keys = k_TKH.shape[0]
    if keys_K is not None:
        num_keys = keys_K.shape[0]
    grad_q = q_TNH.new_empty(q_TNH.shape)
    grad_k = k_TKH.new_empty(num_keys, *k_TKH.shape[1:])
    grad_v = v_TKH.new_empty(num_keys, *v_TKH.shape[1:])
    return grad_q, grad_k, grad_v


def _options(
    bounds_S: Tensor,
    key_bounds_S: Tensor,
    longest: Tensor,
    longest_keys: Tensor,
    window: int | None,
    scale: float,
) -> dict[str, object]:
    """Return the kernels' options. Their causal mask lets a document's last query see all of its keys.

    The kernels count the tokens of a window without the query's own.
    """
    window_size = None if window is None else window - 1
    return {
        "max_seqlen_q": int(longest),
        "max_seqlen_k": int(longest_keys),
        "cu_seqlens_q": bounds_S,
        "cu_seqlens_k": key_bounds_S,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": window_size,
    }


def _repeated(values_TKH: Tensor, keys_K: Tensor | None) -> Tensor:
    """Lay out keys or values document after document, with those of shared prompts repeated."""
    if keys_K is None:
        return values_TKH
    return values_TKH.index_select(0, keys_K)


def _added_up(
    gradient_KKH: Tensor,
    own_T: Tensor,
    reused_Q: Tensor,
    uses_QU: Tensor,
) -> Tensor:
    """Return the gradient of the input of `_repeated`. Repeated keys' are always added in one order, in float32."""
    is_unused_QU11 = (uses_QU < 0)[..., None, None]
    gradient_QUKH = gradient_KKH[uses_QU.clamp(min=0)].masked_fill(is_unused_QU11, 0)
    sums_QKH = gradient_QUKH.sum(1, dtype=torch.float32)
    own_TKH = gradient_KKH.index_select(0, own_T)
    return own_TKH.index_copy(0, reused_Q, sums_QKH.to(gradient_KKH.dtype))


def _keep(ctx, inputs, output):
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx, grad_TNH, _):
    *tensors, own_T, reused_Q, uses_QU = ctx.saved_tensors
    grad_q, grad_k, grad_v = flash_attention_backward(
        grad_TNH.contiguous(),
        *tensors,
        ctx.window,
        ctx.scale,
    )
    if own_T is not None:  # here and not in the kernels' operator, so that it is compiled
        grad_k = _added_up(grad_k, own_T, reused_Q, uses_QU)
        grad_v = _added_up(grad_v, own_T, reused_Q, uses_QU)
    return grad_q, grad_k, grad_v, *[None] * 10


flash_attention.register_autograd(_backward, setup_context=_keep)


@own_config
class SelectiveCheckpointing(SelectiveAC):
    """torchtitan's selective checkpointing, which here keeps the output of flash-attn-4 too.

    The products of a gated delta rule are computed again: kept in float32, they are larger than all else of a block.
    So is what ranks that share rows send each other.
    """

    def get_save_ops(self) -> set:
        """Return the operations whose outputs are kept for the backward."""
        kept = super().get_save_ops() | {torch.ops.grpo.flash_attention.default}
        return kept - {torch.ops.aten.bmm.default, torch.ops._c10d_functional.all_to_all_single.default}


@own_config
class CheckpointingOfSpreadExperts(SelectiveCheckpointing):
    """Selective checkpointing that keeps what ranks send each other, because ranks send tokens to experts.

    Compiled, torch would decide by sizes which of these are sent again. The sizes differ from rank to rank, and ranks
    that decide differently wait for each other without end.
    """

    def get_save_ops(self) -> set:
        """Return the operations whose outputs are kept for the backward."""
        return super().get_save_ops() | {torch.ops._c10d_functional.all_to_all_single.default}
