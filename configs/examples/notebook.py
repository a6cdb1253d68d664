"""The parts as a library, cell by cell: for a notebook, or `python -m configs.examples.notebook`. No torchrun, no GPU.

The repository must be the current folder and in sys.path. The two runs at the end take half a minute on a CPU.
"""

# %% Configs are values: a recipe of a file, with some fields changed
import pathlib
import tempfile

from grpo.config.recipes import change, for_one_process
from grpo.libraries import quiet_libraries

quiet_libraries()  # before torch and vLLM are imported
RECIPES, RUNS = pathlib.Path("configs").absolute(), tempfile.mkdtemp()
few = {"num_steps": 2, "data.path": "configs/examples/toys.py:addition:train[:1000]"}
grpo_config = change(RECIPES / "toy_arithmetic.py", few | {"run_dir": f"{RUNS}/grpo", "evaluation.interval": 0})
sft_config = change(RECIPES / "toy_sft.py", few | {"run_dir": f"{RUNS}/sft"})
grpo_config, sft_config = for_one_process(grpo_config), for_one_process(sft_config)

# %% Rewards are functions of texts and columns
from grpo.rewards.builtin import math_reward

print(math_reward(["<answer>42</answer>", "<answer>41</answer>"], answer=["42", "42"]))  # [1.0, 0.0]

# %% Two completions of one prompt as a batch, and their advantages
from dataclasses import replace

import torch

from grpo.data.batches import make_batch
from grpo.data.layout import plan
from grpo.metrics import StepMetrics
from grpo.types import Piece, Prompt, Rollout
from train_grpo import add_advantages, policy_loss

prompt = Prompt(index=0, ids=[5, 6])
completion = Piece.sampled([7, 8, 9], logprobs=[-1.0, -2.0, -0.5])  # by the generator
pieces = (Piece.written(prompt.ids), completion)
batch = make_batch([Rollout(prompt, index, sequences=(pieces,)) for index in range(2)])
pair = change(grpo_config, {"group_size": 2, "algorithm": grpo_config.algorithm.resolved})
by_function = torch.tensor([[1.0, 0.0], [0.0, 0.0]])  # of which the rewards are the weighted sums
has_reward = torch.tensor([True, True])
batch = replace(batch, rewards_R=torch.tensor([1.0, 0.0]), has_reward_R=has_reward, parts_FR=by_function)
batch = add_advantages(pair, batch, 0.0, StepMetrics(2))
print(batch.advantages_N[batch.starts_S])  # +-0.7070: (1 - 0.5) / (standard deviation 0.7071 + 1e-4)

# %% A loss sees [B, T] tensors: here both sequences in one row, under a policy that likes every token more by 0.5 nats
from grpo.algorithm.inputs import LossInputs

batch = replace(batch, old_logprobs_N=batch.generator_logprobs_N)
micro = next(plan(batch, num_ranks=1, max_tokens=batch.num_tokens).micro_batches(rank=0))
policy_BT = micro.generator_logprobs_BT + 0.5
loss_BT, metrics = policy_loss(LossInputs.of(micro, policy_BT, entropy_BT=-policy_BT), pair.algorithm)
print(loss_BT)  # -0.8484 where the ratio exp(0.5) is clipped to 1.2, 1.1657 where it is not; 0 outside the mask

# %% The toy's two scripts, in this process
import train_grpo
import train_sft

train_sft.main(sft_config)
grpo_config = change(grpo_config, {"model.path": f"{RUNS}/sft/model"})
train_grpo.main(grpo_config)
