"""Memory and speed of the chunked LM head: log-probs and entropy of a long row, forward and backward, by chunk size.

    python tests/bench/logprob_memory.py [--tokens 16384] [--hidden 2048] [--vocabulary 151936]
        [--chunks 512 1024 2048 4096 8192] [--no-plain]

bfloat16 hidden states and weights; the loss is the mean log-prob, as in training. `beyond` is the peak of a forward and
backward beyond hidden states and weights; `gradients` is the part of it that every method must return, the gradients of
both; `working` is the rest. `frozen` has no gradient for the weights, as with LoRA. `plain` holds all logits at once.
On a CPU only that it runs is shown, in float32 and uncompiled.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from speed import ROOT, report

sys.path.insert(0, str(ROOT))

from grpo.models.logprob_head import LogprobHead

GIB = 2**30
ROUNDS = 5
CUDA = torch.cuda.is_available()
# Matrix products of [tokens, hidden] and the weights: logits, gradient of the hidden states, gradient of the weights,
# and for "trained" the logits once more in the backward
PRODUCTS = {"trained": 4, "frozen": 2, "plain": 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--chunks", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--plain", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    shape = options.tokens, options.hidden, options.vocabulary
    rows = []
    for chunk in options.chunks:
        for head in ("trained", "frozen"):
            torch.compiler.reset()  # else the second chunk size gets kernels for any size
            figures = measure(*chunked(chunk, head == "frozen", *shape), *shape, PRODUCTS[head])
            rows.append({"head": head, "chunk tokens": chunk} | figures)
            print(rows[-1], flush=True)
    if options.plain:
        figures = measure(*plain(*shape), *shape, PRODUCTS["plain"])
        rows.append({"head": "plain", "chunk tokens": options.tokens} | figures)
    report("logprob_memory", rows, tokens=options.tokens, hidden=options.hidden, vocabulary=options.vocabulary)


def new_weight(hidden: int, vocabulary: int) -> torch.nn.Parameter:
    device, dtype = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
    return torch.nn.Parameter(torch.randn(vocabulary, hidden, device=device, dtype=dtype) * hidden**-0.5)


def chunked(
    chunk: int, frozen: bool, tokens: int, hidden: int, vocabulary: int
) -> tuple[torch.nn.Parameter, Callable[..., torch.Tensor]]:
    """Return the weight of LogprobHead, and its function (hidden states, targets) -> log-probs."""
    sizes = {"in_features": hidden, "out_features": vocabulary, "param_init": {}}
    head = LogprobHead(LogprobHead.Config(**sizes, chunk_tokens=chunk, compile=CUDA))
    head.weight = new_weight(hidden, vocabulary).requires_grad_(not frozen)
    temperatures_BT = torch.ones(1, tokens, device=head.weight.device)
    all_M = torch.arange(tokens, device=head.weight.device)
    return head.weight, lambda hidden_BTD, targets_BT: head(hidden_BTD, targets_BT, temperatures_BT, all_M)[0]


def plain(tokens: int, hidden: int, vocabulary: int) -> tuple[torch.nn.Parameter, Callable[..., torch.Tensor]]:
    """Return the same as `chunked`, without chunks."""
    weight = new_weight(hidden, vocabulary)

    def logprobs(hidden_BTD: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        logits_BTV = (hidden_BTD @ weight.T).float()
        return logits_BTV.gather(-1, targets_BT[..., None])[..., 0] - logits_BTV.logsumexp(-1)

    return weight, logprobs


def measure(
    weight: torch.nn.Parameter,
    logprobs: Callable[..., torch.Tensor],
    tokens: int,
    hidden: int,
    vocabulary: int,
    products: int,
) -> dict[str, float]:
    """Measure GiB beyond hidden states and weights, and milliseconds. The first round compiles."""
    hidden_BTD = torch.randn(1, tokens, hidden, device=weight.device, dtype=weight.dtype).requires_grad_()
    targets_BT = torch.randint(vocabulary, (1, tokens), device=weight.device)
    forward = []
    backward = []
    peak = 0
    for _ in range(ROUNDS + 1):
        weight.grad = hidden_BTD.grad = None
        before = memory()
        start = now()
        loss = -logprobs(hidden_BTD, targets_BT).mean()
        middle = now()
        loss.backward()
        forward.append(middle - start)
        backward.append(now() - middle)
        peak = torch.cuda.max_memory_allocated() - before if CUDA else 0
    milliseconds = [1000 * statistics.median(seconds[1:]) for seconds in (forward, backward)]
    figures = {"forward ms": milliseconds[0], "backward ms": milliseconds[1]}
    figures["TFLOP/s"] = products * 2 * tokens * hidden * vocabulary / sum(milliseconds) / 1e9
    if CUDA:
        gradients = sum(t.grad.nbytes for t in (weight, hidden_BTD) if t.grad is not None)
        sizes = {"beyond GiB": peak, "gradients GiB": gradients, "working GiB": peak - gradients}
        figures |= {name: size / GIB for name, size in sizes.items()}
    return figures


def memory() -> int:
    """Return the bytes that are allocated now, and count the peak from here."""
    if not CUDA:
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
