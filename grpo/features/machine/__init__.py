"""Whether a run fits the machine: what `--dry-run` prints as a table, and a start as warnings."""

CHECKS = {"machine": "grpo.features.machine.verdicts:judge"}
