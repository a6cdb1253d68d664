"""Rollouts -> the batch of a step -> its mini-batches. layout.py makes micro-batches of these.

Fields travel by their suffix: `x_T` of a piece is `x_N` of a batch and `x_BT` of a micro-batch, whatever x is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields

import torch

from grpo.data.encode import Encoded
from grpo.types import Piece, Rollout, TrainBatch


def make_batch(rollouts: Sequence[Rollout], turn_weight: float | None = None) -> TrainBatch:
    """Lay all sequences of a step end to end.

    turn_weight: weight of the environment's reward, if turns have credit of their own. Without log-probs if a token
    counts that nobody sampled, as in SFT.
    """
    by_token = {name: [] for name in ("ids", "loss_mask", "logprobs", "kept", "turn", "earned")}
    by_sequence = {name: [] for name in ("lengths", "rollout", "temperatures", "versions", "truncated", "prompts")}
    has_kept_ids = any(piece.num_kept and (piece.kept_C >= 0).any() for r in rollouts for piece in r.pieces)
    for number, rollout in enumerate(rollouts):
        for prompt, *behind in rollout.sequences:
            turn = 0
            length = 0
            for piece in (prompt, *behind):
                zeros_T = torch.zeros(piece.num_tokens)
                by_token["ids"].append(piece.ids_T)
                by_token["loss_mask"].append(piece.loss_mask_T)
                by_token["logprobs"].append(piece.logprobs_T if piece.is_sampled else zeros_T)
                if has_kept_ids:  # -1 ends those of each token, which may have none
                    by_token["kept"].append(piece.kept_C if piece.num_kept else zeros_T.int() - 1)
                if turn_weight is not None:
                    turn += piece.is_sampled
                    earned = _earned_before(rollout, turn) * turn_weight
                    by_token["turn"].append(zeros_T.long() + turn * piece.is_sampled)
                    by_token["earned"].append(zeros_T + earned * piece.is_sampled)
                length += piece.num_tokens
            by_sequence["lengths"].append(length)
            by_sequence["rollout"].append(number)
            by_sequence["temperatures"].append(rollout.temperature)
            by_sequence["versions"].append(rollout.oldest_version)
            by_sequence["truncated"].append(rollout.truncated)
            by_sequence["prompts"].append(prompt.num_tokens if behind else 0)
    laid = {name: torch.cat(values) for name, values in by_token.items() if values}
    facts_S = {name: torch.tensor(values) for name, values in by_sequence.items()}
    is_labelled = any(not piece.is_sampled and piece.loss_mask_T.any() for r in rollouts for piece in r.pieces)
    return TrainBatch(
        ids_N=laid["ids"],
        loss_mask_N=laid["loss_mask"],
        lengths_S=facts_S["lengths"],
        sequence_S=torch.arange(len(facts_S["lengths"])),
        rollout_S=facts_S["rollout"],
        temperatures_S=facts_S["temperatures"].float(),
        versions_S=facts_S["versions"],
        truncated_S=facts_S["truncated"],
        prompt_lengths_S=facts_S["prompts"],
        generator_logprobs_N=None if is_labelled else laid["logprobs"],
        turn_N=laid.get("turn"),
        earned_N=laid.get("earned"),
        kept_C=laid.get("kept"),
    )


def make_sft_batch(examples: Iterable[Encoded]) -> TrainBatch:
    """Lay examples of SFT end to end. The loss counts their labels."""
    rollouts = []
    for example in examples:
        piece = Piece.written(example.ids, example.mask)
        rollouts.append(Rollout.alone(piece, ended_by="tokens" if example.truncated else "stop"))
    return make_batch(rollouts)


def _earned_before(rollout: Rollout, turn: int) -> float:
    """Return the reward of an episode when a turn, counted from 1, began; 0 if it got none."""
    if turn < 2 or rollout.episode["reward"] is None:
        return 0.0
    return rollout.episode["turns"][turn - 2].get("earned", 0.0)


def split_groups(batch: TrainBatch, group_size: int, num_parts: int) -> list[TrainBatch]:
    """Cut a step's batch into mini-batches of whole groups, in order, their numbers of groups differing by at most one.

    Fewer than `num_parts` if there are fewer groups.
    """
    num_groups = batch.num_rollouts // group_size
    num_parts = min(num_parts, num_groups)
    edges_R = torch.arange(num_parts + 1) * num_groups // num_parts * group_size
    # the last letter of a field's name says what it is laid out by
    edges = {
        "R": edges_R,
        "S": torch.searchsorted(batch.rollout_S, edges_R),
        "N": torch.searchsorted(batch.rollout_N, edges_R),
    }
    if batch.kept_C is not None:
        edges["C"] = torch.searchsorted(batch.token_C, edges["N"])
    parts = []
    for number in range(num_parts):
        part = {}
        for field in fields(batch):
            values = getattr(batch, field.name)
            if values is not None:
                start, end = edges[field.name[-1]][number : number + 2]
                part[field.name] = values[..., start:end]
        parts.append(TrainBatch(**part))
    return parts
