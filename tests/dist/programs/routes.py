"""An engine whose routers choose as no trainer's would: what it sampled is right only where its choice is replayed.

Argument: FOLDER, in which it makes a random mixture of experts. A token whose best expert is the first one takes the
worst one beside it. Completions in one go, behind preemptions, carried over and as conversations.
"""

import pathlib
import sys
from dataclasses import replace

import torch

from grpo.config import DataConfig, GeneratorConfig, GRPOConfig, ModelConfig, RolesConfig, TrainerConfig
from grpo.data.batches import make_batch, sample_of
from grpo.data.toy import make_model
from grpo.roles.comm import flatten_completions, unflatten_completions
from grpo.roles.engine_routes import expert_layers
from grpo.roles.generator import Generator
from grpo.roles.metrics import StepMetrics
from grpo.roles.process_groups import close_roles, setup_roles
from grpo.roles.trainer import Trainer
from grpo.run.groups import join
from grpo.types import FREE, Completion, Prompt, Requests, TrainBatch
from tests.dist.programs.turns import Episodes
from tests.tiny_models import QWEN3_MOE, SMALL
from tests.unit import chat_templates as templates
from tests.unit.environments.test_turns_suffix import tokenizer_for, turns_for
from train_grpo import grpo_objective

TOLERANCE = 2e-5  # nats, in float32
GROUP_SIZE = 3
PROMPTS = [Prompt(index, [5 + index, 6, 7 + index] * (1 + 2 * index)) for index in range(5)]
CACHED_TOKENS, BYTES_PER_TOKEN = 1088, 1024  # so that some are preempted; in float32
MOST_TOKENS = 160  # except in conversations
STOPS = [*range(100, 104)]  # of about 400 tokens


def main() -> None:
    changes = SMALL | {"max_position_embeddings": 1024} | QWEN3_MOE
    folder = str(make_model(pathlib.Path(sys.argv[1]) / "model", tokenizer_for(templates.QWEN2), 0, changes))
    config = GRPOConfig(
        model=ModelConfig(path=folder, dtype="float32"),
        data=DataConfig(max_prompt_tokens=600),
        roles=RolesConfig(colocated=True, num_trainers=1),
        generator=GeneratorConfig(
            max_completion_tokens=400,
            engine={"max_num_seqs": 15, "kv_cache_memory_bytes": CACHED_TOKENS * BYTES_PER_TOKEN},
        ),
        trainer=TrainerConfig(compile=False, activation_checkpointing="none", micro_batch_tokens=1024),
        group_size=GROUP_SIZE,
    )
    roles = setup_roles(config.roles, config.needs_reference, 1)
    generator = Generator(
        config.generator, config.model, config.data, 0, folder, STOPS, roles, Episodes(), takes_routes=True
    )
    trainer = Trainer(config.model, config.trainer, folder, 1, roles)
    taken = choose_otherwise(generator)

    completions = generator.generate(Requests(PROMPTS[:1]), 1, max_tokens=40)
    batch = batch_of(completions, 1)
    expected = sum(taken["otherwise"]) / sum(taken["all"])  # each token was fed once
    found = {how: measure(trainer, config, batch_) for how, batch_ in both(batch).items()}
    assert expected > 0.05 and found["replayed"]["routing/differs_frac"] == expected, (expected, found)
    assert "routing/differs_frac" not in found["chosen anew"]

    scheduler, preempted = generator.llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *arguments, **options: preempted.append(preempt(*arguments, **options))
    completions = generator.generate(Requests(PROMPTS), GROUP_SIZE, max_tokens=MOST_TOKENS)
    assert preempted and {c.truncated for c in completions} == {True, False}
    check("in one go, with preemptions", batch_of(completions), trainer, config)

    requests = Requests(PROMPTS, num_left=4)
    before = generator.generate(requests, GROUP_SIZE, max_tokens=MOST_TOKENS)
    begun = {c.index: None if c.ended else c.ids_T.tolist() for c in before}
    assert any(begun.values())
    requests = replace(requests, begun=begun, num_left=0)
    further = {c.index: c for c in generator.generate(requests, GROUP_SIZE, max_tokens=MOST_TOKENS)}
    completions = [join(c, further.get(c.index), c.index) for c in before]
    assert all(c.ended for c in completions)
    check("carried over", batch_of(completions), trainer, config)

    generator.episodes.turns = turns_for(templates.QWEN2, "tool")
    generator.episodes.turns.stop_token_ids |= set(STOPS)
    completions = generator.generate(Requests(PROMPTS[:2]), GROUP_SIZE)
    assert max(len(c.episode["turns"]) for c in completions) > 2
    check("conversations", batch_of(completions), trainer, config)
    close_roles(roles, generator.close)


def choose_otherwise(generator: Generator) -> dict[str, list[int]]:
    """Change the routers of vLLM; returns lists that get, of each forward and layer, how many tokens took others."""
    taken = {"otherwise": [], "all": []}

    def changed(router, chosen):
        def compute(hidden_states: torch.Tensor, router_logits: torch.Tensor, *rest, **others):
            scores_TX = router_logits.float().softmax(-1)
            _, ids_TE = chosen(hidden_states, router_logits, *rest, **others)
            otherwise_T = scores_TX.argmax(-1) == 0
            worst_TE = torch.stack([scores_TX.argmax(-1), scores_TX.argmin(-1)], -1).to(ids_TE)
            ids_TE = ids_TE.where(~otherwise_T[:, None], worst_TE)
            weights_TE = scores_TX.gather(-1, ids_TE.long())
            taken["otherwise"].append(int(otherwise_T.sum()))
            taken["all"].append(len(ids_TE))
            return weights_TE / weights_TE.sum(-1, keepdim=True), ids_TE.contiguous()

        router._compute_routing = compute

    for runner in expert_layers(generator.llm):
        changed(runner.router, runner.router._compute_routing)
    return taken


def batch_of(completions: list[Completion], group_size: int = GROUP_SIZE) -> TrainBatch:
    """A batch of what went over the wire."""
    completions = unflatten_completions(*flatten_completions(completions))
    batch = make_batch([sample_of(PROMPTS[c.index // group_size], c) for c in completions])
    return replace(batch, advantages_N=torch.linspace(-1, 1, batch.num_sequences)[batch.owner_N])


def both(batch: TrainBatch) -> dict[str, TrainBatch]:
    return {"replayed": batch, "chosen anew": replace(batch, routes_NLE=None)}


def measure(trainer: Trainer, config: GRPOConfig, batch: TrainBatch) -> dict[str, float]:
    """The metrics of an update, which is not taken."""
    metrics = StepMetrics(batch.num_sequences)
    trainer.forward_backward(batch, grpo_objective(config, batch, 0.0, True), metrics)
    trainer.zero_gradient()
    return metrics.means()


def check(name: str, batch: TrainBatch, trainer: Trainer, config: GRPOConfig) -> None:
    """Only with the engine's choice the log-probs are the engine's; every token but the first of a sequence has one."""
    has_none_N = (batch.routes_NLE == FREE).flatten(1)
    assert (
        torch.equal(has_none_N.all(1).nonzero()[:, 0], batch.starts_S)
        and not has_none_N[batch.routes_NLE[:, 0, 0] != FREE].any()
    )
    largest, shown = {}, []
    for how, one in both(batch).items():
        wrong_N = (trainer.logprobs(one) - one.generator_logprobs_N).abs()
        largest[how] = wrong_N[one.loss_mask_N].max().item()
        found = measure(trainer, config, one)
        found["ess"] = found["mismatch/weight"] ** 2 / found["mismatch/weight_squared"]
        names = ("mismatch/mean", "mismatch/kl", "ess", "routing/differs_frac")
        shown.append(f"{how}: " + ", ".join(f"{n} {found[n]:.3g}" for n in names if n in found))
    print(f"{name}: {batch.num_sequences} sequences; " + "; ".join(shown), flush=True)
    assert largest["replayed"] < TOLERANCE and largest["chosen anew"] > 1000 * TOLERANCE, (name, largest)


if __name__ == "__main__":
    main()
