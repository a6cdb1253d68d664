"""Every method on one recording, in one command: the weights differ where the formulas do, and only there."""

import itertools
import pathlib
from collections.abc import Iterable

import pytest
import torch
from safetensors.torch import load_file

from grpo.config import PAPER_DEFAULTS, change
from grpo.config.recipes import as_recipe
from grpo.data.batches import make_batch
from grpo.data.recorded import RecordedStep, save_step
from tests.e2e.runs import TINY, read_metrics
from tests.rollouts import rewarded, sequence
from tests.torchrun import run_python

GENTLE = "configs/examples/my_method.py:gentle"
OVER_MEDIAN = "grpo+configs/examples/my_method.py:over_median"
WIDER = "gspo+clip_high=1"
METHODS = (*PAPER_DEFAULTS, GENTLE)
NUM_STEPS, GROUP_SIZE = 3, 4
# At ratio 1 the surrogates are the plain policy gradient: what is left is how advantages and averages are taken.
SAME_AT_RATIO_1 = {"grpo": 1, "gspo": 1, "sapo": 1, "dapo": 2, "cispo": 2, "dr_grpo": 3, "reinforce": 4}


@pytest.fixture(scope="module")
def recording(model, tmp_path_factory) -> pathlib.Path:
    """Folder of a run of DAPO with an upper clip of its own, as a run with `record` leaves it; nobody sampled it."""
    run_dir, draw = tmp_path_factory.mktemp("recorded") / "run", torch.Generator().manual_seed(0)
    algorithm = {"algorithm.loss": "dapo", "algorithm.clip_high": 0.5, "algorithm.kl_coef": 0.0}
    config = change(TINY, {"model.path": str(model), "num_steps": NUM_STEPS, "roles.num_references": 0, **algorithm})
    run_dir.mkdir()
    (run_dir / "config.py").write_text(as_recipe(config))
    for step in range(1, NUM_STEPS + 1):
        samples = []
        for length in torch.randint(2, 13, (8,), generator=draw).tolist():
            ids_T = torch.randint(5, 20, (4 + length,), generator=draw)
            samples.append(
                sequence(ids_T, torch.arange(len(ids_T)) >= 4, torch.full((len(ids_T),), -3.0), prompt_tokens=4)
            )
        rewards_S = torch.rand(8, generator=draw)
        if step == NUM_STEPS:  # has no gradient, but for a method without a baseline
            rewards_S = torch.ones(8)
        recorded = RecordedStep(rewarded(make_batch(samples), rewards_S), GROUP_SIZE, {})
        save_step(str(run_dir), step, recorded)
    return run_dir


def weights_of(run_dir: pathlib.Path, methods: Iterable[str]) -> dict[str, torch.Tensor]:
    """All weights of each method, in a row."""
    weights = {}
    for name in (method.rpartition(":")[2] for method in methods):
        tensors = load_file(run_dir / name / "model" / "model.safetensors")
        weights[name] = torch.cat([tensors[key].flatten() for key in sorted(tensors)])
    return weights


def test_with_one_update_methods_differ_by_advantages_and_averages_alone(recording, tmp_path):
    flags = f"--run-dir {tmp_path}/one --methods {' '.join(METHODS)} --trainer.learning-rate 1e-3"
    output = run_python("-m", "grpo.replay", recording, flags)
    assert "no clip acts" in output and "nan" not in output
    assert "clip_high=0.28" not in output  # the recorded run's own 0.5 stays with its loss
    follows = "from algorithm.loss=dr_grpo follow advantages='group_mean', aggregation='fixed_horizon'"
    assert f"method dr_grpo\n  {follows}" in output
    assert "aggregation='token_mean', clip_low=1.0, clip_high=4.0" in output  # cispo's
    weights = weights_of(tmp_path / "one", METHODS)
    for one, other in itertools.combinations(SAME_AT_RATIO_1, 2):
        difference = (weights[one] - weights[other]).abs().mean()
        if SAME_AT_RATIO_1[one] == SAME_AT_RATIO_1[other]:
            assert difference < 1e-6, (one, other)
        else:
            assert difference > 1e-5, (one, other)
    first = read_metrics(tmp_path / "one")[0]
    cosines = {name: first[f"{name}/cosine"] for name in SAME_AT_RATIO_1}
    assert [name for name, value in cosines.items() if value > 1 - 1e-6] == ["grpo", "gspo", "sapo"]
    assert all(first[f"{name}/clipped"] == 0 for name in ("grpo", "dapo", "gspo"))


def test_with_several_updates_each_method_is_another_and_goes_the_way_of_a_replay_with_its_loss(recording, tmp_path):
    updates = "--algorithm.num-mini-batches 2 --algorithm.num-epochs 2 --trainer.learning-rate 1e-2"
    methods = f"--methods {' '.join(METHODS)} {WIDER} {OVER_MEDIAN} --run-dir {tmp_path}/all"
    output = run_python("-m", "grpo.replay", recording, methods, updates)
    assert "no clip acts" not in output
    weights = weights_of(tmp_path / "all", (*METHODS, WIDER))
    header, *rows = output[output.index("mean ") :].splitlines()
    assert header.split() == ["mean", *weights, "grpo+over_median"]
    assert "cosine" in [row.split()[0] for row in rows]
    for one, other in itertools.combinations(weights, 2):
        assert (weights[one] - weights[other]).abs().mean() > 1e-5, (one, other)
    of_all = read_metrics(tmp_path / "all")
    second = of_all[1]
    assert second["grpo/clipped"] > 0 and second["gspo/clipped"] > 0 and second["grpo/cosine"] == pytest.approx(1)

    alone = f"--algorithm.loss gspo --algorithm.clip-high 4e-4 --run-dir {tmp_path}/alone"
    run_python("-m", "grpo.replay", recording, alone, updates)
    assert [m["gspo/grad_norm"] for m in of_all] == [m["grad_norm"] for m in read_metrics(tmp_path / "alone")]
    models = tmp_path / "all" / "gspo" / "model", tmp_path / "alone" / "model"
    assert len({(model / "model.safetensors").read_bytes() for model in models}) == 1
