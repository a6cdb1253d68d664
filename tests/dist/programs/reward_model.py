"""A reward model in parts over the ranks of a layout against transformers, which has each conversation whole.

Arguments: trainer ranks, reference ranks, tensor_parallel, then folders. Prints the largest difference of each.
"""

import sys

from grpo.config import ModelConfig, RolesConfig, TrainerConfig
from grpo.features.reward_model.model import RewardModel, open_reward_model
from grpo.roles.process_groups import close_roles, setup_roles
from tests.reward_scores import scores_by_transformers

TOLERANCE = 1e-5
QUESTIONS = ["1+1", "Who?", "What is the sum of 20 and 22, and why?", "Say nothing.", "Again: 1+1", "7", "8 * 8 = ?"]
ANSWERS = ["2", "Nobody that I know.", "42. It is 20 and 20 and 2.", "", "2 again", "a" * 40, "<answer>64</answer>"]


def main() -> None:
    num_trainers, num_references, tensor_parallel = map(int, sys.argv[1:4])
    # several rows, of several conversations
    trainer = TrainerConfig(micro_batch_tokens=160, compile=False, tensor_parallel=tensor_parallel)
    layout = RolesConfig(num_trainers=num_trainers, num_references=num_references, num_generators=0)
    roles = setup_roles(layout, needs_reward_model=True)
    for folder in sys.argv[4:]:
        model = RewardModel(ModelConfig(dtype="float32"), trainer, folder, roles)
        assert (model.model is not None) == (roles.rank >= num_trainers or not num_references)
        if not roles.is_driver:
            model.respond()
            continue
        conversations = [
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
        ]
        sequences = open_reward_model(folder, trainer).read(conversations)
        with model.asked():  # the driver may ask more than once
            got = [*model.scores(sequences[:2]), *model.scores(sequences[2:])]
        wanted = scores_by_transformers(folder, conversations)
        error = max(abs(a - b) for a, b in zip(got, wanted, strict=True))
        assert max(wanted) - min(wanted) > 1, f"{folder}: transformers says {wanted}, which tell nothing apart"
        print(f"{folder}: {error:.1e}", flush=True)
        assert error < TOLERANCE, f"{folder}: scores differ by {error}: {got}, and {wanted} by transformers"
    close_roles(roles)


if __name__ == "__main__":
    main()
