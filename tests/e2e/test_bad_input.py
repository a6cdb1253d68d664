"""Bad input is one clear error on rank 0, within seconds and before a model loads; a failing rank ends the job."""

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from configs.examples import toys
from grpo import evaluate
from grpo.config import DataConfig, GRPOConfig, ModelConfig, SFTConfig, change
from grpo.config.recipes import load
from grpo.folder.run_folder import begin_run, step_folders
from grpo.run.session import Session
from grpo.run.start import read_grpo, read_sft
from grpo.watch.failures import BadInput
from tests.e2e.runs import TINY
from tests.tiny_models import SMALL
from tests.torchrun import run_torchrun

REWARDS = pathlib.Path(__file__).parent / "tiny_rewards.py"
# The first of these lines begins what torchrun itself says about a rank that failed.
LAUNCHER = re.compile(r"^\S* ?E\d{4} .*|^Traceback \(most recent call last\):\n  File \"<frozen runpy>\"", re.MULTILINE)
COLOCATED = ("--roles.colocated", "--roles.num-trainers", "1", "--roles.num-references", "0")


# ---------------------------------------------------------------------------------------------------------------------
# The messages, in this process
# ---------------------------------------------------------------------------------------------------------------------


def config_of(*arguments: object) -> GRPOConfig:
    return load(GRPOConfig, TINY, [TINY, *map(str, arguments)])


def copy_of(model: pathlib.Path, target: pathlib.Path, *, without: str = "", **changes: object) -> pathlib.Path:
    """The model folder without one file, or with changes in config.json."""
    shutil.copytree(model, target)
    for file in target.glob(without) if without else ():
        file.unlink()
    if changes:
        config = json.loads((target / "config.json").read_text()) | changes
        (target / "config.json").write_text(json.dumps(config))
    return target


# name: (how to spoil a copy of the model, what the message must contain in addition to the folder)
BAD_MODELS = {
    "no folder": (lambda model, target: target, []),
    "no weights": (lambda model, target: copy_of(model, target, without="*.safetensors"), [".safetensors"]),
    "too short": (
        lambda model, target: copy_of(model, target, max_position_embeddings=20),
        ["sequences of up to 28 tokens", "20 positions", "--data.max-prompt-tokens", "in SFT --max-sequence-tokens"],
    ),
    "another architecture": (lambda model, target: copy_of(model, target, model_type="gpt2"), ["gpt2", "qwen3"]),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_models_that_cannot_be_used(name: str, model: pathlib.Path, tmp_path: pathlib.Path):
    spoil, parts = BAD_MODELS[name]
    folder = spoil(model, tmp_path / "spoiled")
    message = refusal("--model.path", folder, "--run-dir", tmp_path / "run")
    for part in (str(folder), *parts):
        assert part in message


OVERLONG = "--reward.functions overlong_penalty 1 --reward.options"
# flags, {here} in them is a folder with files.py: what the message must contain
BAD_FLAGS = {
    "--data.path {here}/rows.jsonl --data.prompt-column q": "columns there: question, answer; name one",
    "--data.path {here}/lists.jsonl --reward.functions math_reward 1": "is list .'3'., .*--data.answer-column answer.0",
    "--data.path {here}/lists.jsonl --reward.functions code_reward 1 --data.columns tests number": "tests of type int",
    "--data.path {here}/rows.jsonl:foo": "rows.jsonl:foo: a file has no splits; name the file alone",
    "--algorithm.loss {here}/files.py:unpacks": "files.py:unpacks, line 7: TypeError: ",
    "--evaluation.interval 1 --checkpoint.interval 1 --checkpoint.keep-best acuracy": "did you mean accuracy",
    "--generator.tensor-parallel 3 --roles.num-generators 3": "2 key-value heads and",
    "--reward.functions math 1": "unknown reward function 'math'",
    "--reward.functions {here}/files.py:f 1": "functions there: mean, unpacks",
    "--reward.functions regex_match 1": "regex_match needs pattern; give it with --reward.options regex_match",
    OVERLONG + ' overlong_penalty {{"tokens":13}}': "tokens is 13; .* = 12",
    OVERLONG + ' overlong_penalty {{"token":5}}': "no option 'token' .did you mean tokens",
    "--algorithm.loss {here}/files.py:f": "functions there: mean, unpacks",
    "--algorithm.loss {here}/files.py:mean": "files.py:mean returned a loss .* one floating number per position",
}
FILES = """
def mean(inputs, config):  # the most likely mistake
    return inputs.logprobs_BT.mean(), {}


def unpacks(inputs, config):
    logprobs, advantages = inputs
"""


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_what_a_run_reads_is_looked_at_before_models_load(flags: str, model: pathlib.Path, tmp_path: pathlib.Path):
    (tmp_path / "files.py").write_text(FILES)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+2", "answer": "3"}\n{"question": "1+2"}\n')
    (tmp_path / "lists.jsonl").write_text('{"question": "1+2", "answer": ["3"], "number": 3}\n' * 64)
    arguments = flags.format(here=tmp_path).split(" ")
    message = refusal("--model.path", model, "--run-dir", tmp_path / "run", *arguments)
    assert re.search(BAD_FLAGS[flags], message), message


def test_references_that_read_other_tokens(model: pathlib.Path, tmp_path: pathlib.Path):
    """A teacher must have the policy's tokens under the same ids, and a row for each of them."""

    def refused(policy: pathlib.Path, reference: pathlib.Path) -> str:
        distill = ("--algorithm.distill-coef", 1, "--model.reference-path", reference)
        return refusal("--model.path", policy, "--run-dir", tmp_path / "run", *distill)

    other = toys.make_model(tmp_path / "other", toys.trained_tokenizer(["1 + 1"], 300), 0, SMALL)
    message = refused(model, other)
    for part in (f"reference {other} has another vocabulary than {model}", "of 32 tokens", "'<pad>', which is 0 and"):
        assert part in message
    larger = toys.make_model(tmp_path / "larger", toys.addition_tokenizer(), 0, SMALL | {"vocab_size": 64})
    assert f"reference {model} has 32 vocabulary entries and {larger} 64" in refused(larger, model)
    assert f"{tmp_path / 'no'} does not exist" in refused(model, tmp_path / "no")
    start_and_finish(config_of("--model.path", model, "--model.reference-path", larger, "--run-dir", tmp_path / "run"))


def test_a_refused_run_overwrites_nothing(model: pathlib.Path, tmp_path: pathlib.Path):
    os.close(begin_run(GRPOConfig(run_dir=str(tmp_path / "run")), "train_grpo.py"))
    (tmp_path / "run/checkpoints/step-00000001").mkdir(parents=True)
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    refusal("--model.path", tmp_path / "no model", "--run-dir", tmp_path / "run", "--overwrite")
    assert (tmp_path / "run/checkpoints").is_dir() and (tmp_path / "run/metrics.jsonl").read_text() == "{}\n"
    start_and_finish(config_of("--model.path", model, "--run-dir", tmp_path / "run", "--overwrite"))
    assert not step_folders(tmp_path / "run") and not (tmp_path / "run/metrics.jsonl").exists()


def test_existing_run_folder(model: pathlib.Path, tmp_path: pathlib.Path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert "no run.json" in refusal("--model.path", model, "--run-dir", tmp_path, "--overwrite")
    (tmp_path / "metrics.jsonl").unlink()
    os.close(begin_run(GRPOConfig(run_dir=str(tmp_path)), "train_grpo.py"))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    message = refusal("--model.path", model, "--run-dir", tmp_path)
    for part in (str(tmp_path), "metrics.jsonl", "--resume", "--overwrite", "--run-dir"):
        assert part in message
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_refused_run_can_be_corrected(model: pathlib.Path, tmp_path: pathlib.Path):
    """What a refused run left in the run folder is not an earlier run that the corrected one must not overwrite."""
    short = copy_of(model, tmp_path / "short", max_position_embeddings=20)
    refusal("--model.path", short, "--run-dir", tmp_path / "run")
    long = ("--data.max-prompt-tokens", 501, "--trainer.micro-batch-tokens", 600)  # the toy model has 512 positions
    refusal("--model.path", "configs/examples/toys.py:addition_model", "--run-dir", tmp_path / "run", *long)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"initial_model"}
    start_and_finish(config_of("--model.path", model, "--run-dir", tmp_path / "run"))


def test_rows_that_sft_cannot_use(model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+2", "completion": "3"}\n{"question": "1+3"}\n{"question": 4, "completion": "3"}\n')
    data = DataConfig(path=str(rows))
    config = SFTConfig(
        model=ModelConfig(path=str(model)), data=data, run_dir=str(tmp_path / "run"), max_sequence_tokens=64
    )
    with pytest.raises(BadInput) as refused:
        Session(config, "train_sft.py", read_sft).read_on_driver()
    assert "2 of 3 rows" in str(refused.value) and "row 2: column 'completion' is missing" in str(refused.value)
    assert "row 3: column 'question' holds int, not text" in str(refused.value)
    assert not (tmp_path / "run").exists()
    config = change(config, {"data.bad_rows": "skip"})
    session = Session(config, "train_sft.py", read_sft)
    session.read_on_driver()
    session.run_log.close()
    assert "warning: 2 of 3 rows of" in capsys.readouterr().out
    assert len(session.start.data.stream.draw(4)) == 4
    marker = json.loads((tmp_path / "run/run.json").read_text())
    assert marker["script"] == "train_sft.py"


# flags of an evaluation of chats: what the message must contain
BAD_EVALUATIONS = {
    (): ["data.prompt_column=question", "column 'question' is missing", "columns there: messages"],
    ("--data.prompt-column", "messages.:-1"): ["data.answer_column=answer", "column 'answer' is missing"],
    ("--data.prompt-column", "messages.:-1", "--data.answer-column", "", "--reward.functions", "math_reward", "1"): [
        "reward function math_reward cannot be called",
        "data.columns",
    ],
    ("--generator.max-completion-tokens", "200"): ["up to 216 tokens", "128 positions"],
}


@pytest.mark.parametrize("flags", BAD_EVALUATIONS, ids=" ".join)
def test_evaluations_of_sft_that_cannot_work(flags: tuple[str, ...], model: pathlib.Path, tmp_path: pathlib.Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]}\n')
    arguments = ["--model.path", model, "--data.path", rows, "--run-dir", tmp_path / "run", "--num-trainers", 1]
    arguments += ["--evaluation.interval", 1, "--data.max-prompt-tokens", 16, "--generator.max-completion-tokens", 32]
    config = load(SFTConfig, "configs/toy_sft.py", [*map(str, arguments), *flags])
    with pytest.raises(BadInput) as refused:
        Session(config, "train_sft.py", read_sft).read_on_driver()
    for part in BAD_EVALUATIONS[flags]:
        assert part in str(refused.value)


def test_evaluation_writes_into_its_own_folder_only(model: pathlib.Path, tmp_path: pathlib.Path):
    def start(name: str) -> None:
        flags = ("--run-dir", tmp_path / name, "--data.answer-column", "answer", "--evaluation.num-prompts", 2)
        config = evaluate.load_config(str(model), [TINY, *map(str, flags)], num_ranks=1)
        session = Session(config, "grpo.evaluate", evaluate.read)
        session.read_on_driver()
        Session._finish.__wrapped__(session)

    start("alone")
    (tmp_path / "alone/evaluation.jsonl").write_text("{}\n")
    with pytest.raises(BadInput, match="alone holds an earlier run .evaluation.jsonl.*--overwrite"):
        start("alone")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").write_text("")
    with pytest.raises(BadInput, match="no run.json"):
        start("mine")
    start_and_finish(config_of("--model.path", model, "--run-dir", tmp_path / "run"))
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    with pytest.raises(BadInput, match="run holds an earlier run .metrics.jsonl"):
        start("run")


def refusal(*arguments: object) -> str:
    """The message with which the driver refuses these arguments."""
    config = config_of(*arguments)
    with pytest.raises(BadInput) as refused:
        start_and_finish(config)
    return str(refused.value)


def start_and_finish(config: GRPOConfig) -> None:
    """What rank 0 does before the first and after the last step, without the other ranks."""
    session = Session(config, "train_grpo.py", read_grpo)
    session.read_on_driver()
    Session._finish.__wrapped__(session)


# ---------------------------------------------------------------------------------------------------------------------
# What a user sees, through torchrun
# ---------------------------------------------------------------------------------------------------------------------


def failing_run(*arguments: object, nproc: int) -> str:
    """What our ranks wrote (not the launcher) in a run that must fail."""
    result: subprocess.CompletedProcess = run_torchrun("train_grpo.py", *arguments, nproc=nproc)
    assert result.returncode != 0
    launcher = LAUNCHER.search(result.stdout)
    assert launcher, result.stdout  # else the cut would be at nothing
    root_cause = result.stdout.partition("Root Cause")[2]  # torchrun's report, the last thing on the screen
    assert "traceback : error: " in root_cause or "ended with the message above" in root_cause, result.stdout
    return result.stdout[: launcher.start()]


def errors_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error:")]


def check_refused(output: str, *parts: str) -> None:
    """One error line with all parts, no traceback, and no engine was started."""
    (error,) = errors_in(output)
    for part in parts:
        assert part in error
    assert "Traceback" not in output
    assert "vllm" not in output.lower()


def test_wrong_number_of_processes():
    """Before any group exists."""
    output = failing_run(TINY, nproc=2)
    check_refused(output, "2 trainer + 1 reference + 1 generator", "needs 4", "started 2", "--roles.num-trainers 1")


def test_missing_data_file(model: pathlib.Path, tmp_path: pathlib.Path):
    """In the driver, when the groups exist."""
    layout = ("--roles.num-trainers", 1, "--roles.num-references", 0)
    flags = ("--model.path", model, "--data.path", "no.jsonl", "--run-dir", tmp_path / "run")
    output = failing_run(TINY, *layout, *flags, nproc=2)
    check_refused(output, "no.jsonl does not exist")


def test_a_reward_that_always_fails(model: pathlib.Path, tmp_path: pathlib.Path):
    arguments = (*COLOCATED, "--model.path", model, "--run-dir", tmp_path / "run")
    output = failing_run(TINY, *arguments, "--reward.functions", f"{REWARDS}:always_raises", 1.0, nproc=1)
    (error,) = errors_in(output)
    assert error.startswith("error: reward function ") and "Traceback" not in output
    message = output[output.index(error) :]  # the completion is on the lines below
    for part in ("always_raises", "KeyError: 'no such thing'", "completion: '", "answer: '"):
        assert part in message
