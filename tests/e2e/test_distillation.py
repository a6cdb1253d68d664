"""On-policy distillation without any reward: the policy moves towards a teacher of another shape."""

import pathlib

import pytest

from configs.examples import toys
from tests.e2e.runs import NO_KL, read_completions, read_metrics, run_tiny, split
from tests.tiny_models import SMALL


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> pathlib.Path:
    """Another random model with the same tokens, of another shape."""
    changes = SMALL | {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    changes |= {"max_position_embeddings": 128}
    return toys.make_model(tmp_path_factory.mktemp("teacher") / "model", toys.addition_tokenizer(), 7, changes)


def test_a_teacher_alone(model, teacher, tmp_path):
    """No reward function, groups of one, a teacher of another shape on ranks of its own."""
    distill = f"--model.reference-path {teacher} --algorithm.distill-coef 1 {NO_KL} --algorithm.loss reinforce"
    alone = "--reward.functions --group-size 1 --prompts-per-step 32 --num-steps 6"
    run_tiny(model, tmp_path / "run", split(1, 2, 1), distill, alone, nproc=4)
    metrics = read_metrics(tmp_path / "run")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    for m in metrics:
        assert m["reward/mean"] is None and m["reward/none_count"] == 32 and m["loss/active_frac"] == 1
        assert m["grad_norm"] > 0.01 and m["mismatch/max"] < 1e-4
    reverse_kl = [m["distill/reverse_kl"] for m in metrics]
    assert sum(reverse_kl[4:]) < 0.9 * sum(reverse_kl[:2])  # the student moves towards its teacher
    for line in read_completions(tmp_path / "run"):
        assert line["reward"] is None and line["advantage"] is not None
