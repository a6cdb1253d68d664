"""What a run has read besides its checkpoint, and what becomes of a change when the run is resumed.

Other rows, other weights, and another value of a field on which the result depends make it another run: they are
refused, or with `allow_changes` printed. The user's own files (a reward, a loss, the script) may be edited on purpose.
Such a change is printed.
"""

import zlib
from collections.abc import Collection, Mapping
from typing import Any

from grpo.folder.run_folder import FILES
from grpo.text import one_line

READ = "read"  # entry of the driver's state in a checkpoint: `WasRead.facts`
CONFIG = "config"
NOT_THERE = "not there"


class WasRead:
    """What a run reads, kind by kind, each compared with what it had read when it was saved.

    `config` has each field as Python writes it, `rows` the checksum of each data set, `weights` that of each model
    which a checkpoint does not hold, `files` that of each of the user's files.
    """

    def __init__(
        self,
        run_dir: str,
        allow_changes: bool,
        state: Mapping[str, Any],
    ):
        """Begin with nothing read. state: the driver's in the checkpoint from which the run is resumed, or empty."""
        self.run_dir = run_dir
        self.allow_changes = allow_changes
        self.facts: dict[str, dict[str, str]] = {}
        self.saved: dict[str, dict[str, str]] = {}
        self.step = 0
        if state:
            self.saved = state[READ]
            self.step = state["step"]
        self.is_same_run = True

    def note(
        self,
        kind: str,
        facts: dict[str, str],
        may_change: Collection[str] = (),
    ) -> bool:
        """Note one kind of what is read. Returns whether it is what it was, as it is if the run is not resumed.

        may_change: facts that may differ in the same run. Prints each change. Raises ValueError for one
        that makes it another run, unless `allow_changes` is set.
        """
        self.facts[kind] = facts
        if not self.saved:
            return True
        before = self.saved[kind]
        changes = []
        refused = []
        for name in dict.fromkeys([*facts, *before]):
            old = before.get(name, NOT_THERE)
            new = facts.get(name, NOT_THERE)
            # what a change of the config adds or takes away is said there
            if old == new or kind != CONFIG and NOT_THERE in (old, new):
                continue
            change = f"{name}: {old} -> {new}"
            if kind == FILES:
                changes.append(f"{name.removeprefix(f'{FILES}/')} differs from the one of step {self.step}")
            elif name in may_change:
                changes.append(change)
            else:
                refused.append(change)
        if refused:
            self.is_same_run = False
            if not self.allow_changes:
                raise ValueError(
                    f"{self.run_dir} would not go on as the run that it is, since step {self.step} was saved: "
                    f"{'; '.join(refused)}. Resume with what it had, take --allow-changes if the change is meant, or "
                    "start a new run in another --run-dir"
                )
        for change in [*refused, *changes]:
            print(one_line(f"resumed with a change: {change}"))
        return facts == before


def checksum_of(text: str) -> str:
    """Return a short checksum, which tells an edited text from the one before."""
    return f"{zlib.crc32(text.encode()):08x}"
