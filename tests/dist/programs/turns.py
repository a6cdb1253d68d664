"""Conversations by many chat templates on a real engine: what is trained on is what was sampled, to the last token.

Argument: FOLDER, in which it makes a random model. An environment answers with odd texts. For each template: ids handed
to the engine only grow; each sampled token is trained on, with the engine's log-prob; the trainer finds the same one.
"""

import pathlib
import random
import sys

import torch

from configs.examples.toys import make_model
from grpo.config import (
    DataConfig,
    EnvironmentConfig,
    GeneratorConfig,
    GRPOConfig,
    ModelConfig,
    RolesConfig,
    TrainerConfig,
)
from grpo.data.batches import make_batch
from grpo.features.environments.episodes import rollout_of
from grpo.features.environments.play import Episode, Player, play
from grpo.features.environments.suffix import Turns
from grpo.roles.engine.generator import Generator
from grpo.roles.engine.loop import EngineLoop
from grpo.roles.process_groups import close_roles, setup_roles
from grpo.roles.trainer import Trainer
from grpo.types import Prompt, Requests
from tests.tiny_models import SMALL
from tests.unit import chat_templates as templates
from tests.unit.features.environments.test_turns_suffix import CARRIED, PIECES, tokenizer_for, turns_for

ENVIRONMENT = EnvironmentConfig(name="made.py:Odd", max_turns=4)
GROUP_SIZE, NUM_PROMPTS = 3, 2
MOST_PROMPT_TOKENS = 600  # a tokenizer of few words has many for the schema of a tool
TOLERANCE = 1e-5  # nats, in float32


class OddHost:
    """Answers each turn at once, by 0 to 3 texts of the pieces that a template or tokenizer could take for its own."""

    def __init__(self, role: str):
        self.role, self.draw, self.replies = role, random.Random(role), []

    def ask(self, episode: int, do: str, arguments: list, seconds: float) -> None:
        answers = [
            "".join(self.draw.choices(PIECES, k=self.draw.randint(0, 5))) for _ in range(self.draw.randint(1, 3))
        ]
        replies = {
            "reset": {"text": "Look at " + answers[0]},
            "turn": {"answers": answers, "role": self.role, "ended": self.draw.random() < 0.1, "counts": {}},
            "finish": {"reward": 1.0, "info": {}},
        }
        self.replies.append(replies[do] | {"episode": episode})

    def poll(self, seconds: float = 0.0) -> list[dict]:
        there, self.replies = self.replies, []
        return there


class Episodes:
    """In place of the generator's: one template at a time, and a note of what the engine was given and what it said."""

    def __init__(self) -> None:
        self.turns: Turns | None = None

    def complete(
        self, loop: EngineLoop, rollouts: list, max_tokens: int, add, run_seed: int, version: int, held_out: bool
    ):
        self.handed: dict[int, list[list[int]]] = {n: [] for n in range(len(rollouts))}
        self.said: dict[int, list[float]] = {n: [] for n in self.handed}
        self.sampled: dict[int, list[int]] = {n: [] for n in self.handed}
        step = loop.step

        def watched_step():
            pieces = step()
            for number, piece in pieces.items():
                self.said[number] += piece.logprobs_T.tolist()
                self.sampled[number] += piece.ids_T.tolist()
            return pieces

        def watched_add(number: int, ids: list[int], *numbers: int) -> None:
            self.handed[number].append(list(ids))
            add(number, ids, *numbers)

        player = Player(
            ENVIRONMENT, OddHost(self.turns.role), {"": self.turns}, self.turns.tokenizer, MOST_PROMPT_TOKENS
        )
        player.begin([Episode(prompt, place, 0, version) for prompt, place in rollouts], max_tokens)
        loop.step = watched_step
        play(ENVIRONMENT, loop, len(rollouts), watched_add, player, lambda decisions: decisions)
        loop.step = step
        return [rollout_of(episode) for episode in player.finish()]

    def close(self) -> None:
        pass


def main() -> None:
    changes = SMALL | {"max_position_embeddings": 1024}
    folder = str(make_model(pathlib.Path(sys.argv[1]) / "model", tokenizer_for(templates.QWEN2), 0, changes))
    config = GRPOConfig(
        model=ModelConfig(path=folder, dtype="float32"),
        data=DataConfig(max_prompt_tokens=MOST_PROMPT_TOKENS),
        roles=RolesConfig(colocated=True, num_trainers=1),
        generator=GeneratorConfig(max_completion_tokens=400, temperature=(1.0, 0.7), engine={"max_num_seqs": 6}),
        trainer=TrainerConfig(compile=False, activation_checkpointing="none", micro_batch_tokens=1024),
        group_size=GROUP_SIZE,
    )
    roles = setup_roles(config.roles, config.needs_reference, 1)
    # of about 400 tokens, so that turns are short
    stops = [*tokenizer_for(templates.QWEN2).convert_tokens_to_ids(templates.STOPS), *range(100, 140)]
    episodes = Episodes()
    generator = Generator(config.generator, config.model, config.data, 0, folder, stops, roles, episodes)
    trainer = Trainer(config.model, config.trainer, folder, 1, roles)
    prompts = [Prompt(index, [5, 6]) for index in range(NUM_PROMPTS)]
    for name, role, arguments in CARRIED:
        episodes.turns = turns_for(getattr(templates, name), role, arguments)
        episodes.turns.stop_token_ids |= set(stops)
        rollouts = generator.generate(Requests.of(prompts, GROUP_SIZE))
        for number, rollout in enumerate(rollouts):
            alone = make_batch([rollout])
            grown = [*episodes.handed[number], alone.ids_N.tolist()]
            assert all(after[: len(before)] == before for before, after in zip(grown, grown[1:], strict=False))
            assert alone.ids_N[alone.loss_mask_N].tolist() == episodes.sampled[number]
            said = torch.tensor(episodes.said[number], dtype=torch.float32)
            assert torch.equal(alone.generator_logprobs_N[alone.loss_mask_N], said)
            assert not alone.generator_logprobs_N[~alone.loss_mask_N].any()
            assert rollout.num_tokens == len(said) <= len(rollout.ids_T)
        batch = make_batch(rollouts)
        wrong_N = (trainer.logprobs(batch) - batch.generator_logprobs_N).abs()
        largest = wrong_N[batch.loss_mask_N].max().item()
        num_turns = [len(rollout.episode["turns"]) for rollout in rollouts]
        assert largest < TOLERANCE and max(num_turns) >= 3, (name, role, largest, num_turns)
        print(f"{name} {role}: {sum(num_turns)} turns, log-probs within {largest:.1e}", flush=True)
    close_roles(roles, generator.close)


if __name__ == "__main__":
    main()
