"""The sync check without engine and model: which completion belongs to which prompt."""

from types import SimpleNamespace

import torch

from grpo.roles import weight_sync
from grpo.types import Completion, Prompt, Requests, TrainBatch


class Generator:
    """An engine for which each token after a prompt has the log-prob -1 / the prompt's token."""

    only_adapters = False

    def generate(self, requests: Requests, group_size: int, max_tokens: int) -> list[Completion]:
        found = []
        for prompt in requests.prompts:
            logprobs_T = torch.full((3,), -1 / prompt.ids[0])
            found.append(Completion.of(torch.tensor([7, 8, 9]), logprobs_T, truncated=True, index=prompt.index))
        return found

    def forget_prefixes(self) -> None:
        pass


class Trainer:
    """A policy with the same log-probs."""

    only_adapters = False

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        first_S = batch.ids_N[batch.starts_S]
        return -1 / first_S[batch.owner_N]


def test_prompts_may_come_in_any_order(monkeypatch):
    """Groups that went back to the buffer stand before older ones; completions are gathered in their own order."""
    monkeypatch.setattr(weight_sync, "gather_completions", lambda found, _: sorted(found, key=lambda one: one.index))
    monkeypatch.setattr(weight_sync, "send_batch", lambda batch, _: batch)
    prompts = [Prompt(index, [1 + index]) for index in (7, 8, 0)]
    roles = SimpleNamespace(is_driver=True)
    weight_sync.check_sync(prompts, Trainer(), Generator(), 1e-6, roles)
