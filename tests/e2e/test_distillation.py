"""On-policy distillation without any reward: the policy moves towards a teacher of another shape."""

import pathlib

import pytest

from configs.examples import toys
from tests.e2e.runs import TINY, read_completions, read_metrics
from tests.tiny_models import SMALL
from tests.torchrun import torchrun

ONE_RANK = ("--roles.colocated", "--roles.num-trainers", 1, "--roles.num-references", 0)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Another random model with the same tokens, of another shape."""
    changes = SMALL | {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    changes |= {"max_position_embeddings": 128}
    return toys.make_model(tmp_path_factory.mktemp("teacher") / "model", toys.addition_tokenizer(), 7, changes)


def test_a_teacher_alone(model: pathlib.Path, teacher: pathlib.Path, tmp_path: pathlib.Path):
    """No reward function, groups of one, a teacher of another shape on ranks of its own."""
    layout = ("--roles.num-trainers", 1, "--roles.num-references", 2)
    distill = ("--model.reference-path", teacher, "--algorithm.distill-coef", 1, "--algorithm.kl-coef", 0)
    alone = ("--reward.functions", "--group-size", 1, "--prompts-per-step", 32, "--algorithm.loss", "reinforce")
    arguments = (TINY, *layout, "--model.path", model, *distill, *alone, "--num-steps", 6)
    torchrun("train_grpo.py", *arguments, "--run-dir", tmp_path / "run", nproc=4)
    metrics = read_metrics(tmp_path / "run")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    for m in metrics:
        assert m["reward/mean"] is None and m["reward/none_count"] == 32 and m["loss/active_frac"] == 1
        assert m["grad_norm"] > 0.01 and m["mismatch/max"] < 1e-4
    reverse_kl = [m["distill/reverse_kl"] for m in metrics]
    assert sum(reverse_kl[4:]) < 0.9 * sum(reverse_kl[:2])  # the student moves towards its teacher
    for line in read_completions(tmp_path / "run"):
        assert line["reward"] is None and line["advantage"] is not None
