"""The reward model: a frozen sequence classifier with one output on the reference ranks, and how it reads a rollout.

It has its own tokenizer and chat template, so conversations travel to it as its own tokens. While the driver scores, it
asks, and the other learners respond (`comm.on_driver`). Left out: several reward models, and tensor parallelism: the
ranks share its weights by FSDP.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from grpo.config import DataConfig, ModelConfig, TrainerConfig
from grpo.config.fields import MICRO_BATCH_TOKENS
from grpo.data.batches import make_batch
from grpo.data.chat import Refused, check_template, open_tokenizer, render
from grpo.data.rows import Message, as_messages
from grpo.models import hf_folder
from grpo.models.build import build_model
from grpo.report.samples import finite_or_none
from grpo.rewards.pool import episode_columns
from grpo.roles.comm import broadcast, send_batch
from grpo.roles.process_groups import Roles
from grpo.types import Piece, Rollout, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OWN_DATA = DataConfig(system_prompt="")  # the run's section `data` is about the policy's prompts


class RewardModel:
    """The model, in parts over the reference ranks (else the trainer ranks).

    Every learner holds this object; on ranks without a part its `model` is None.
    """

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        folder: str,
        roles: Roles,
    ):
        """Load `folder` in the compute dtype. Collective over the reference ranks.

        trainer: rows are made and computed as the policy's are.
        """
        self.roles = roles
        self.model = None
        if roles.references:
            self.model = build_model(
                model,
                trainer,
                folder,
                device=roles.device,
                tensor_parallel=1,
                frozen=True,
                scores=True,
            )

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Let the driver call `scores` in this block; the other learners are in `respond` as long as it lasts."""
        try:
            yield
        finally:
            broadcast(False, self.roles.learners)

    def scores(self, sequences: Sequence[list[int]]) -> list[float]:
        """Score whole conversations, token ids each. On the driver, within `asked`."""
        if not sequences:
            return []
        broadcast(True, self.roles.learners)
        rollouts = []
        for ids in sequences:
            # a value is stored with the next token, so there is one token more, the only one that counts
            labels = [False] * len(ids) + [True]
            rollouts.append(Rollout.alone(Piece.written([*ids, 0], labels)))
        return self._scores(make_batch(rollouts))

    def respond(self) -> None:
        """Compute this rank's part of what the driver asks, until its block ends. On all other learners."""
        while broadcast(None, self.roles.learners):
            self._scores(None)

    def _scores(self, batch: TrainBatch | None) -> list[float]:
        batch = send_batch(batch, self.roles)
        total_N = torch.zeros(batch.num_tokens)
        if self.model:
            total_N = self.model.token_logprobs(batch)
        dist.all_reduce(total_N, group=self.roles.learners)  # each rank has its part, and 0 elsewhere
        return total_N[batch.loss_mask_N].tolist()


# ---------------------------------------------------------------------------------------------------------------------
# What it reads, on the driver


@dataclass
class ModelPart:
    """The part of the reward that the model gives, on the driver, and how it reads conversations."""

    tokenizer: "PreTrainedTokenizerBase"
    max_tokens: int
    """Most tokens of a conversation."""
    pad_token_id: int | None
    """Padding token. Transformers scores at the last token that is not padding."""
    model: RewardModel | None = None
    """Set once it is loaded."""

    def read(self, conversations: Sequence[list[Message]]) -> list[list[int] | str]:
        """Return each conversation's token ids, by the model's own chat template, or the reason it cannot be scored."""
        texts = []
        reasons = []
        for messages in conversations:
            text = reason = ""
            try:
                text, _ = render(self.tokenizer, OWN_DATA, messages, opening=False)
            except Refused as error:
                reason = str(error)
            texts.append(text)
            reasons.append(reason)
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        pairs = zip(reasons, encoded, strict=True)
        return [reason or self._cut(ids) for reason, ids in pairs]

    def _cut(self, ids: list[int]) -> list[int] | str:
        while ids and ids[-1] == self.pad_token_id:
            ids = ids[:-1]
        if 1 <= len(ids) <= self.max_tokens:
            return ids
        limits = "its max_position_embeddings, trainer.micro_batch_tokens"
        return f"not 1 to {self.max_tokens} tokens of the reward model's ({limits})"

    def values(self, rollouts: Sequence[Rollout], opening: str) -> list[tuple[float | None, str]]:
        """Return for each rollout its score, or None and the reason. opening: as in `conversation`."""
        messages = [conversation(rollout, opening) for rollout in rollouts]
        conversations = self.read(messages)
        readable = [ids for ids in conversations if isinstance(ids, list)]
        scores = iter(self.model.scores(readable))
        results = []
        for ids in conversations:
            if isinstance(ids, str):  # not ids, but the reason why it cannot be read
                results.append((None, ids))
                continue
            score = finite_or_none(next(scores))
            results.append((score, "its score is not finite" if score is None else ""))
        return results


def open_reward_model(path: str, trainer: TrainerConfig) -> ModelPart:
    """Check a reward model (a folder or hub name) before its weights are loaded.

    Raises FileNotFoundError or ValueError if the folder, its model, its tokenizer or chat template cannot be used.
    """
    folder = hf_folder.resolve_folder(path, scores=True)
    hf_folder.check_folder(folder, scores=True)
    tokenizer = open_tokenizer(folder)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of reward.model {folder} has no chat template; put the one that it was trained with there, "
            "as chat_template.jinja, or use another model"
        )
    hf_folder.check_vocabulary(folder, tokenizer, scores=True)
    check_template(tokenizer, OWN_DATA, replied=True)
    hf = hf_folder.read_hf_config(folder, scores=True)
    row = MICRO_BATCH_TOKENS if trainer.micro_batch_tokens == "auto" else trainer.micro_batch_tokens
    max_tokens = min(hf.max_position_embeddings, row) - 1  # `RewardModel.scores` adds one
    print(f"reward model {path}: reads up to {max_tokens} tokens of its own")
    return ModelPart(tokenizer, max_tokens, hf.pad_token_id)


def conversation(rollout: Rollout, opening: str = "") -> list[Message]:
    """Return the prompt's messages and the policy's reply; for an episode, all its messages.

    opening: the end of the prompt that belongs to the reply, such as an opened `<think>`; each turn begins with it.
    """
    if rollout.episode:
        (messages,) = episode_columns([rollout], opening)["messages"]
        return [{"role": m["role"], "content": m["content"]} for m in messages]  # calls stand in the content already
    reply = as_messages(opening + rollout.text, "assistant")
    return as_messages(rollout.prompt.content) + reply
