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
from tests import read_lines, write_lines
from tests.e2e.runs import REWARDS, ROWS, assert_same_run, read_metrics, without_clocks
from tests.tiny_models import KINDS, SMALL, make_image_model
from tests.torchrun import run_python, torchrun


@pytest.fixture(scope="module")
def flags(model, tmp_path_factory) -> str:
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
        write_lines(folder / f"{name}.jsonl", part)
    sources = f"chats {folder}/chats.jsonl texts {folder}/texts.jsonl"
    # the last ones are read only where a test evaluates by generating
    return f"""--model.path {model} --data.path {sources} --data.weights chats 2 --sequences-per-step 5 --num-steps 4
        --num-trainers 2 --trainer.micro-batch-tokens 64 --trainer.schedule linear --trainer.warmup-steps 2
        --validation.interval 2 --validation.path {sources} --validation.num-examples 4
        --checkpoint.interval 2 --metrics.no-tensorboard
        --reward.functions {REWARDS}:passes_by_chance 1
        --data.max-prompt-tokens 16 --generator.max-completion-tokens 12"""


def run_sft(run_dir: pathlib.Path, *flags: str, nproc: int) -> str:
    return torchrun("train_sft.py", "configs/toy_sft.py", f"--run-dir {run_dir}", *flags, nproc=nproc)


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory) -> pathlib.Path:
    run_dir = tmp_path_factory.mktemp("sft") / "run"
    output = run_sft(run_dir, flags, "--resume", nproc=2)
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
def test_resume_and_validation_on_another_number_of_ranks(finished, flags, tmp_path):
    run_dir = crashed(finished, tmp_path / "run")
    run_sft(run_dir, flags, "--num-trainers 1 --resume", nproc=1)
    for before, after in zip(read_metrics(finished), read_metrics(run_dir), strict=True):
        for name in ("loss", "validation/loss", "validation/chats/loss"):
            assert before.get(name) == pytest.approx(after.get(name), abs=1e-4), name


def test_4_steps_equal_2_resume_and_2(finished, flags, tmp_path):
    run_dir = crashed(finished, tmp_path / "run")
    output = run_sft(run_dir, flags, "--resume", nproc=2)
    assert "starting at step 2" in output
    assert [(m["step"], "loss" in m) for m in read_metrics(finished)] == [
        *((0, False), (1, True), (2, False), (2, True)),
        *((3, True), (4, False), (4, True)),
    ]
    assert_same_run(finished, run_dir)


def test_a_model_that_sees_images_keeps_its_other_parts(tmp_path):
    pytest.importorskip("grpo.features.qwen3_5")
    start = tmp_path / "start"
    make_image_model(start, SMALL | KINDS["qwen3_5"] | {"head_dim": 32, "num_attention_heads": 4})
    flags = f"--model.path {start} --data.path {ROWS} --sequences-per-step 5 --num-steps 2"
    finished = tmp_path / "finished"
    output = run_sft(finished, flags, "--num-trainers 2 --trainer.micro-batch-tokens 64", nproc=2)
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
def test_evaluation_between_steps_is_that_of_evaluate_alone(finished, flags, tmp_path):
    """The last two steps of the same run, now with an engine over both ranks: training does not notice."""
    run_dir = crashed(finished, tmp_path / "run")
    evaluation = f"--evaluation.interval 1 --evaluation.path {ROWS} --evaluation.num-prompts 40"
    more = "--evaluation.num-samples 2 --generator.tensor-parallel 2 --checkpoint.keep-best accuracy"
    run_sft(run_dir, flags, evaluation, more, "--resume", nproc=2)
    assert_same_run(finished, run_dir, only_steps=True)

    alone = tmp_path / "alone"
    own = f"--run-dir {alone} --generator.tensor-parallel 1"
    output = run_python("-m", "grpo.evaluate", run_dir / "model", run_dir / "config.py", own)
    assert "40 prompts; every completion is in" in output
    evaluated = {m["step"]: m for m in read_metrics(run_dir) if "eval/accuracy" in m}
    (expected,) = read_metrics(alone)
    assert [*evaluated] == [3, 4]
    assert 0 < expected["eval/accuracy"] < 1  # the comparison means something
    assert without_clocks(evaluated[4]) == without_clocks(expected) | {"step": 4}

    texts = {step: [line["completion"] for line in held_out(run_dir, step)] for step in (3, 4)}
    assert texts[3] != texts[4] == [line["completion"] for line in held_out(alone, 0)]  # each step had new weights


def held_out(run_dir: pathlib.Path, step: int) -> list[dict]:
    """The held-out completions of the weights after `step` steps."""
    return [line for line in read_lines(run_dir / "evaluation.jsonl") if line["step"] == step]


def test_validation_is_the_mean_over_tokens_of_each_set(finished):
    for m in (m for m in read_metrics(finished) if "loss" not in m):
        sets = [m["validation/chats/loss"], m["validation/texts/loss"]]
        assert m["validation/loss"] == pytest.approx(sum(sets) / 2) and sets[0] != sets[1]
    losses = [m["validation/chats/loss"] for m in read_metrics(finished) if "loss" not in m]
    assert losses[0] > losses[-1]


def test_the_window_of_a_run_that_stops_by_its_loss_continues(flags, tmp_path):
    """Of 10 steps, the last 3 are repeated."""
    flags = f"{flags} --num-trainers 1 --num-steps 20 --stop-at-loss 99 --validation.interval 0"
    flags += f" --run-dir {tmp_path}/run --checkpoint.interval 7 --too-long truncate --max-sequence-tokens 28"
    run_python("train_sft.py", "configs/toy_sft.py", flags)
    steps = read_metrics(tmp_path / "run")
    # of 15 rows drawn in three steps, 10 are chats, of which more than half are longer than 28 tokens
    assert 0.2 < sum(m["data/truncated_frac"] for m in steps) / len(steps) < 0.6
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000010")
    assert "starting at step 7" in run_python("train_sft.py", "configs/toy_sft.py", flags, "--resume")
    assert [m["step"] for m in read_metrics(tmp_path / "run")] == [m["step"] for m in steps] == [*range(1, 11)]


def test_show_prints_examples_and_stops(flags, tmp_path, capsys):
    pytest.importorskip("grpo.features.show")
    with pytest.raises(SystemExit, match="0"):
        words = f"configs/toy_sft.py {flags} --dry-run --show 2 --run-dir {tmp_path}/run".split()
        train_sft.main(load(SFTConfig, "", words))
    output = capsys.readouterr().out
    assert "example 3" not in output
    assert "example 2: 8 tokens, 7 of them labels" in output and "802+849<eos>" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_first_losses_and_gradient_norms_equal_a_plain_transformers_loop(name, model, tmp_path):
    """3 steps of 4 rows in their order, on 2 ranks in packed rows, against one sequence at a time."""
    rows = f"--data.path {ROWS} --data.no-shuffle --sequences-per-step 4 --num-steps 3 --checkpoint.no-export"
    ranks = f"--model.path {model} --num-trainers 2 --trainer.micro-batch-tokens 64"
    optimizer = f"--trainer.optimizer {name} --trainer.max-grad-norm 0.5 --trainer.weight-decay 0.1"
    run_sft(tmp_path / "run", rows, ranks, optimizer, nproc=2)
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
