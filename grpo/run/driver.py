"""What rank 0 alone does: draw prompts, score completions, decide, log. Every other rank only hears of it.

Its methods run inside `comm.on_driver`, in the order of the loop: `next_plan`, `take` (once per round of sampling),
`batch`, `score`, `advantages`, `log`. Left out: everything that several ranks do together.

Layer 3.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from grpo.algorithm.advantages import group_advantages, zero_variance
from grpo.algorithm.losses import kl, try_loss
from grpo.config import GRPOConfig
from grpo.config.layout import describe_layout
from grpo.config.recipes import as_recipe
from grpo.data import streams as data
from grpo.data import toy
from grpo.data.packing import make_batch
from grpo.models import build as models
from grpo.rewards import builtin as rewards
from grpo.rewards.pool import RewardPool, refuse_useless
from grpo.roles.generator import temperature_of
from grpo.run import checkpoint
from grpo.run.eval_metrics import evaluation_metrics, pass_rates
from grpo.run.failures import refuse_bad_input
from grpo.run.log import Ledger, RunLog, failure_lines, rollout_metrics
from grpo.types import Completion, Plan, Prompt, Rollout, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Dynamic sampling draws as many prompts as the share of useful groups so far calls for, but expects no less than this.
LEAST_USEFUL_SHARE = 1 / 8


@dataclass(frozen=True)
class Start:
    """What every rank must know before the first step."""

    step: int
    folder: str
    reference_folder: str
    stop_token_ids: list[int]
    eval_prompts: list[Prompt]
    checkpoint: pathlib.Path | None


class Driver:
    """Prompts, rewards, decisions and the log. Its constructor refuses bad input before any model is loaded."""

    def __init__(self, config: GRPOConfig):
        self.config = config
        with refuse_bad_input():
            columns = [config.data.prompt_column, *config.data.columns]
            rewards.load_functions(config.reward, columns, config.generator.max_completion_tokens)
            try_loss(config.algorithm)
            rows = data.load_rows(config.data.path, config.data.name, config.data.split)
            data.check_columns(rows, columns, config.data.path)
            resume_from = checkpoint.find_run(config.run_dir, resume=config.resume, overwrite=config.overwrite)
            folder = models.resolve_folder(toy.build_if_toy(config.model.path, config.run_dir, rows, config.seed))
            models.check_folder(folder, config.max_sequence_tokens, config.largest_tensor_parallel)
            self.tokenizer = data.load_tokenizer(folder)
            self.stream = data.PromptStream(config.data, self.tokenizer, config.seed, config.sampling)
            wants_eval = config.evaluation.interval > 0
            eval_prompts = data.load_eval_prompts(config.data, config.evaluation, self.tokenizer) if wants_eval else []
            step = 0
            if resume_from is not None:
                state = checkpoint.read_driver_state(resume_from)
                step = state["step"]
                self.stream.load_state_dict(state["data"])
            self.pool = RewardPool(config.reward, config.generator.max_completion_tokens)
        # only now that nothing is refused any more may an earlier run be deleted
        checkpoint.begin_run(config.run_dir, as_recipe(config), fresh=config.overwrite and not config.resume)
        self.run_log = RunLog(config.metrics, config.run_dir, config.num_steps, start_step=step)
        self.stop_token_ids = models.stop_token_ids(folder, self.tokenizer)
        # The function whose value of at least 1 means that a completion passed
        self.pass_function = next(iter(config.reward.functions))
        self.first_step = step
        reference_folder = config.model.reference_path or folder
        self.start = Start(step, folder, reference_folder, self.stop_token_ids, eval_prompts, resume_from)
        self._begin_step()
        print(
            f"{as_recipe(config)}\n{describe_layout(config)} ranks; {config.run_dir}, starting at step {step}",
            flush=True,
        )

    # ---- one step -----------------------------------------------------------------------------------------------

    def next_plan(self, step: int) -> Plan:
        """Everything that is decided about a step before it starts."""
        config, last = self.config, step + 1 == self.config.num_steps

        def due(interval: int) -> bool:
            return interval > 0 and (step + 1) % interval == 0

        self._begin_step()
        # the generators hold the weights of the last sync, or those the run started with
        self.version = max(self.first_step, step - step % config.sync_interval)
        first_syncs = step <= self.first_step + config.sync_interval
        check_due = first_syncs or step % max(config.sync_check_interval, 1) < config.sync_interval
        return Plan(
            step=step,
            prompts=self.stream.draw(config.prompts_per_step),
            check_sync=config.sync_check_interval > 0 and self.version == step and check_due,
            sync=last or due(config.sync_interval),
            save=last or due(config.checkpoint.interval),
            evaluate=config.evaluation.interval > 0 and (last or due(config.evaluation.interval)),
        )

    def _begin_step(self) -> None:
        self.sampled: list[Rollout] = []  # all of the step, group after group
        self.rollouts: list[Rollout] = []  # those it trains on
        self.spare: list[Rollout] = []  # groups of equal rewards that dynamic sampling put aside
        self.num_prompts = self.num_useful = self.num_rounds = 0
        self.metrics: dict[str, float] = {}

    def take(self, prompts: list[Prompt], completions: list[Completion], ledger: Ledger) -> list[Prompt]:
        """Take in one round of sampling; returns the prompts of another round, none once the step is full.

        The rewards are being computed from here on. Only dynamic sampling waits for them: it puts groups whose rewards
        are all equal aside and asks for as many prompts as it expects to need. After `sampling.max_rounds` the step
        goes on with the groups it has; with none at all, with some that were put aside.
        """
        config = self.config
        rollouts = rollouts_of(prompts, completions, self.version, self.tokenizer, self.stop_token_ids)
        self.pool.submit(rollouts, config.group_size)
        self.num_rounds += 1
        self.num_prompts += len(prompts)
        if not config.sampling.dynamic:
            self.rollouts = rollouts
            return []

        with ledger.phase("reward"):
            rollouts = self._collect()
        same_P = zero_variance(rewards_of(rollouts), config.group_size).tolist()
        for group, same in enumerate(same_P):
            rollouts_of_group = rollouts[group * config.group_size : (group + 1) * config.group_size]
            (self.spare if same else self.rollouts).extend(rollouts_of_group)
        self.num_useful += same_P.count(False)
        self.sampled.extend(rollouts)
        missing = config.prompts_per_step - self.num_useful
        if missing > 0 and self.num_rounds < config.sampling.max_rounds:
            useful_share = max(self.num_useful / self.num_prompts, LEAST_USEFUL_SHARE)
            return self.stream.draw(min(math.ceil(missing / useful_share), config.prompts_per_step))
        if missing > 0:
            print(
                f"dynamic sampling: {self.num_useful} of {config.prompts_per_step} groups have different rewards after "
                f"{self.num_rounds} rounds with {self.num_prompts} prompts; the step goes on with "
                + ("these" if self.num_useful else "groups of equal rewards"),
                flush=True,
            )
        refuse_useless(self.sampled)
        self.rollouts = (self.rollouts or self.spare)[: config.completions_per_step]
        return []

    def batch(self) -> TrainBatch:
        """The step's rollouts laid end to end."""
        completions = [r.completion for r in self.rollouts]
        finite = torch.tensor([x for c in completions for x in c.logprobs]).isfinite()
        self.metrics["mismatch/nonfinite_frac"] = 1 - finite.float().mean().item()
        if not finite.any():
            raise RuntimeError("not one log-prob of the sampled tokens is finite: the generator is broken")
        temperatures, group_size = self.config.generator.temperature, self.config.group_size
        return make_batch(
            [r.prompt.ids for r in self.rollouts],
            [c.ids for c in completions],
            [c.logprobs for c in completions],
            [temperature_of(temperatures, i % group_size) for i in range(len(completions))],
        )

    def score(self, ledger: Ledger) -> None:
        """Wait for the rewards of the step's rollouts, which workers computed meanwhile."""
        if not self.config.sampling.dynamic:
            with ledger.phase("reward"):
                self.rollouts = self.sampled = self._collect()
                refuse_useless(self.sampled)

    def _collect(self) -> list[Rollout]:
        rollouts = self.pool.collect()
        for line in failure_lines(rollouts):
            print(f"warning: {line}", flush=True)
        self.stream.record(pass_rates(rollouts, self.config.group_size, self.pass_function))
        return rollouts

    def advantages(self, batch: TrainBatch) -> torch.Tensor:
        """float32 [S]; NaN takes a sequence out of the loss: it has no reward, or mask_truncated leaves it out."""
        algorithm = self.config.algorithm
        rewards_S = rewards_of(self.rollouts)
        if algorithm.kl_in == "reward" and batch.ref_logprobs_C is not None:
            penalty_S = algorithm.kl_coef * sequence_kl(batch, algorithm.kl_estimator)
            self.metrics["reward/kl_penalty"] = penalty_S[~rewards_S.isnan()].mean().item()
            rewards_S = rewards_S - penalty_S
        advantages_S = group_advantages(rewards_S, self.config.group_size, algorithm.advantages)
        if algorithm.mask_truncated:
            truncated_S = torch.tensor([r.completion.truncated for r in self.rollouts])
            advantages_S = advantages_S.masked_fill(truncated_S, math.nan)
        self.rollouts = [
            dataclasses.replace(r, advantage=a) for r, a in zip(self.rollouts, advantages_S.tolist(), strict=True)
        ]
        return advantages_S

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after `step` steps must hold of the driver."""
        return {"step": step, "data": self.stream.state_dict()}

    # ---- the log ------------------------------------------------------------------------------------------------

    def log(self, step: int, stats: dict[str, float], logprob_diff_S: torch.Tensor, ledger: Ledger) -> None:
        """The step's one log call."""
        metrics = rollout_metrics(self.sampled, self.config.group_size) | self.metrics | stats | ledger.close_step()
        if self.config.sampling.dynamic:
            metrics["sampling/rounds"] = self.num_rounds
            metrics["sampling/informative_frac"] = self.num_useful / self.num_prompts
            metrics["sampling/full_frac"] = min(1.0, self.num_useful / self.config.prompts_per_step)
        if self.config.sampling.filters:
            metrics["sampling/filtered"] = self.stream.num_resting
        num_tokens = sum(len(r.prompt.ids) + len(r.completion.ids) for r in self.sampled)
        metrics["tokens_per_second"] = num_tokens / metrics["time/step"]
        if torch.cuda.is_available():
            metrics["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.run_log.log(step, metrics)
        interval = self.config.metrics.samples_interval
        if interval and (step - 1) % interval == 0:
            pairs = zip(self.rollouts, logprob_diff_S.tolist(), strict=True)
            rollouts = [dataclasses.replace(r, mismatch=None if math.isnan(x) else x) for r, x in pairs]
            self.run_log.completions(step, rollouts, prompt_texts(rollouts, self.tokenizer))

    def log_evaluation(
        self, prompts: list[Prompt], greedy: list[Completion], samples: list[Completion], step: int
    ) -> None:
        """Score held-out completions and log them."""
        log_evaluation(
            self.config, self.run_log, self.pool, self.tokenizer, self.stop_token_ids, prompts, greedy, samples, step
        )

    def finish(self) -> None:
        """Close the log and end the reward processes."""
        self.pool.close()
        self.run_log.close()
        print(f"done; everything is in {self.config.run_dir}", flush=True)


def log_evaluation(
    config: GRPOConfig,
    run_log: RunLog,
    pool: RewardPool,
    tokenizer: "PreTrainedTokenizerBase",
    stop_token_ids: Sequence[int],
    prompts: list[Prompt],
    greedy: list[Completion],
    samples: list[Completion],
    step: int,
) -> None:
    """Score the held-out completions of the weights after `step` steps, and write metrics and completions."""
    scored: dict[str, list[Rollout]] = {"greedy": [], "sample": []}
    for kind, completions in (("greedy", greedy), ("sample", samples)):
        if not completions:  # no samples were asked for
            continue
        rollouts = rollouts_of(prompts, completions, step, tokenizer, stop_token_ids)
        rollouts = pool.score(rollouts, len(completions) // len(prompts))
        for line in failure_lines(rollouts):
            print(f"warning: evaluation: {line}", flush=True)
        run_log.evaluation_completions(step, kind, rollouts, prompt_texts(rollouts, tokenizer))
        scored[kind] = rollouts
    pass_function = next(iter(config.reward.functions))
    metrics = evaluation_metrics(scored["greedy"], scored["sample"], config.evaluation.num_samples, pass_function)
    run_log.log_evaluation(step, metrics)


def rollouts_of(
    prompts: list[Prompt],
    completions: list[Completion],
    version: int,
    tokenizer: "PreTrainedTokenizerBase",
    stop_token_ids: Sequence[int],
) -> list[Rollout]:
    """Join prompts and their completions, group after group, decode, and check which weights sampled them.

    Raises:
        RuntimeError: a completion was sampled with weights of another version.
    """
    versions = {c.version for c in completions} - {version}
    if versions:
        raise RuntimeError(
            f"completions of version {version} were sampled with weights of versions {sorted(versions)}: a weight "
            "sync was skipped or repeated"
        )
    group_size = len(completions) // len(prompts)

    def text(ids: list[int]) -> str:
        ends = ids and ids[-1] in stop_token_ids
        return tokenizer.decode(ids[:-1] if ends else ids, skip_special_tokens=False)

    return [Rollout(prompts[i // group_size], c, text(c.ids)) for i, c in enumerate(completions)]


def prompt_texts(rollouts: list[Rollout], tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """The prompts as the model saw them, special tokens included."""
    return [tokenizer.decode(r.prompt.ids, skip_special_tokens=False) for r in rollouts]


def rewards_of(rollouts: list[Rollout]) -> torch.Tensor:
    """float32 [S]; NaN where a rollout has no reward."""
    return torch.tensor([math.nan if r.reward is None else r.reward for r in rollouts])


def sequence_kl(batch: TrainBatch, estimator: str) -> torch.Tensor:
    """KL from what sampled each completion to the reference, summed over its tokens: float32 [S], nats."""
    finite_C = batch.generator_logprobs_C.isfinite()
    kl_C = kl(batch.generator_logprobs_C, batch.ref_logprobs_C, finite_C, estimator)
    sequence_C = torch.arange(batch.num_sequences).repeat_interleave(batch.completion_lengths_S)
    return torch.zeros(batch.num_sequences).index_add(0, sequence_C, kl_C)
