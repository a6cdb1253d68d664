"""Whether a run fits the machine: what `--dry-run` prints as a table, and a start as warnings."""

from typing import Any


def propose_layout(needs: Any, device: Any) -> dict[str, Any]:
    """Return changes that give a config of more ranks a layout for the device's GPUs, if any does."""
    from grpo.features.machine import layouts

    return layouts.propose(needs, device)


def judge(asked: Any, needs: Any, device: Any, proposed: dict[str, Any]) -> int:
    """Compare what a run needs with what there is, print what does not fit, and return the number of problems.

    asked: the config as it is written. needs: those of the config that is judged, with the layout `proposed`.
    """
    from grpo.features.machine import verdicts

    return verdicts.judge(asked, needs, device, proposed)
