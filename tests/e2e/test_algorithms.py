"""A loss and rewards of one's own, several updates and temperatures, failing verifiers; evaluations change nothing."""

from tests import read_lines
from tests.e2e.runs import ONE_RANK, REWARDS, assert_same_run, read_completions, read_metrics, run_tiny, split


def test_own_loss_and_rewards_and_an_evaluation_that_training_does_not_notice(model, tmp_path):
    """The loss and rewards of configs/examples; with and without evaluations a run is the same to the last digit."""
    file = "configs/examples/my_reward.py"
    rewards = f"--reward.functions {file}:right_digits 1 {file}:shorter_than_most 1"
    flags = (ONE_RANK, "--algorithm.loss configs/examples/my_method.py:gentle --num-steps 3", rewards)
    evaluation = "--evaluation.interval 1 --evaluation.num-prompts 6 --evaluation.num-samples 3"
    run_tiny(model, tmp_path / "with", *flags, evaluation)
    run_tiny(model, tmp_path / "without", *flags)

    assert_same_run(tmp_path / "with", tmp_path / "without", only_steps=True)
    with_evaluation, without = (read_metrics(tmp_path / name) for name in ("with", "without"))
    for m in without:
        assert 0.5 < m["loss/weight_mean"] < 1 and "loss/sure_frac" in m  # the loss's own metrics
        assert m["reward/right_digits"] < 1 and m["grad_norm"] > 1e-3
        # of 4 completions, 3, 2, 1 and 0 others are longer, over 3: a mean of 1/2, less where lengths are equal
        assert 0 < m["reward/shorter_than_most"] <= 0.5

    evaluations = [m for m in with_evaluation if "eval/accuracy" in m]
    assert [m["step"] for m in evaluations] == [0, 1, 2, 3]
    assert {"eval/pass_at_1", "eval/pass_at_2", "eval/pass_at_3", "eval/reward_mean"} <= evaluations[0].keys()
    lines = read_lines(tmp_path / "with/evaluation.jsonl")
    assert len(lines) == 4 * 6 * (1 + 3) and {line["kind"] for line in lines} == {"greedy", "sample"}
    samples = [line["completion"] for line in lines if line["kind"] == "sample" and line["step"] == 0]
    assert len(set(samples)) > 12  # 18 samples of a random model: seeds differ
    trained = {line["completion"] for line in read_completions(tmp_path / "with") if line["step"] == 1}
    assert len(trained & set(samples)) < 3  # and are not those of training


def test_several_updates_at_several_temperatures(model, tmp_path):
    """2 epochs of 2 mini-batches, three temperatures, all over the bridges."""
    updates = "--algorithm.loss dapo --algorithm.num-mini-batches 2 --algorithm.num-epochs 2 --num-steps 3"
    kl = "--algorithm.kl-in reward --algorithm.kl-estimator k1 --algorithm.entropy-coef 0.01"
    temperatures = "--generator.temperature 0.7 1.0 1.3"
    run_tiny(model, tmp_path / "run", split(1, 0, 1), updates, kl, temperatures, nproc=2)
    metrics = read_metrics(tmp_path / "run")
    assert [m["step"] for m in metrics] == [1, 2, 3]
    for m in metrics:
        assert abs(m["loss/ratio_mean"] - 1) > 1e-5 and m["loss/ratio_max"] > 1.05  # later updates leave the old policy
        assert 0 < m["loss/clip_frac"] < 1
        # after a sync generator and policy are the same
        assert m["mismatch/max"] < 1e-4 and m["mismatch/ess"] > 0.999 and m["mismatch/corrected_frac"] == 0
    # the reference is the policy of the start: the first samples differ in nothing, later ones do
    assert abs(metrics[0]["reward/kl_penalty"]) < 1e-5 < abs(metrics[2]["reward/kl_penalty"])
    differences = [line["mismatch"] for line in read_completions(tmp_path / "run")]
    assert len(differences) == 3 * 16 and max(differences) < 1e-4


def test_verifiers_that_fail_cost_their_completion_alone(model, tmp_path):
    rewards = f"--reward.functions {REWARDS}:fails_for_some 1 {REWARDS}:digit_share 1"
    output = run_tiny(model, tmp_path / "run", ONE_RANK, rewards, "--reward.num-workers 4")
    lines = read_completions(tmp_path / "run")
    reasons = {0: "signal 9", 1: "KeyError: 'no such thing'"}
    for m in read_metrics(tmp_path / "run"):
        of_step = [line for line in lines if line["step"] == m["step"]]
        kinds = [sum(map(ord, line["completion"])) % 3 for line in of_step]
        assert set(kinds) == {0, 1, 2}  # the test means something
        assert m["reward/failed_count"] == m["reward/none_count"] == sum(kind < 2 for kind in kinds)
        for line, kind in zip(of_step, kinds, strict=True):
            assert (line["reward"] is None) == (line["advantage"] is None) == (kind < 2)
            assert reasons.get(kind, "") in "".join(line["failures"].values())
    assert "tiny_rewards.py:fails_for_some failed for" in output
