"""Teachers that a column chooses give each sequence the log-probs of its own, wherever their ranks are."""

import pytest

from tests.tiny_models import make_tiny
from tests.torchrun import torchrun


@pytest.mark.parametrize("trainers, references", [(1, 0), (1, 2)])
def test_log_probs_are_those_of_each_sequences_teacher(trainers: int, references: int, tmp_path):
    folders = [make_tiny(tmp_path, kind) for kind in ("qwen3-tied", "llama3", "qwen2-untied")]
    arguments = (trainers, references, *folders)
    print(torchrun("tests/dist/programs/teachers.py", *arguments, nproc=trainers + references, deadline=120))
