"""The sync check without engine and model: which completion belongs to which prompt, and which differences pass."""

from types import SimpleNamespace

import pytest
import torch

from grpo.roles import weight_sync
from grpo.types import Prompt, Requests, Rollout, TrainBatch
from tests.rollouts import completion


class Generator:
    """An engine for which each token after a prompt has the log-prob -1 / the prompt's token."""

    def generate(self, requests: Requests, max_tokens: int) -> list[Rollout]:
        found = []
        for request in requests.requests:
            logprobs = [-1 / request.prompt.ids[0]] * 3
            found.append(completion([7, 8, 9], logprobs, request.prompt, request.index, ended_by="tokens"))
        return found

    def forget_prefixes(self) -> None:
        pass


class Trainer:
    """A policy with the same log-probs, if nothing is added."""

    def __init__(self, added: float = 0.0):
        self.added = added

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        first_S = batch.ids_N[batch.starts_S]
        return -1 / first_S[batch.owner_N] + self.added


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Gather in the order of the numbers, as several generators do, and send nothing."""
    monkeypatch.setattr(weight_sync, "gather_rollouts", lambda found, *_: sorted(found, key=lambda one: one.index))
    monkeypatch.setattr(weight_sync, "send_batch", lambda batch, _: batch)


def check(trainer: Trainer, dtype: str, device: str) -> None:
    prompts = [Prompt(index, [1 + index]) for index in (7, 8, 0)]
    roles = SimpleNamespace(is_driver=True, device=torch.device(device))
    weight_sync.check_sync(prompts, trainer, Generator(), dtype, roles)


def test_prompts_may_come_in_any_order():
    """Groups that went back to the buffer stand before older ones; completions are gathered in their own order."""
    check(Trainer(), "float32", "cpu")


@pytest.mark.parametrize(
    ("dtype", "device", "allowed", "refused"),
    [("float32", "cpu", 1e-5, 0.002), ("float32", "cuda", 0.0019, 0.02), ("bfloat16", "cuda", 0.05, 0.2)],
)
def test_what_precision_explains_is_no_other_weights(dtype, device, allowed, refused):
    """Differences that were measured pass: in float32 1e-5 nats on a CPU, 0.0019 on an H200 (TF32 in attention)."""
    check(Trainer(allowed), dtype, device)
    with pytest.raises(RuntimeError, match="does not hold the policy's weights"):
        check(Trainer(refused), dtype, device)
