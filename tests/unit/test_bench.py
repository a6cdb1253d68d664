"""What benches say of runs: which seconds count, what a run leaves that is cut off, whether it is as expected; models
that several processes write; what is left of programs that do not start or do not end."""

import dataclasses
import io
import json
import pathlib
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import load
from tests.torchrun import ROOT

sys.path.append(str(ROOT / "tests" / "bench"))

import gpu_checks
import learning
import random_checkpoint
import real
import speed
import thirty

OURS = [
    {"step": 0, "eval/accuracy": 0.4},
    {"step": 1, "time/startup": 60, "time/step": 2},
    {"step": 2, "eval/accuracy": 0.5},  # written before its step's line
    {"step": 2, "time/step": 3, "time/evaluate": 1},
]
TRL = [
    {"step": 0, "eval/accuracy": 0.4},
    {"step": 0, "time/startup": 60},
    {"step": 1, "time/step": 2},
    {"step": 2, "time/step": 2},  # its steps are without evaluations
    {"step": 2, "eval/accuracy": 0.5},
]


@pytest.mark.parametrize("lines", [OURS, TRL])
def test_seconds_are_those_since_the_launch_without_evaluations(lines):
    assert learning.curve(lines) == [(0, 60, 0.4), (2, 60 + 2 + 2, 0.5)]


PROGRAM = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
lines = [{"step": 0, "time": 0, "eval/a/accuracy": 0.2, "eval/b/accuracy": 0.4}]
lines += [{"step": n, "time": 0, "reward/mean": n / 100} for n in range(1, 20)]
lines += [{"step": 20, "time": 0, "eval/a/accuracy": 0.5, "eval/b/accuracy": 0.6}]
lines += [{"step": 20, "time": 0, "reward/mean": 0.2}]  # a step's own line comes after its evaluation
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
sys.exit(3)
"""


def test_a_real_run_that_fails_leaves_its_evaluations_and_the_means_of_ten_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(real, "RUNS_DIR", tmp_path)
    expected = {0: (0.2, 0.4), 20: (0.6, 0.7), 30: None}
    monkeypatch.setitem(real.RUNS, "gsm8k", real.Run("recipe.py", expected=expected))
    job = real.Job("gsm8k")
    summary = tmp_path / "out.jsonl"
    job.start([sys.executable, "-c", PROGRAM, job.folder], summary, tmp_path / "log", on_console=False)
    real.follow(job, seconds=None)
    written = [json.loads(line) for line in summary.read_text().splitlines()]
    means = {line["step"]: line["reward/mean"] for line in written if "reward/mean" in line}
    assert means == {1: 0.01, 2: 0.02, 10: pytest.approx(0.065), 20: pytest.approx(0.155)}
    accuracies = {line["step"]: real.accuracy_of(line) for line in written if real.accuracy_of(line) is not None}
    assert accuracies == {0: pytest.approx(0.3), 20: pytest.approx(0.55)}
    verdicts = {"0": "within 0.2 to 0.4: 0.300", "20": "OUTSIDE 0.6 to 0.7: 0.550", "30": "not reached"}
    assert written[-1] == {"exit_code": 3, "verdict": verdicts}
    assert job.code == 3 and real.is_outside(job)


@pytest.mark.parametrize("name", real.RUNS)
@pytest.mark.parametrize("beside", [False, True])
def test_flags_of_a_real_run_parse(name, beside, tmp_path):
    """With local folders, as on a machine without a network."""
    words = ["--model", str(tmp_path), "--data", str(tmp_path), "--teacher", str(tmp_path), "--steps", "3"]
    words += ["--", "--trainer.learning-rate", "0.5"]
    options = real.read_options([name, "gsm8k:8", *words] if beside else [name, "--tiny", *words])
    chosen = real.RUNS[name]
    config = load(
        SFTConfig if chosen.script == "train_sft.py" else GRPOConfig,
        str(ROOT / "configs" / chosen.recipe),
        real.flags_of(options.jobs[0], options),
    )
    paths = [source.path for source in (*config.data.all_sources, *config.evaluation.held_out(config.data))]
    assert config.num_steps == 3 and config.trainer.learning_rate == 0.5
    # rows that a function of a package makes need no folder
    paths = [path for path in paths if ".py:" not in path]
    assert all(path.startswith(str(tmp_path)) for path in (config.model.path, *paths))
    if beside:
        assert config.generator.engine == {"max_num_seqs": 512, "kv_cache_memory_bytes": chosen.cache_bytes}
        assert config.trainer.micro_batch_tokens < type(config.trainer)().micro_batch_tokens


GIB = {"gsm8k": 30, "programs": 30, "after_sft": 30, "sft": 25, "gsm8k_1_5b_lora": 27, "gsm8k_1_5b": 58, "distill": 33}


@pytest.fixture
def gib(monkeypatch):
    """Let runs take GIB, whatever was measured last."""
    for name, amount in GIB.items():
        monkeypatch.setitem(real.RUNS, name, dataclasses.replace(real.RUNS[name], gib=amount))


@pytest.mark.parametrize(
    ("states", "gpu_gib", "seconds_left", "chosen"),
    [
        ({"gsm8k": "waits", "programs": "waits"}, 80, 900, "gsm8k"),
        # one engine at a time starts
        ({"gsm8k": "starts", "programs": "waits"}, 80, 900, None),
        ({"gsm8k": "runs", "programs": "waits"}, 80, 900, "programs"),
        # one that failed at its start holds nothing back
        ({"gsm8k": "ended", "programs": "waits"}, 80, 900, "programs"),
        # 80 - 30 - 25 = 25 are free, 30 needed; a run that ends makes room
        ({"gsm8k": "runs", "sft": "runs", "programs": "waits"}, 80, 900, None),
        ({"gsm8k": "ended", "sft": "runs", "programs": "waits"}, 80, 900, "programs"),
        # 80 - 30 = 50 are too few for 58: a later run goes first
        ({"gsm8k": "runs", "gsm8k_1_5b": "waits", "sft": "waits"}, 80, 900, "sft"),
        ({"gsm8k": "runs", "gsm8k_1_5b": "waits", "sft": "waits"}, 88, 900, "gsm8k_1_5b"),
        # exactly as much as it takes: 143 - 58 - 27 - 25 = 33
        ({**dict.fromkeys(("gsm8k_1_5b", "gsm8k_1_5b_lora", "sft"), "runs"), "distill": "waits"}, 143, 900, "distill"),
        # its model comes from sft
        ({"after_sft": "waits", "sft": "waits"}, 80, 900, "sft"),
        ({"after_sft": "waits", "sft": "runs"}, 80, 900, None),
        ({"after_sft": "waits", "sft": "ended"}, 80, 900, "after_sft"),
        ({"after_sft": "waits", "sft": "dropped"}, 80, 900, None),
        # a start takes 120 s
        ({"gsm8k": "waits"}, 80, 120, "gsm8k"),
        ({"gsm8k": "waits"}, 80, 119, None),
        ({"gsm8k": "runs", "programs": "ended"}, 80, 900, None),
    ],
)
def test_a_real_run_starts_when_memory_model_and_seconds_are_there(gib, states, gpu_gib, seconds_left, chosen):
    jobs = [real.Job(name, state=state) for name, state in states.items()]
    job = real.next_to_start(jobs, gpu_gib, seconds_left)
    assert (job and job.name) == chosen


def test_vllm_gets_a_tenth_of_the_gpu_even_if_a_run_takes_less(gib):
    # 11 runs of 25 GiB leave 29 of 304: enough for sft, too few for its engine, which asks for 30.4
    jobs = [real.Job("sft", seed, "runs") for seed in range(11)]
    waiting = real.Job("sft", 11)
    assert real.next_to_start([*jobs, waiting], 304, 900) is None
    assert real.next_to_start([*jobs[:10], waiting], 304, 900) is waiting


def test_a_run_starts_from_the_model_of_its_seed():
    jobs = real.read_options(["after_sft:1", "after_sft:2", "sft:0", "sft:1"]).jobs
    assert real.source_of(jobs[0], jobs) is jobs[3]  # seed 1
    assert real.source_of(jobs[1], jobs) is jobs[2]  # no sft has seed 2
    assert real.source_of(jobs[2], jobs) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gsm8k", "gsm8k_1_5b", "--model-1-5b", "large"], "58 GiB, there are 48"),
        (["gsm8k", "after_sft"], "starts from what sft leaves"),
        (["gsm8k", "gsm8k_1_5b_lora", "--model", "small"], "--model-1-5b"),
        (["gsm8k", "distill", "--model", "small"], "--teacher"),
    ],
)
def test_runs_that_would_get_a_wrong_model_or_no_memory_are_refused(gib, words, message):
    options = real.read_options(words)
    with pytest.raises(SystemExit, match=message):
        real.refuse_what_cannot_run(options.jobs, options, gpu_gib=48)


def test_a_run_that_fails_beside_others_ends_alone_and_the_last_are_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(real, "RUNS_DIR", tmp_path)
    monkeypatch.setattr(real, "LEAST_START_SECONDS", 0)
    programs = {"gsm8k": PROGRAM, "sft": PROGRAM.replace("exit(3)", "exit(0)")}
    programs["grpo"] = PROGRAM.replace("sys.exit(3)", "import time; time.sleep(60)")
    monkeypatch.setattr(real.Job, "command", lambda job, _: [sys.executable, "-c", programs[job.name], job.folder])
    words = ["gsm8k", "sft", "after_sft", "grpo", "--gpu-gib", "60", "--seconds", "12", "--out", str(tmp_path / "out")]
    options = real.read_options(words)
    assert real.run_side_by_side(options.jobs, options) == 1
    codes = {job.name: job.code for job in options.jobs}
    assert codes == {"gsm8k": 3, "sft": 0, "after_sft": None, "grpo": 124}
    assert "gsm8k-0: exit code 3" in capsys.readouterr().out
    rows = (tmp_path / "out" / "table.txt").read_text().splitlines()
    assert [row.split(" | ")[-1].strip(" |") for row in rows[2:]] == ["3", "0", "dropped", "124"]
    for name in ("gsm8k", "sft", "grpo"):  # each has its evaluations
        lines = [json.loads(line) for line in (tmp_path / "out" / f"{name}-0.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "eval/a/accuracy" in line] == [0, 20]
        assert (tmp_path / "out" / f"{name}-0.metrics.jsonl").exists()
        assert (tmp_path / "out" / f"{name}-0.log").exists()


def test_one_row_says_what_a_real_run_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(real, "RUNS_DIR", tmp_path)
    job = real.Job("programs", 3, code=124, process=object())
    job.folder.mkdir()
    (job.folder / "config.py").write_text("config = GRPOConfig(\n    num_steps=60,\n)\n")
    passes = {"eval/pass_at_1": 0.4, "eval/pass_at_8": 0.7}
    seconds = {1: 90.0, 2: 30.0, 3: 9.0, 4: 17.0}  # the first two compile; the fourth evaluates for 6 s
    job.lines = [{"step": 0, "eval/accuracy": 0.5, **passes}]
    job.lines += [{"step": n, "reward/mean": n / 10, "time/step": s} for n, s in seconds.items()]
    job.lines[-1]["time/evaluate"] = 6.0
    job.lines += [{"step": 4, "eval/chain/accuracy": 0.25, "eval/sums/accuracy": 0.75}]
    assert real.row(job) == {
        "name": "programs",
        "seed": 3,
        "steps": "4 of 60",
        "step: accuracy": "0: 0.500, 4: 0.250/0.750",
        "step: pass@k": "0: @1 0.400 @8 0.700",
        "reward, first 10": pytest.approx(0.25),
        "reward, last 10": pytest.approx(0.25),
        "s/step": "10 (9 to 11)",
        "turns, last 10": "-",
        "calls, last 10": "-",
        "exit code": 124,
    }


def test_the_copy_of_a_long_file_has_its_first_and_last_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(real, "MOST_BYTES", 14)
    source = tmp_path / "source"
    target = tmp_path / "target"
    source.write_text("1234\n5678\n90ab\ncdef\n")  # 7 bytes at each end hold a line and a part of another
    real.copy_ends(source, target)
    assert target.read_text() == "1234\ncdef\n"
    source.write_text("1234\n5678\n90a\n")
    real.copy_ends(source, target)
    assert target.read_text() == "1234\n5678\n90a\n"


@pytest.fixture
def blocks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A mixture of two blocks, each in a file of its own, where thirty.py looks for it."""
    monkeypatch.setenv("BENCH_MODELS", str(tmp_path))
    monkeypatch.setattr(random_checkpoint, "NUM_PROMPTS", 4)  # which no test reads
    folder = tmp_path / "tiny-moe-2-in-blocks"
    folder.mkdir()
    random_checkpoint.main(random_checkpoint.Arguments("tiny-moe", folder, num_layers=2, writers=2))
    return folder


def tensors_of(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("fails", "outcome"), [((True, False), "done"), ((True, True), "exit code 1")])
def test_steps_whose_sync_check_fails_are_taken_once_more_without_it(fails, outcome, tmp_path, monkeypatch):
    monkeypatch.setattr(thirty, "RUNS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["thirty.py", "--tiny"])
    bench = thirty.Bench(thirty.read_options(), "", gpu_gib=80, shape="tiny-moe", ends=0.0, out=tmp_path / "out")
    flags = []

    def train(bench: thirty.Bench, part: str, layers: int, run_dir: pathlib.Path, more: list) -> int:
        flags.append("--sync-check-interval" in bench.flags(layers, run_dir))
        has_failed = fails[len(flags) - 1]
        (tmp_path / "steps.log").write_text(f"error: {thirty.CHECK_FAILED}" if has_failed else "done")
        return int(has_failed)

    monkeypatch.setattr(thirty, "train", train)
    assert thirty.take_steps(bench) == outcome
    assert flags == [False, True]


def test_a_model_written_in_blocks_is_one_that_transformers_loads(blocks: pathlib.Path, monkeypatch):
    """So is the model of its first block, whose weights are links to the same files."""
    monkeypatch.setattr(sys, "argv", ["thirty.py", "--tiny"])
    bench = thirty.Bench(thirty.read_options(), base="", gpu_gib=80, shape="tiny-moe", ends=0.0, out=blocks)
    thirty.take_first_blocks(bench, 1)
    written = tensors_of(blocks)
    for number, folder in ((2, blocks), (1, bench.model(1))):
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()) and len(model.model.layers) == number
        assert model.lm_head.weight.equal(written["lm_head.weight"])
        experts = model.model.layers[number - 1].mlp.experts.down_proj
        assert experts[5].equal(written[f"model.layers.{number - 1}.mlp.experts.5.down_proj.weight"])
    assert tensors_of(bench.model(1)).keys() < written.keys()
    assert model.dtype == torch.bfloat16 and 0.019 < experts.float().std() < 0.021


@pytest.mark.parametrize(
    "name", [name for name, shape in random_checkpoint.SHAPES.items() if "qwen2" in shape.values()]
)
def test_heads_of_a_random_qwen2_are_as_wide_as_vllm_takes_them_to_be(name):
    """vLLM divides, whatever config.json says, and reads the first rows of weights that are too large."""
    shape = {"head_dim": random_checkpoint.HEAD_DIM} | random_checkpoint.SHAPES[name]
    assert shape["head_dim"] * shape["num_attention_heads"] == shape["hidden_size"]


VARIANT = """
import sys, time
if sys.argv[-1] == "stuck":
    time.sleep(100)
if sys.argv[-1] == "broken":
    sys.exit(1)
print('{"started": 1}', flush=True)
for line in sys.stdin:
    print(f'{{"twice": {2 * int(line)}}}', flush=True)
"""


def test_variants_that_do_not_start_leave_the_others_to_be_measured(tmp_path, monkeypatch):
    (tmp_path / "bench.py").write_text(VARIANT)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bench.py")])
    monkeypatch.setenv("OUT", str(tmp_path))
    with speed.side_by_side(["stuck", "good", "broken"], "bench", limit=8) as started:
        ((name, (process, first_answer)),) = started.items()
        assert name == "good" and first_answer == {"started": 1}
        assert speed.answer(process, "4") == {"twice": 8}
    assert process.returncode is not None


def test_gpu_checks_whose_time_is_over_show_what_they_have(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_checks, "WORK", tmp_path)
    monkeypatch.setattr(gpu_checks, "write_models", lambda folder: None)
    monkeypatch.setattr(gpu_checks, "end_all", lambda processes: [process.kill() for process in processes])
    endless = "import time; print('kept: 7', flush=True); time.sleep(100)"
    checks = [gpu_checks.Check("endless", ["-c", endless]), gpu_checks.Check("late", ["-c", endless])]
    file = io.StringIO()
    assert gpu_checks.run_all(checks, num_jobs=1, seconds=4, file=file) == 1
    assert "ENDED  endless" in file.getvalue() and "    kept: 7" in file.getvalue()
    assert file.getvalue().endswith("ended before their end: endless; not run: 1\n")
