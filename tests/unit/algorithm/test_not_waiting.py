"""What runs between a micro-batch's kernels reads nothing back: on fake tensors, which have no values to read."""

import dataclasses

import grpo.models  # noqa: F401  before torchtitan, whose device it sets

# isort: split

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from grpo.config import PAPER_DEFAULTS, AlgorithmConfig, GRPOConfig
from grpo.data.batches import make_batch
from grpo.metrics import StepMetrics
from grpo.models.families import titan_config
from grpo.types import KeptIds, MicroBatch, TrainBatch
from tests.rollouts import sequence
from tests.rows import one_row
from train_grpo import grpo_objective

LENGTHS = [5, 9, 3]
CORRECTIONS = ("truncate", "mask_tokens", "mask_sequences")
ALGORITHMS = {name: {"loss": name} for name in PAPER_DEFAULTS}
ALGORITHMS |= {kind: {"importance_correction": kind} for kind in CORRECTIONS}
ALGORITHMS |= {"k3_k2": {"kl_estimator": "k3_k2_gradient"}, "k3_weighted": {"kl_estimator": "k3_weighted"}}


def step() -> TrainBatch:
    samples = [sequence(torch.arange(n), torch.arange(n) > 1, -torch.rand(n), prompt_tokens=2) for n in LENGTHS]
    batch = make_batch(samples)
    values_N = torch.rand(batch.num_tokens)
    return dataclasses.replace(batch, advantages_N=values_N, old_logprobs_N=-values_N, ref_logprobs_N=-values_N)


def on_fake_device(micro: MicroBatch, mode: FakeTensorMode) -> MicroBatch:
    def faked(value):
        if isinstance(value, tuple):
            return type(value)(*map(faked, value))
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    return MicroBatch(**{name: faked(value) for name, value in vars(micro).items()})


@pytest.mark.parametrize("changes", ALGORITHMS.values(), ids=ALGORITHMS)
def test_the_objective_and_its_metrics_do_not_wait_for_the_device(changes):
    algorithm = AlgorithmConfig(kl_coef=0.1, entropy_coef=0.1, old_logprobs="policy", **changes)
    config = GRPOConfig(algorithm=algorithm.resolved)
    micro = one_row(step(), share_prompts=False)
    objectives = {first: grpo_objective(config, step(), 0.1, first) for first in (True, False)}
    with FakeTensorMode() as mode:
        micro = on_fake_device(micro, mode)
        logprobs_BT, entropy_BT = torch.zeros(1, 17, requires_grad=True), torch.zeros(1, 17)
        metrics = StepMetrics(len(LENGTHS))
        for first in (True, False):
            loss, measured = objectives[first](micro, logprobs_BT * 1.0, entropy_BT)
            loss.backward()
            metrics.add(micro, loss.detach(), measured)
        assert logprobs_BT.grad.shape == (1, 17) and "mismatch/mean" in measured
        with pytest.raises(DataDependentOutputException):
            metrics.reduce(None)  # so this test can fail


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_the_model_does_not_wait_for_the_device(keep_logits, shares, keeps):
    """With flash attention, whose kernels have a fake form; without it, flex attention's masks are torchtitan's."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    hf = transformers.AutoConfig.for_model("qwen3", **sizes, num_attention_heads=2, num_key_value_heads=1)
    config, micro = titan_config(hf, "flash", 4, keep_logits=keep_logits), one_row(step(), 1, shares)
    assert (micro.shared is not None) == shares
    if keeps:
        places_M = torch.arange(len(micro.scored_M))
        micro = dataclasses.replace(micro, kept=KeptIds(places_M.int(), places_M))
    with FakeTensorMode() as mode:
        model = config.build()
        model.init_weights(buffer_device=None)
        micro = on_fake_device(micro, mode)
        logprobs_BT, entropy_BT = model(micro)
        (logprobs_BT.sum() + entropy_BT.sum()).backward()
        assert logprobs_BT.shape == micro.ids_BT.shape and all(p.grad is not None for p in model.parameters())
