"""The updates of a step with a real trainer: learning rates, weight decay, and whose the old log-probs are."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from grpo.config import AlgorithmConfig, GRPOConfig, ModelConfig, TrainerConfig
from grpo.data.batches import make_batch
from grpo.metrics import StepMetrics
from grpo.models.hf_folder import read_hf_config
from grpo.roles.trainer import Trainer
from grpo.types import TrainBatch
from tests.rollouts import sequence
from tests.tiny_models import make_tiny
from train_grpo import update

pytestmark = pytest.mark.usefixtures("one_rank")
ROLES = SimpleNamespace(device=torch.device("cpu"), is_driver=False)
IN_PAIRS = GRPOConfig(algorithm=AlgorithmConfig().resolved, group_size=2)
TWO_BY_TWO = AlgorithmConfig(num_mini_batches=2, num_epochs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "qwen3-tied")


def trainer_of(folder: str, num_steps: int = 10, **options) -> Trainer:
    options = {"learning_rate": 0.01, "compile": False, "activation_checkpointing": "none"} | options
    return Trainer(ModelConfig(dtype="float32"), TrainerConfig(**options), folder, num_steps, ROLES)


def step_batch() -> TrainBatch:
    """Two groups of two sequences: one prompt token and three completion tokens each, advantages 1 and -1."""
    mask_T = torch.tensor([False, True, True, True])
    samples = [sequence(torch.tensor([5, 6 + i, 7, 8 - i]), mask_T, torch.full((4,), -3.0)) for i in range(4)]
    return dataclasses.replace(make_batch(samples), advantages_N=torch.tensor([1.0, -1, -1, 1]).repeat_interleave(4))


def take_step(trainer: Trainer, algorithm: AlgorithmConfig) -> dict[str, float]:
    metrics = StepMetrics(4)
    update(GRPOConfig(algorithm=algorithm.resolved, group_size=2), trainer, step_batch(), 0.0, metrics)
    return metrics.means()


def test_what_is_not_finite_outside_the_mask_skips_no_update(folder):
    trainer = trainer_of(folder)
    batch = step_batch()
    junk_N = torch.full((16,), math.nan)
    fields = {name: junk_N.masked_fill(batch.loss_mask_N, -3.0) for name in ("old_logprobs_N", "ref_logprobs_N")}
    batch = dataclasses.replace(batch, **fields, advantages_N=batch.advantages_N.where(batch.loss_mask_N, math.inf))
    trainer.forward_backward(batch, lambda micro, logprobs_BT, _: (logprobs_BT.sum(), {}), StepMetrics(4))
    assert trainer.optimizer_step()["skipped_frac"] == 0


def test_a_schedule_of_the_kl_without_a_reference_is_refused(folder):
    """Written into the script, it would change nothing, and nobody would see it."""
    trainer = trainer_of(folder)
    with pytest.raises(ValueError, match="no reference is loaded: set algorithm.kl_coef above 0"):
        update(IN_PAIRS, trainer, step_batch(), 0.5, StepMetrics(4))


@pytest.mark.filterwarnings("error")
def test_in_a_step_in_which_no_token_counts_nothing_moves_but_the_rate(folder):
    """Not even by momentum, and the metrics do not say 0. As a first step it is no fault of the schedule for torch."""
    trainer = trainer_of(folder, warmup_steps=3)
    batch = step_batch()
    batch = dataclasses.replace(batch, loss_mask_N=torch.zeros_like(batch.loss_mask_N))
    for rate in (1, 3):
        before = copy.deepcopy(trainer.model.module.state_dict())
        metrics = StepMetrics(4)
        update(IN_PAIRS, trainer, batch, 0.0, metrics)
        means = metrics.means()
        assert means["learning_rate"] == pytest.approx(0.01 * rate / 3)
        assert means["loss"] == means["grad_norm"] == means["packing/padding_frac"] == 0
        assert math.isnan(means["entropy"]) and set(metrics.rollout_means(batch.rollout_S)) == {None}
        assert all(torch.equal(value, before[name]) for name, value in trainer.model.module.state_dict().items())
        take_step(trainer, AlgorithmConfig())


# Ten steps, of which two warm up; 8 steps lead from the peak to 0.2 of it, which an eleventh would have
RATES = {
    "constant": [0.5] + [1] * 9,
    "linear": [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3],
    "cosine": [0.5, 1] + [0.2 + 0.4 * (1 + math.cos(math.pi * n / 8)) for n in range(8)],
}


@pytest.mark.parametrize("schedule", RATES)
def test_the_rates_of_ten_steps(folder, schedule):
    """They follow the steps, however many updates a step has."""
    trainer = trainer_of(folder, schedule=schedule, warmup_steps=2, min_lr_ratio=0.2)
    rates = [take_step(trainer, TWO_BY_TWO)["learning_rate"] for _ in range(10)]
    assert rates == pytest.approx([0.01 * rate for rate in RATES[schedule]])


@pytest.mark.parametrize("options", [{}, {"moments": "bfloat16"}, {"optimizer": "muon"}], ids=str)
def test_a_checkpoint_before_the_first_update_changes_none(folder, options):
    """As after steps that were skipped. Two updates by moments that torch makes are those of trainers with our own."""
    plain, saved, resumed = (trainer_of(folder, **options) for _ in range(3))
    for part in plain.optimizer:
        part.state.clear()
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    for trainer in (plain, saved, resumed):
        for _ in range(2):
            take_step(trainer, AlgorithmConfig())
    for trainer in (saved, resumed):
        pairs = zip(plain.model.module.parameters(), trainer.model.module.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_trainer_takes_rates_and_decays_from_its_own_config(folder, optimizer):
    """A checkpoint has them too, but `--allow-changes` means the new ones, from the first step on."""
    first = trainer_of(folder, optimizer=optimizer)
    for _ in range(3):
        take_step(first, AlgorithmConfig())
    changed = {"learning_rate": 0.001, "weight_decay": 0.5, "adam_beta1": 0.8, "adam_beta2": 0.7, "adam_eps": 1e-6}
    second = trainer_of(folder, optimizer=optimizer, schedule="linear", **changed)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for part in second.optimizer:
        (group,) = part.param_groups
        assert group["weight_decay"] == 0.5
        if isinstance(part, torch.optim.AdamW):
            assert group["betas"] == (0.8, 0.7) and group["eps"] == 1e-6
    # the fourth and fifth of ten steps, over which a linear schedule falls to 0
    rates = [take_step(second, AlgorithmConfig())["learning_rate"] for _ in range(2)]
    assert rates == pytest.approx([0.0007, 0.0006])


def adamw(
    weight: torch.Tensor, gradients: list[torch.Tensor], dtype: torch.dtype = torch.float32, decay: float = 0.0
) -> torch.Tensor:
    """The weight after one update for each gradient (arXiv:1412.6980), moments held in `dtype` between them."""
    first, second = torch.zeros_like(weight, dtype=dtype), torch.zeros_like(weight, dtype=dtype)
    for step, gradient in enumerate(gradients, 1):
        m, v = 0.9 * first.float() + 0.1 * gradient, 0.95 * second.float() + 0.05 * gradient**2
        weight = weight * (1 - 0.01 * decay) - 0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        first, second = m.to(dtype), v.to(dtype)
    return weight


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_moments_are_held_in_their_dtype_and_updates_computed_in_float32(folder, moments):
    """A trainer that takes over after three updates makes the other two; all stay close to those of float32."""
    one, other = (trainer_of(folder, moments=str(moments).removeprefix("torch.")) for _ in range(2))
    draw = torch.Generator().manual_seed(0)
    starts = [p.detach().clone() for p in one.model.module.parameters()]
    gradients = [[torch.randn(start.shape, generator=draw) for _ in range(5)] for start in starts]
    for step in range(5):
        if step == 3:
            other.load_state_dict(copy.deepcopy(one.state_dict()))
            held = {name: value.dtype for name, value in other.state_dict()["optimizer"].items() if "exp_avg" in name}
            assert len(held) == 2 * len(starts) and set(held.values()) == {moments}
        for trainer in (one, other):
            for parameter, given in zip(trainer.model.module.parameters(), gradients, strict=True):
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad.copy_(given[step])
            trainer.optimizer.step()
    for trainer in (one, other):
        for end, start, given in zip(trainer.model.module.parameters(), starts, gradients, strict=True):
            moved = end.detach() - start
            exact, expected = (adamw(start, given, dtype) - start for dtype in (torch.float32, moments))
            assert (moved - expected).norm() < 1e-4 * moved.norm()  # a tie may round to the other side
            assert (moved - exact).norm() < 5e-3 * moved.norm()


def muon(weight: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """The weight after one update for each gradient (arXiv:2502.16982): momentum 0.95, Nesterov's, weight decay 0.1."""
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        x = 0.05 * gradient + 0.95 * momentum
        x = x / x.norm()
        for _ in range(5):  # Newton-Schulz
            x = 3.4445 * x - 4.775 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
        singular = torch.linalg.svdvals(x)
        assert singular.median() > 0.6 and singular.max() < 1.3  # most of a random matrix's are near 1
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * 0.2 * max(weight.shape) ** 0.5 * x
    return weight


def test_muon_updates_the_matrices_of_blocks_and_adamw_the_rest(folder):
    """Two updates each, the second by a trainer that took over; Newton-Schulz runs in bfloat16, of 8 bits."""
    first, second = (trainer_of(folder, optimizer="muon", weight_decay=0.1) for _ in range(2))
    starts = {name: p.detach().clone() for name, p in first.model.module.named_parameters()}
    draw = torch.Generator().manual_seed(0)
    gradients = {name: [torch.randn(start.shape, generator=draw) for _ in range(2)] for name, start in starts.items()}
    for step, trainer in enumerate((first, second)):
        if step:
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        for name, parameter in trainer.model.module.named_parameters():
            parameter.grad = gradients[name][step].clone()
        trainer.optimizer.step()
    by_muon = 0
    for name, end in second.model.module.named_parameters():
        start, given = starts[name], gradients[name]
        is_matrix = name.startswith("layers.") and start.ndim == 2
        by_muon += is_matrix
        wanted = muon(start, given) if is_matrix else adamw(start, given, decay=0.1)
        # twice 8 bits of rounding through five products; AdamW's own moves are compared to float32
        assert (end.detach() - wanted).norm() < (3e-2 if is_matrix else 1e-4) * (wanted - start).norm(), name
    assert by_muon == 7 * len(first.model.module.layers)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_without_a_gradient_muon_stands_still(folder, optimizer):
    """A step of equal rewards has no gradient. AdamW goes on less and less, a Muon update would be as large as ever."""
    trainer = trainer_of(folder, optimizer=optimizer, weight_decay=0.1)
    take_step(trainer, AlgorithmConfig())
    before = [p.detach().clone() for p in trainer.model.module.parameters()]
    batch = dataclasses.replace(step_batch(), advantages_N=torch.zeros(16))
    metrics = StepMetrics(4)
    update(IN_PAIRS, trainer, batch, 0.0, metrics)
    assert metrics.means()["grad_norm"] == 0
    after = trainer.model.module.parameters()
    has_moved = any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert has_moved == (optimizer == "adamw")


@pytest.mark.parametrize(
    ("optimizer", "kind", "moments"),
    [("adamw", "qwen2-untied", "float32"), ("muon", "qwen2-untied", "bfloat16"), ("muon", "qwen3_5", "bfloat16")],
)
def test_the_arithmetic_of_memory_counts_what_a_trainer_holds(tmp_path, optimizer, kind, moments):
    """Weights, gradients and moments, of a model with biases or with states, which AdamW updates."""
    memory = pytest.importorskip("grpo.features.machine.memory")
    folder = make_tiny(tmp_path, kind)
    trainer = trainer_of(folder, optimizer=optimizer, moments=moments)
    parameters = list(trainer.model.module.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    trainer.optimizer.step()
    moment_tensors = [
        value
        for part in trainer.optimizer
        for state in part.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    held = parameters + [parameter.grad for parameter in parameters] + moment_tensors
    sizes = memory.sizes_of(read_hf_config(folder))
    needs = memory.Needs(GRPOConfig(trainer=trainer.config), sizes, {}, memory.look_at_device())
    counted = needs.states * 2**30 + 4 * needs.num_trained
    off = 1e-6 if optimizer == "adamw" else 0.15  # it takes all of a block for matrices
    assert counted == pytest.approx(sum(tensor.nbytes for tensor in held), rel=off)


@pytest.mark.parametrize("num_epochs", [1, 2])
@pytest.mark.parametrize("old_logprobs", ["policy", "generator"])
def test_all_updates_of_a_step_compare_with_one_policy(folder, old_logprobs, num_epochs, monkeypatch):
    """With that at the start of the step, or with the generator: not with the one that the update before left."""
    trainer, batch, found = trainer_of(folder), step_batch(), []
    policy_N = trainer.logprobs(batch)
    start_N = policy_N if old_logprobs == "policy" else batch.generator_logprobs_N
    real = trainer.forward_backward

    def forward_backward(mini_batch, *arguments):
        found.append(mini_batch.old_logprobs_N)
        real(mini_batch, *arguments)

    monkeypatch.setattr(trainer, "forward_backward", forward_backward)
    algorithm = AlgorithmConfig(num_mini_batches=2, num_epochs=num_epochs, old_logprobs=old_logprobs)
    metrics, mask_N = take_step(trainer, algorithm), batch.loss_mask_N
    assert len(found) == 2 * num_epochs and all(len(old_N) == 8 for old_N in found)
    for epoch in (found[:2], found[2:])[:num_epochs]:
        assert torch.equal(torch.cat(epoch)[mask_N], start_N[mask_N])
    # the policy at the start is known in every update, or, if it is the generator's, in the first alone
    apart_N = (policy_N - batch.generator_logprobs_N).abs().view(2, 8)
    apart_N = apart_N if old_logprobs == "policy" else apart_N[:1]
    assert metrics["mismatch/mean"] == pytest.approx(apart_N[mask_N.view(2, 8)[: len(apart_N)]].mean().item(), rel=1e-5)
    moved_N = (trainer.logprobs(batch) - start_N)[mask_N].abs()
    assert moved_N.min() > 1e-3  # the comparison means something
