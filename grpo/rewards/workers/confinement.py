"""What a reward process may see and do: few environment variables, and for built-in functions no network and no files.

A completion is text from a policy that will find every hole, and a library that evaluates formulas may run what stands
in one. So processes that call built-in functions are confined as far as the kernel grants it: Landlock leaves them the
interpreter and its libraries to read and nothing to write, seccomp takes sockets, other processes and the kernel's
corners, and of root's power only reading is left.

Not confined, and in processes of their own (`split`), are a user's functions, which may call a judge or read data, and
code_reward: its sandbox makes namespaces and mounts, which a confined process cannot, and confines each program itself.
"""

import dataclasses
import os
import pathlib
import re
import resource
import sys
from collections.abc import Collection, Mapping

from grpo.config import RewardConfig
from grpo.rewards.builtin import BUILT_INS, code_reward
from grpo.workers import lockdown
from grpo.workers.sandbox.run import interpreter_places

# What Python and its libraries need, and who they are run for. Proxies are left out: their addresses hold passwords.
_PASSED = re.compile(
    "PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|LD_LIBRARY_PATH|PYTHON[A-Z]+|VIRTUAL_ENV|CONDA_PREFIX"
    "|(OMP|MKL|OPENBLAS)_[A-Z_]+|CUDA_VISIBLE_DEVICES|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")


def environment(names: Collection[str]) -> dict[str, str]:
    """Of this process's environment variables those that reward processes get: what libraries need, and `names`.

    The supervisor must be started with them: what a process was started with stays readable in /proc. Raises ValueError
    if one of `names` (reward.environment) is not set.
    """
    for name in names:
        if name not in os.environ:
            raise ValueError(f"reward.environment names {name}, which is not set; export it or leave it out")
    return {name: value for name, value in os.environ.items() if name in names or _is_passed(name)}


def _is_passed(name: str) -> bool:
    return _PASSED.fullmatch(name) is not None and _SECRET.search(name) is None


def split(config: RewardConfig) -> dict[bool, RewardConfig]:
    """The functions that run confined (True) and the others (False), with their options; only what there is of them."""
    parts = {}
    for confined in (True, False):
        names = [name for name in config.functions if is_confined(name) == confined]
        if names:
            parts[confined] = dataclasses.replace(
                config, functions=_only(config.functions, names), options=_only(config.options, names)
            )
    return parts


def is_confined(name: str) -> bool:
    """Whether the function of this name in `reward.functions` runs confined."""
    return name in BUILT_INS and name != code_reward.__name__


def _only(table: Mapping, names: Collection[str]) -> dict:
    return {name: value for name, value in table.items() if name in names}


def confine(config: RewardConfig) -> str:
    """Take from the calling process, for good, what built-in functions do not need; what the kernel does not grant.

    The text is empty if it grants everything. Call it with a single thread.
    """
    for name in config.environment:  # for the user's own functions
        os.environ.pop(name, None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # writes nothing even where a kernel lacks Landlock
    lacking, keep = [], []
    if lockdown.permitted_capabilities() >> lockdown.CAP_DAC_READ_SEARCH & 1:
        keep.append(lockdown.CAP_DAC_READ_SEARCH)  # the libraries may be another user's
    try:
        lockdown.restrict_files(readable_places())
    except OSError as error:
        lacking.append(f"files and signals are open to them ({error})")
    lockdown.drop_capabilities(keep)
    try:
        lockdown.deny_calls(
            lockdown.NETWORK,
            lockdown.MEMORY,
            lockdown.NAMESPACES,
            lockdown.PROCESSES,
            lockdown.KERNEL,
            lockdown.METADATA,
            lockdown.TRUNCATION,
            lockdown.others_signals(os.getpid()),
        )
    except OSError as error:
        lacking.append(f"the network is open to them ({error})")
    return "; ".join(lacking)


def readable_places() -> list[str]:
    """What the sandbox's programs may read, installed packages that lie elsewhere, and this package."""
    packages = [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    ours = str(pathlib.Path(__file__).parents[2])
    return sorted({*interpreter_places(sys.executable), *packages, "/dev/urandom", ours})
