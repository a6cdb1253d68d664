"""FlashAttention's two kernels in plain torch, one document after the other: for what leads to them, without a GPU.

They have the arguments of the package's and check them.
"""

from collections.abc import Iterator

import torch


def forward(q, k, v, *, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, return_lse, **same):
    """(output [T, N, H], logsumexp [N, T], and what else the package returns)."""
    assert causal and return_lse and same["cu_seqlens_k"] is cu_seqlens_q and same["max_seqlen_k"] == max_seqlen_q
    assert max_seqlen_q == cu_seqlens_q.diff().max() and cu_seqlens_q.dtype == torch.int32
    outputs, sums = [], []
    for q_NDH, k_NDH, v_NDH in documents(cu_seqlens_q.diff().tolist(), q, k, v):
        p_NDD, sums_ND = probabilities(q_NDH, k_NDH, softmax_scale)
        outputs.append((p_NDD @ v_NDH).transpose(0, 1))
        sums.append(sums_ND)
    return torch.cat(outputs), torch.cat(sums, 1).float(), None, None, None


def backward(q, k, v, out, grad, logsumexp, *, cu_seqlens_q, softmax_scale, causal, deterministic, **same):
    """Gradients of q, k and v: Dao et al. 2022, arXiv:2205.14135, appendix B."""
    assert causal and deterministic and grad.is_contiguous() and logsumexp.shape == (q.shape[1], len(q))
    found = []
    for q_NDH, k_NDH, v_NDH, out_NDH, grad_NDH in documents(cu_seqlens_q.diff().tolist(), q, k, v, out, grad):
        p_NDD, _ = probabilities(q_NDH, k_NDH, softmax_scale)
        inner = grad_NDH @ v_NDH.transpose(1, 2) - (grad_NDH * out_NDH).sum(-1, keepdim=True)
        scores_NDD = softmax_scale * p_NDD * inner
        sums = scores_NDD @ k_NDH, scores_NDD.transpose(1, 2) @ q_NDH, p_NDD.transpose(1, 2) @ grad_NDH
        heads = q.shape[1], k.shape[1], v.shape[1]
        found.append([x.unflatten(0, (n, -1)).sum(1).transpose(0, 1) for x, n in zip(sums, heads, strict=True)])
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def documents(lengths: list[int], *values_TNH: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """[N, D, H] of each document; keys and values once for each query head."""
    for parts in zip(*(x.split(lengths) for x in values_TNH), strict=True):
        num_heads = parts[0].shape[1]
        yield [x.transpose(0, 1).repeat_interleave(num_heads // x.shape[1], 0) for x in parts]


def probabilities(q_NDH: torch.Tensor, k_NDH: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(of each query over its keys [N, D, D], their logsumexp [N, D])."""
    scores = scale * q_NDH @ k_NDH.transpose(1, 2)
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)
