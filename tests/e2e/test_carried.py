"""`sampling.carry_over`: groups that are not complete go on in the next step, and nothing is lost."""

import pathlib
from collections import Counter

import pytest

from grpo.folder.checkpoint import check_checkpoint
from tests.e2e.runs import NO_KL, read_completions, read_metrics, run_tiny, split

LONG = f"{split(1, 0, 2)} {NO_KL} --generator.max-completion-tokens 40 --sampling.carry-over 2 --num-steps 6"
# so small that weights of another version give the same log-probs up to 1e-4; no two steps have the same loss
LEARNING_RATE = "--trainer.learning-rate 1e-7 --algorithm.num-mini-batches 2"
FLAGS = f"{LONG} {LEARNING_RATE} --checkpoint.interval 3 --resume"


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> pathlib.Path:
    """Folder of a run of 6 steps of 4 groups of 4, with 6 groups in flight on two engines."""
    run_dir = tmp_path_factory.mktemp("carried") / "run"
    run_tiny(model, run_dir, FLAGS, nproc=3)
    return run_dir


def test_every_completion_is_trained_once_with_all_of_its_tokens(run):
    """26 prompts were drawn (4 a step and 2 ahead): the groups of 24 were trained, 2 are in the last checkpoint."""
    completions = read_completions(run)
    times = Counter(line["row"] for line in completions)
    assert set(times.values()) == {4} and len(times) == 24 and len(completions) == 6 * 16
    state = check_checkpoint(run / "checkpoints/step-00000006")
    assert len(state["flight"]["prompts"]) == 2
    assert sum(source["num_drawn"] for source in state["data"]["sources"].values()) == 26
    went_on = [line for line in completions if "earlier" in line]
    assert len(went_on) > 5
    for line in completions:
        # it ran to its own end, however often it was interrupted
        assert (line["finish_reason"] == "length") == (line["num_tokens"] == 40)
        versions = [version for version, _ in line.get("earlier", [])] + [line["version"]]
        assert versions == sorted(set(versions)) and versions[-1] < line["step"]
        assert sum(count for _, count in line.get("earlier", [])) < line["num_tokens"]


def test_log_probs_of_all_pieces_are_the_policys(run):
    """As its weights hardly change; an offset by one token would make differences of nats.

    Except behind <pad>, whose embedding is zero, so that the norms make a thousand times more of any change.
    """
    steps = read_metrics(run)
    compared = [line for line in read_completions(run) if "<pad>" not in line["completion"]]
    assert sum("earlier" in line for line in compared) > 1
    assert max(line["mismatch"] for line in compared) < 1e-4
    for m in steps:
        assert m["mismatch/nonfinite_frac"] == 0
        assert m["sampling/carried"] == 2
        assert (m["lag/stale_frac"] > 0) == (m["step"] > 1) == (m["lag/max"] > 0)
    for m in steps:  # of tokens, against what completions.jsonl says
        of_step = [line for line in read_completions(run) if line["step"] == m["step"]]
        older = sum(
            count
            for line in of_step
            for version, count in [*line.get("earlier", []), (line["version"], rest_of(line))]
            if version < m["step"] - 1
        )
        assert m["lag/stale_frac"] == pytest.approx(older / sum(line["num_tokens"] for line in of_step))


def rest_of(line: dict) -> int:
    """Tokens of the last piece."""
    return line["num_tokens"] - sum(count for _, count in line.get("earlier", []))
