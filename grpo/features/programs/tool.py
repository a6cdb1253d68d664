"""The built-in tool `python`: `--environment.tools python`."""

import re
from collections.abc import Callable

from grpo.config import EnvironmentConfig
from grpo.features.programs.run import Limits, run_python

# Share of environment.call_seconds, so that the model reads that its program loops before the process is killed
PROGRAM_TIME = 0.8

# The folder of a program has another name each time, but the same program must print the same.
PATH_OF_PROGRAM = re.compile(r'File "[^"\n]*program\.py"')


def python_tool(config: EnvironmentConfig) -> Callable[[str], str]:
    """Make the tool `python`. Its programs are confined like those of code_reward, within the limits of `config`."""
    limits = Limits(config.call_seconds * PROGRAM_TIME, config.memory_gib)

    def python(code: str) -> str:
        """Run a Python program, and see what it prints.

        Args:
            code: The program.
        """
        outcome = run_python(code, "", limits)
        endings = {
            "failed": PATH_OF_PROGRAM.sub('File "program.py"', outcome.stderr).strip(),
            "timeout": f"It took longer than {limits.timeout_seconds:g} s.",
            "killed": "It was killed.",
            "output": f"It printed more than {limits.output_bytes} bytes.",
        }
        return outcome.stdout + endings.get(outcome.status, "")

    return python
