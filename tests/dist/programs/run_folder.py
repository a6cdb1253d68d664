"""Two trainer ranks open one run folder, then one on a disk that only rank 0 sees. Arguments: each rank's disk."""

import os
import sys

from grpo.config import CheckpointConfig
from grpo.folder.checkpoint import CheckpointSaver
from grpo.folder.run_folder import begin_run
from grpo.roles.comm import wait_for_all
from grpo.roles.process_groups import close_roles, setup_trainers
from grpo.watch.failures import BadInput


def main() -> None:
    roles = setup_trainers()
    for where, folder in (("one disk", sys.argv[1]), ("two disks", sys.argv[1 + roles.rank])):
        os.chdir(folder)
        if roles.is_driver:
            os.close(begin_run("run", "train_grpo.py", {}, {}, overwrite=True))
        wait_for_all(roles)
        try:
            CheckpointSaver("run", CheckpointConfig(), deadline_minutes=20)
            print(f"rank {roles.rank}, {where}: taken", flush=True)
        except BadInput as error:
            print(f"rank {roles.rank}, {where}: {error}", flush=True)
    close_roles(roles)


if __name__ == "__main__":
    main()
