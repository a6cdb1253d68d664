"""SFT takes the steps of a plain transformers loop, resumes exactly, validates, stops early, keeps unread parts."""

import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import train_sft
from configs.examples import toys
from grpo.config import SFTConfig
from grpo.config.recipes import load
from tests.e2e.runs import assert_same_run, read_metrics, without_clocks
from tests.tiny_models import KINDS, SMALL, make_image_model
from tests.torchrun import run_python, torchrun

REWARDS = pathlib.Path(__file__).parent / "tiny_rewards.py"
ROWS = f"{pathlib.Path(__file__).parent}/tiny_rows.py:addition"


@pytest.fixture(scope="module")
def arguments(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """4 steps of two sources, chats and texts, shuffled, mixed and packed; so few that epochs end."""
    folder = tmp_path_factory.mktemp("rows")
    rows = toys.addition("train")[:14]
    turns = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["completion"]}]
        for row in rows[:9]
    ]
    turns[0] += turns[1]  # a chat of two questions
    chats = [{"messages": messages} for messages in turns]
    files = {"chats": chats, "texts": [{"text": row["question"]} for row in rows[9:]]}
    for name, part in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    sources = [word for name in files for word in (name, folder / f"{name}.jsonl")]
    flags = ["configs/toy_sft.py", "--model.path", model, "--data.path", *sources]
    flags += ["--data.weights", "chats", 2, "--sequences-per-step", 5, "--num-steps", 4, "--num-trainers", 2]
    flags += ["--trainer.micro-batch-tokens", 64, "--trainer.schedule", "linear", "--trainer.warmup-steps", 2]
    flags += ["--validation.interval", 2, "--validation.path", *sources]
    flags += ["--validation.num-examples", 4, "--checkpoint.interval", 2, "--metrics.no-tensorboard"]
    # read only where a test evaluates by generating
    flags += ["--reward.functions", f"{REWARDS}:passes_by_chance", 1]
    flags += ["--data.max-prompt-tokens", 16, "--generator.max-completion-tokens", 12]
    return [str(flag) for flag in flags]


@pytest.fixture(scope="module")
def finished(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    run_dir = tmp_path_factory.mktemp("sft") / "run"
    output = torchrun("train_sft.py", *arguments, "--run-dir", run_dir, "--resume", nproc=2)
    assert "starting at step 0" in output and "held out: 4 of 9 rows of chats (" in output
    assert "validation 4/4 100%  chats  loss" in output
    return run_dir


def crashed(finished: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    """The finished run as if it had died after its log line of step 3."""
    shutil.copytree(finished, to)
    shutil.rmtree(to / "model")
    shutil.rmtree(to / "checkpoints" / "step-00000004")
    lines = (to / "metrics.jsonl").read_text().splitlines(keepends=True)
    (to / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 3))
    return to


@pytest.mark.slow
def test_resume_and_validation_on_another_number_of_ranks(finished, arguments: list[str], tmp_path: pathlib.Path):
    run_dir = crashed(finished, tmp_path / "run")
    torchrun("train_sft.py", *arguments, "--num-trainers", 1, "--run-dir", run_dir, "--resume", nproc=1)
    for before, after in zip(read_metrics(finished), read_metrics(run_dir), strict=True):
        for name in ("loss", "validation/loss", "validation/chats/loss"):
            assert before.get(name) == pytest.approx(after.get(name), abs=1e-4), name


def test_4_steps_equal_2_resume_and_2(finished: pathlib.Path, arguments: list[str], tmp_path: pathlib.Path):
    run_dir = crashed(finished, tmp_path / "run")
    output = torchrun("train_sft.py", *arguments, "--run-dir", run_dir, "--resume", nproc=2)
    assert "starting at step 2" in output
    assert [(m["step"], "loss" in m) for m in read_metrics(finished)] == [
        *((0, False), (1, True), (2, False), (2, True)),
        *((3, True), (4, False), (4, True)),
    ]
    assert_same_run(finished, run_dir)


def test_a_model_that_sees_images_keeps_its_other_parts(tmp_path: pathlib.Path):
    start = tmp_path / "start"
    make_image_model(start, SMALL | KINDS["qwen3_5"] | {"head_dim": 32, "num_attention_heads": 4})
    flags = ["configs/toy_sft.py", "--model.path", start, "--data.path", ROWS]
    flags += ["--sequences-per-step", 5, "--num-steps", 2, "--num-trainers", 2, "--trainer.micro-batch-tokens", 64]
    finished = tmp_path / "finished"
    output = torchrun("train_sft.py", *flags, "--run-dir", finished, nproc=2)
    assert "trainer.share_prompts: off" in output
    before, after = (load_file(folder / "model.safetensors") for folder in (start, finished / "model"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        is_carried = name.startswith(("model.visual.", "mtp."))
        assert is_carried == (tensor.dtype == after[name].dtype and torch.equal(tensor, after[name])), name
    assert (finished / "model" / "preprocessor_config.json").is_file()
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        _, report = kind.from_pretrained(finished / "model", output_loading_info=True)
        assert not any(report.values()), report


@pytest.mark.slow
def test_evaluation_between_steps_is_that_of_evaluate_alone(
    finished: pathlib.Path, arguments: list[str], tmp_path: pathlib.Path
):
    """The last two steps of the same run, now with an engine over both ranks: training does not notice."""
    run_dir = crashed(finished, tmp_path / "run")
    flags = [*arguments, "--run-dir", run_dir, "--resume", "--evaluation.interval", 1, "--evaluation.path"]
    flags += [ROWS, "--evaluation.num-prompts", 40, "--evaluation.num-samples", 2]
    flags += ["--generator.tensor-parallel", 2, "--checkpoint.keep-best", "accuracy"]
    torchrun("train_sft.py", *flags, nproc=2)
    assert_same_run(finished, run_dir, only_steps=True)

    alone = tmp_path / "alone"
    output = run_python(
        *("-m", "grpo.evaluate", run_dir / "model", run_dir / "config.py", "--run-dir", alone),
        *("--generator.tensor-parallel", 1),
    )
    assert "40 prompts; every completion is in" in output
    evaluated = {m["step"]: m for m in read_metrics(run_dir) if "eval/accuracy" in m}
    (expected,) = read_metrics(alone)
    assert [*evaluated] == [3, 4]
    assert 0 < expected["eval/accuracy"] < 1  # the comparison means something
    assert without_clocks(evaluated[4]) == without_clocks(expected) | {"step": 4}

    texts = {step: [line["completion"] for line in evaluation(run_dir, step)] for step in (3, 4)}
    assert texts[3] != texts[4] == [line["completion"] for line in evaluation(alone, 0)]  # each step had new weights


def evaluation(run_dir: pathlib.Path, step: int) -> list[dict]:
    """The held-out completions of the weights after `step` steps."""
    lines = (json.loads(line) for line in (run_dir / "evaluation.jsonl").read_text().splitlines())
    return [line for line in lines if line["step"] == step]


def test_validation_is_the_mean_over_tokens_of_each_set(finished: pathlib.Path):
    for m in (m for m in read_metrics(finished) if "loss" not in m):
        sets = [m["validation/chats/loss"], m["validation/texts/loss"]]
        assert m["validation/loss"] == pytest.approx(sum(sets) / 2) and sets[0] != sets[1]
    losses = [m["validation/chats/loss"] for m in read_metrics(finished) if "loss" not in m]
    assert losses[0] > losses[-1]


def test_the_window_of_a_run_that_stops_by_its_loss_continues(arguments: list[str], tmp_path: pathlib.Path):
    """Of 10 steps, the last 3 are repeated."""
    flags = [*arguments, "--num-trainers", 1, "--num-steps", 20, "--stop-at-loss", 99, "--validation.interval", 0]
    flags += ["--run-dir", tmp_path / "run", "--checkpoint.interval", 7]
    flags += ["--too-long", "truncate", "--max-sequence-tokens", 28]
    run_python("train_sft.py", *flags)
    steps = read_metrics(tmp_path / "run")
    # of 15 rows drawn in three steps, 10 are chats, of which more than half are longer than 28 tokens
    assert 0.2 < sum(m["data/truncated_frac"] for m in steps) / len(steps) < 0.6
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000010")
    assert "starting at step 7" in run_python("train_sft.py", *flags, "--resume")
    assert [m["step"] for m in read_metrics(tmp_path / "run")] == [m["step"] for m in steps] == [*range(1, 11)]


def test_show_prints_examples_and_stops(arguments: list[str], tmp_path: pathlib.Path, capsys):
    with pytest.raises(SystemExit, match="0"):
        train_sft.main(
            load(SFTConfig, "", [*arguments, "--dry-run", "--show", "2", "--run-dir", str(tmp_path / "run")])
        )
    output = capsys.readouterr().out
    assert "example 3" not in output
    assert "example 2: 8 tokens, 7 of them labels" in output and "802+849<eos>" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_first_losses_and_gradient_norms_equal_a_plain_transformers_loop(
    name: str, model: pathlib.Path, tmp_path: pathlib.Path
):
    """3 steps of 4 rows in their order, on 2 ranks in packed rows, against one sequence at a time."""
    flags = ["configs/toy_sft.py", "--model.path", model, "--data.path", ROWS, "--data.no-shuffle"]
    flags += ["--sequences-per-step", 4]
    flags += ["--num-steps", 3, "--num-trainers", 2, "--trainer.micro-batch-tokens", 64, "--checkpoint.no-export"]
    flags += ["--trainer.max-grad-norm", 0.5, "--trainer.weight-decay", 0.1, "--run-dir", tmp_path / "run"]
    flags += ["--trainer.optimizer", name]
    torchrun("train_sft.py", *flags, nproc=2)
    measured = [(m["loss"], m["grad_norm"]) for m in read_metrics(tmp_path / "run")]

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    by_muon, by_adamw = [], []
    for place, weight in policy.named_parameters():
        is_matrix = name == "muon" and ".layers." in place and weight.ndim == 2
        (by_muon if is_matrix else by_adamw).append(weight)
    optimizers = [torch.optim.AdamW(by_adamw, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)]
    if by_muon:
        optimizers.append(torch.optim.Muon(by_muon, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    rows, expected = toys.addition("train"), []
    for step in range(3):
        nats, num_labels = torch.zeros(()), 0
        for row in rows[4 * step : 4 * step + 4]:
            question = [{"role": "user", "content": row["question"]}]
            text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
            prompt, answer = tokenizer(text)["input_ids"], tokenizer(row["completion"])["input_ids"]
            ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
            labels = ids[0, len(prompt) :]
            logits = policy(ids).logits[0, len(prompt) - 1 : -1]
            nats = nats + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            num_labels += len(labels)
        (nats / num_labels).backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        expected.append(((nats / num_labels).item(), norm.item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(norm > 0.5 for _, norm in expected)  # so clipping is in the comparison
    tolerance = 1e-5 if name == "adamw" else 1e-3  # Muon rounds to bfloat16
    assert measured == [pytest.approx(pair, rel=tolerance) for pair in expected]
