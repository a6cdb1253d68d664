"""Train with every method of docs/methods.md on a recorded run, one after the other, in this process.

Arguments: RECORDED, the folder of a run of episodes on one trainer rank, and FOLDER, which gets a run of each method.
"""

import sys
from functools import partial

from grpo.config import change
from grpo.config.checks import validate
from grpo.tools.replay import load_config, read, replay, run
from tests.methods import methods


def main() -> None:
    recorded, folder = sys.argv[1:]
    of_recorded = load_config(recorded, [], num_trainers=1)
    for name, (algorithm, _) in methods().items():
        config = change(of_recorded, {"algorithm": algorithm, "run_dir": f"{folder}/{name}"})
        validate(config)
        run(config, "grpo.replay", partial(read, recorded), partial(replay, recorded), config.roles)


if __name__ == "__main__":
    main()
