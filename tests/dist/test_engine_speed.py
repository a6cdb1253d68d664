"""What is changed of vLLM for speed changes nothing of what it samples."""

import json
import re

from tests.tiny_models import make_tiny
from tests.torchrun import torchrun


def test_sampled_tokens_are_those_of_an_unchanged_engine(tmp_path):
    """Completions that end with a stop token, at the limit, after one token, and behind a preemption."""
    folder, lines = make_tiny(tmp_path, "qwen3-tied"), {}
    for how in ("changed", "unchanged"):
        file = tmp_path / f"{how}.jsonl"
        printed = torchrun("tests/dist/programs/engine_speed.py", folder, how, file, nproc=1)
        assert int(re.search(r"(\d+) preempted", printed)[1]) > 3
        lines[how] = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines["changed"] == lines["unchanged"]
    truncated = [is_truncated for *_, is_truncated in lines["changed"]]
    assert len(truncated) == 3 * 12 * 4 and 0 < sum(truncated[:48]) < 48
