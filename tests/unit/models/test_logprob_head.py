"""The LM head's values and gradients against plain log_softmax, whatever the chunks, with a head that learns or not."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from grpo.models.logprob_head import LogprobHead
from grpo.types import KeptIds

TOKENS, WIDTH, VOCABULARY = 13, 8, 37
ALL = torch.arange(TOKENS)


def new_head(**options) -> LogprobHead:
    torch.manual_seed(0)
    head = LogprobHead(LogprobHead.Config(in_features=WIDTH, out_features=VOCABULARY, param_init={}, **options))
    torch.nn.init.normal_(head.weight)
    return head


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize("trains_head", [True, False])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
@pytest.mark.parametrize("logprob_coef", [0.0, 1.0])
@pytest.mark.parametrize("keeps", [False, True])
def test_equals_log_softmax_where_it_is_wanted(chunk_tokens, trains_head, entropy_coef, logprob_coef, keeps):
    """Over all ids, or over those that were kept."""
    head, places = new_head(chunk_tokens=chunk_tokens), torch.tensor([0, 1, 4, 5, 6, 9, 12, 13])
    head.weight.requires_grad_(trains_head)
    hidden = torch.randn(2, 7, WIDTH, requires_grad=True)
    targets = torch.randint(VOCABULARY, (2, 7))
    temperatures = torch.rand(2, 7) + 0.5
    coefs = torch.randn(2, 7)
    is_kept, kept = torch.ones(2, 7, VOCABULARY, dtype=torch.bool), None
    if keeps:  # 1 to 37 of 37 ids, the sampled one among them
        is_kept = torch.rand(2, 7, VOCABULARY) < torch.rand(2, 7, 1)
        is_kept.scatter_(2, targets[..., None], True)
        place, ids = is_kept.view(14, -1)[places].nonzero()[torch.randperm(int(is_kept.view(14, -1)[places].sum()))].T
        kept = KeptIds(ids.int(), place)

    def outcome(logprobs, entropy):
        head.weight.grad = hidden.grad = None
        loss = (logprob_coef * coefs * logprobs).sum() if logprob_coef else torch.zeros(())
        loss = loss + (entropy_coef * coefs * entropy).sum() if entropy_coef else loss
        if loss.requires_grad:
            loss.backward()
        return [logprobs, entropy, hidden.grad, head.weight.grad]

    wanted = torch.zeros(14, dtype=torch.bool).index_fill(0, places, True).view(2, 7)
    logits = (hidden @ head.weight.T / temperatures[..., None]).masked_fill(~is_kept, -torch.inf)
    logp = logits.log_softmax(-1).where(is_kept, 0)
    logprobs, entropy = logp.gather(-1, targets[..., None])[..., 0], -(logp.exp() * logp).where(is_kept, 0).sum(-1)
    expected = outcome(logprobs.where(wanted, 0), entropy.where(wanted, 0))
    for found, right in zip(outcome(*head(hidden, targets, temperatures, places, kept)), expected, strict=True):
        assert (found is None) == (right is None)
        if right is not None:
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
            assert not found[right == 0].any()  # exactly, where nothing is wanted


def test_kept_logits_change_no_digit():
    outcomes = []
    for keep_logits in (False, True):
        head = new_head(chunk_tokens=5, keep_logits=keep_logits)
        hidden = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
        of_tokens = torch.randint(VOCABULARY, (1, TOKENS)), torch.rand(1, TOKENS) + 0.5
        logprobs, entropy = head(hidden, *of_tokens, ALL)
        (logprobs + 0.3 * entropy).sum().backward()
        outcomes.append([logprobs, entropy, hidden.grad, head.weight.grad])
    for without, kept in zip(*outcomes, strict=True):
        assert torch.equal(without, kept)


def test_compiled_twice_for_any_number_of_tokens(monkeypatch):
    """Both functions of a chunk, for whole chunks and rests: first for one size, then for all."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    head, plain = new_head(chunk_tokens=64, compile=True), new_head(chunk_tokens=64)
    hidden = torch.randn(1, 256, WIDTH, requires_grad=True)
    of_tokens = torch.randint(VOCABULARY, (1, 256)), torch.rand(1, 256) + 0.5
    for number in (64, 80, 176, 32, 64, 208):
        gradients = []
        for one in (head, plain):
            logprobs, _ = one(hidden, *of_tokens, torch.arange(number))
            gradients += torch.autograd.grad(logprobs.sum(), hidden)
        torch.testing.assert_close(*gradients)
    assert counter.frame_count == 2 * 2
