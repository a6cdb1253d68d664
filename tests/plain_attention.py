"""FlashAttention's two kernels in plain torch, one document after the other: tests of their callers need no GPU.

They have the arguments of the package's kernels, and check them.
"""

from collections.abc import Iterator

import torch


def forward(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size_left, return_lse, **longest):
    """Return output [T, N, H], logsumexp [N, T], and what else the package returns."""
    assert causal and return_lse
    check(cu_seqlens_q, len(q), longest["max_seqlen_q"])
    check(cu_seqlens_k, len(k), longest["max_seqlen_k"])
    outputs = []
    sums = []
    for q_NQH, k_NKH, v_NKH in documents((cu_seqlens_q, q), (cu_seqlens_k, k, v)):
        p_NQK, sums_NQ = probabilities(q_NQH, k_NKH, softmax_scale, window_size_left)
        outputs.append((p_NQK @ v_NKH).transpose(0, 1))
        sums.append(sums_NQ)
    return torch.cat(outputs), torch.cat(sums, 1).float(), None, None, None


def backward(
    q,
    k,
    v,
    out,
    grad,
    logsumexp,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    softmax_scale,
    causal,
    window_size_left,
    deterministic,
    **longest,
):
    """Return the gradients of q, k and v: Dao et al. 2022, arXiv:2205.14135, appendix B."""
    assert causal and deterministic and grad.is_contiguous() and logsumexp.shape == (q.shape[1], len(q))
    gradients = []  # of each document
    for q_NQH, out_NQH, grad_NQH, k_NKH, v_NKH in documents((cu_seqlens_q, q, out, grad), (cu_seqlens_k, k, v)):
        p_NQK, _ = probabilities(q_NQH, k_NKH, softmax_scale, window_size_left)
        inner = grad_NQH @ v_NKH.transpose(1, 2) - (grad_NQH * out_NQH).sum(-1, keepdim=True)
        scores_NQK = softmax_scale * p_NQK * inner
        sums = scores_NQK @ k_NKH, scores_NQK.transpose(1, 2) @ q_NQH, p_NQK.transpose(1, 2) @ grad_NQH
        heads = q.shape[1], k.shape[1], v.shape[1]
        gradients.append([x.unflatten(0, (n, -1)).sum(1).transpose(0, 1) for x, n in zip(sums, heads, strict=True)])
    return tuple(torch.cat(parts) for parts in zip(*gradients, strict=True))


def check(bounds: torch.Tensor, total: int, longest: int) -> None:
    """Check what the kernels take for granted."""
    assert bounds.dtype == torch.int32 and (bounds[0], bounds[-1], bounds.diff().max()) == (0, total, longest)


def documents(*packed: tuple[torch.Tensor, ...]) -> Iterator[list[torch.Tensor]]:
    """Yield [N, D, H] of each document, from (bounds, values [T, N, H] ..); keys and values once per query head."""
    num_heads = packed[0][1].shape[1]
    parts = [x.split(bounds.diff().tolist()) for bounds, *values in packed for x in values]
    for of_document in zip(*parts, strict=True):
        yield [x.transpose(0, 1).repeat_interleave(num_heads // x.shape[1], 0) for x in of_document]


def probabilities(
    q_NQH: torch.Tensor, k_NKH: torch.Tensor, scale: float, before: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each query's probabilities of `before` keys and its own [N, Q, K], and their logsumexp [N, Q].

    The last query and the last key are the same token. before: None for all earlier keys.
    """
    scores = scale * q_NQH @ k_NKH.transpose(1, 2)
    own = scores.shape[2] - scores.shape[1]
    seen = torch.ones_like(scores).tril(own).bool()
    if before is not None:
        seen &= torch.ones_like(scores).triu(own - before).bool()
    scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)
