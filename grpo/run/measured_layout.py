"""`roles.layout` auto: measure in processes of their own, then go on with the layout that was chosen.

Roles are process groups, which a running process cannot change. So each rank first starts `python -m grpo.layout` in
its place, with torchrun's environment, and reads what that left. Left out: measuring again while the run goes on.
"""

import json
import os
import pathlib
import subprocess
import sys

from grpo.config import GRPOConfig, change

ROOT = pathlib.Path(__file__).parents[2]


def measuring_dir(run_dir: str) -> pathlib.Path:
    """The run folder of the measurement for a run, beside the run's."""
    return pathlib.Path(f"{run_dir}-layout")


def layout_file(run_dir: str) -> pathlib.Path:
    """What was measured for a run, and chosen."""
    return pathlib.Path(f"{run_dir}-layout.json")


def with_measured_layout(config: GRPOConfig) -> GRPOConfig:
    """The config with the layout of the fewest seconds. Every rank calls it; the command line is the script's own.

    A run that is resumed takes what was measured for it before. Raises SystemExit if the measurement fails; it has said
    why.
    """
    file = layout_file(config.run_dir)
    if not (config.resume and file.exists()):
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "grpo.layout", *sys.argv[1:]]
        code = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}).returncode
        if code:
            raise SystemExit(code)
    return change(config, json.loads(file.read_text())["changes"])
