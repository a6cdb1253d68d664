"""Attention over packed rows: milliseconds and TFLOP/s forward and backward of every kernel that this machine has.

    python tests/bench/attention.py [--tokens 16384] [--documents 512 mixed 4096 16384] [--kernels flex fa2 fa4 cudnn]

One row of `--tokens` tokens with 16 query and 8 key heads of 128 (Qwen3-1.7B), bfloat16, in documents of one length or
of mixed ones (100 to 2,000). `flex` is what `model.attention flex` runs, compiled; `fa2` is torch's own FlashAttention
with documents of any length; `fa4` is that of the package flash-attn-4; `cudnn` is dense and so only for documents of
one length. Errors are relative to the same in float32, over output and gradients, on documents up to 4,096.
"""

import argparse
import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from speed import report
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

QUERY_HEADS = 16
KEY_HEADS = 8
HEAD_DIM = 128
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--documents", nargs="+", default=["512", "mixed", "4096", "16384"])
    parser.add_argument("--kernels", nargs="+", default=["flex", "fa2", "cudnn", "fa4"])
    options = parser.parse_args()
    rows = []
    for kernel in options.kernels:
        for documents in options.documents:
            row = {"kernel": kernel, "documents": documents}
            try:
                row |= measure(kernel, lengths_of(documents, options.tokens))
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
            rows.append(row)
            print(row, flush=True)
    report("attention", rows, tokens=options.tokens)


def lengths_of(documents: str, tokens: int) -> list[int]:
    """Return document lengths that sum to `tokens`."""
    if documents != "mixed":
        return [int(documents)] * (tokens // int(documents))
    draw = random.Random(0)
    lengths = []
    while sum(lengths) < tokens:
        lengths.append(min(draw.randint(100, 2000), tokens - sum(lengths)))
    return lengths


def measure(kernel: str, lengths: list[int]) -> dict[str, float]:
    """Measure median milliseconds and TFLOP/s, counting the causal half alone, and the error."""
    from triton.testing import do_bench

    torch.manual_seed(0)
    tokens = sum(lengths)
    shapes = [(1, tokens, heads, HEAD_DIM) for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)]
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    grad = torch.randn_like(q)
    function = KERNELS[kernel](lengths)
    figures = {}
    if max(lengths) <= 4096:
        output = function(q, k, v)
        gradients = torch.autograd.grad(output, (q, k, v), grad)
        exact = by_document(q, k, v, grad, lengths)
        figures["error"] = max(relative_error(a, b) for a, b in zip((output, *gradients), exact, strict=True))
    forward = do_bench(lambda: function(q, k, v), return_mode="median")
    both = do_bench(lambda: torch.autograd.grad(function(q, k, v), (q, k, v), grad), return_mode="median")
    backward = both - forward
    flops = 4 * QUERY_HEADS * HEAD_DIM * sum(length**2 / 2 for length in lengths)
    return figures | {
        "forward ms": forward,
        "backward ms": backward,
        "forward TFLOP/s": flops / forward / 1e9,
        "backward TFLOP/s": 2.5 * flops / backward / 1e9,
        "both TFLOP/s": 3.5 * flops / (forward + backward) / 1e9,
    }


def flex(lengths: list[int]) -> Kernel:
    """Build flex attention as grpo/models/families.py does."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask
    from torchtitan.models.common.attention import FlexAttention, get_causal_mask_mod
    from torchtitan.models.common.attention import get_efficient_causal_mask_mod_for_packed_document as same_document

    positions = torch.cat([torch.arange(length, device="cuda") for length in lengths])[None]
    tokens = positions.shape[1]
    rule = and_masks(get_causal_mask_mod(), same_document(positions))
    mask = create_block_mask(rule, 1, None, tokens, tokens, device="cuda")
    module = torch.compile(FlexAttention(FlexAttention.Config()), fullgraph=True)
    return lambda q, k, v: module(q, k, v, attention_masks=mask, enable_gqa=True)


def varlen(lengths: list[int]) -> Kernel:
    """Build FlashAttention over documents laid end to end."""
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    longest = max(lengths)

    def run(q, k, v):
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out = varlen_attn(*flat, bounds, bounds, longest, longest, window_size=(-1, 0), enable_gqa=True, num_splits=1)
        return out.view(q.shape)

    return run


def fa4(lengths: list[int]) -> Kernel:
    """Build the attention of flash-attn-4 over documents laid end to end."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    longest = max(lengths)

    def run(q, k, v):
        flat = (x.flatten(0, 1) for x in (q, k, v))
        ends = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
        out = flash_attn_varlen_func(*flat, **ends, causal=True)
        return (out[0] if isinstance(out, tuple) else out).view(q.shape)

    return run


def cudnn(lengths: list[int]) -> Kernel:
    """Build cuDNN's attention, with documents of one length as a batch. Raises ValueError for several lengths."""
    if len(set(lengths)) > 1:
        raise ValueError("documents of several lengths")
    shape = (len(lengths), lengths[0])

    def run(q, k, v):
        batch = (x.view(*shape, *x.shape[2:]).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(q.shape)

    return run


KERNELS = {"flex": flex, "fa2": varlen, "fa4": fa4, "cudnn": cudnn}


def by_document(q, k, v, grad, lengths: list[int]) -> list[torch.Tensor]:
    """Compute output and gradients in float32, one document after the other."""
    parts = [x.detach().float().requires_grad_() for x in (q, k, v)]
    outputs = []
    with sdpa_kernel(SDPBackend.MATH):
        for document in zip(*(x.split(lengths, dim=1) for x in (*parts, grad.float())), strict=True):
            *qkv, output_grad = (x.transpose(1, 2) for x in document)
            output = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
            output.backward(output_grad)
            outputs.append(output.detach().transpose(1, 2))
    return [torch.cat(outputs, 1), *(x.grad for x in parts)]


def relative_error(values: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the error over that of the exact values."""
    return ((values.float() - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    main()
