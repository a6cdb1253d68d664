"""Does it fit? GPU memory of each role of a recipe, GRPO or SFT, by arithmetic, from the model's config.json alone.

    python -m grpo.memory [RECIPE.py] [--field value ...]

What is "auto" is decided for a GPU of 80 GB. How it is computed, and how far it is from what was measured, is in
grpo/models/memory.py. Give a local folder, or a hub name whose config.json is then fetched. What else a run needs says
`python -m grpo.preflight`.
"""

import pathlib
import sys

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import load
from grpo.models.hf_folder import config_folder, read_hf_config
from grpo.models.memory import choices_told, fit_trainer, memory_of_roles, num_parameters
from grpo.watch.failures import refuse_bad_input, run_rank

DEFAULT_RECIPE = str(pathlib.Path(__file__).parents[1] / "configs" / "qwen3_1_7b_gsm8k.py")

GPU_GIB = 79.2  # of an H100, of 80 GB


def main() -> None:
    with refuse_bad_input():
        config = load((GRPOConfig, SFTConfig), DEFAULT_RECIPE)
        hf = read_hf_config(config_folder(config.model.path))
    print(f"{config.model.path}: {num_parameters(hf) / 1e9:.2f} billion parameters")
    decided = fit_trainer(hf, config, GPU_GIB)
    for choice in choices_told(config, decided):
        print(f"{choice}, as auto chooses on a GPU of {GPU_GIB} GiB")
    for role, parts in memory_of_roles(hf, decided).items():
        listed = " + ".join(f"{gib:.1f} {part}" for part, gib in parts.items())
        print(f"each {role} rank: {sum(parts.values()):.1f} GiB = {listed}")


if __name__ == "__main__":
    if sys.argv[1:2] in (["--help"], ["-h"]):
        print(__doc__)
    else:
        run_rank(main)
