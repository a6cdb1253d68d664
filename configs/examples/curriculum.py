"""Which prompts come next, by how often they were solved.

FILE=configs/examples/curriculum.py
torchrun --nproc_per_node=8 train_grpo.py --data.curriculum $FILE:skip_solved
torchrun --nproc_per_node=8 train_grpo.py --data.curriculum $FILE:medium_first

A curriculum is asked before each step about each row that was seen. `seen` has `pass_rate`, the share of completions
that passed when it was seen last, the number of that step (`step`), and how many `times` it was seen. The weights are
relative to each other; a row that was not seen has the weight 1.
"""


def skip_solved(seen, step):
    """Give a row that was always solved the weight 0 until 100 steps have passed, and all other rows 1."""
    is_solved = seen.pass_rate == 1
    return 0.0 if is_solved and step - seen.step < 100 else 1.0


def medium_first(seen, step):
    """Weigh rows that were solved in 20 to 80 % of the cases five times as much as the others that were seen."""
    return 1.0 if 0.2 <= seen.pass_rate <= 0.8 else 0.2
