"""What a stranger gets wrong is one clear error, before a model loads.

    python -m pytest -m slow tests/e2e/test_wrong_inputs.py

By default a dry run in this process says it; the slow test starts each as whole command: the last line on the screen
says what is wrong, and there is no traceback of ours. More inputs in one process: unit/test_malformed_*.py.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

import train_grpo
import train_sft
from configs.examples import toys
from grpo.config import GRPOConfig, SFTConfig, change
from grpo.config.recipes import load
from grpo.folder.run_folder import begin_run
from grpo.run.command_line import checked_config
from grpo.run.session import Session
from grpo.run.start import read_grpo
from grpo.tools import evaluate
from grpo.watch.failures import BadInput
from tests.door import LACKS
from tests.e2e.runs import RANK_0, REWARDS, TINY, split
from tests.tiny_models import SMALL
from tests.torchrun import ROOT, finish, run_torchrun, start_python
from tests.unit.models.test_malformed_models import set_tensors

ALONE = "--roles.colocated --roles.num-trainers 1 --roles.num-references 0 --model.path {model} --run-dir {run}"
GRPO, SFT = f"train_grpo.py {TINY} {ALONE}", "train_sft.py configs/toy_sft.py --num-trainers 1 --run-dir {run}"
ROWS = f"{GRPO} --data.path {{here}}"

FILES = {
    "recipe.yaml": "trainer:\n  learning_rate: 1e-6\n",
    "lr.py": f"from grpo.config import change\nconfig = change({TINY!r}, {{'trainer.lr': 1e-6}})\n",
    "mine.py": """
def no_metrics(inputs, config): return -inputs.logprobs_BT
def nan(completions, **columns): return [float("nan") for _ in completions]
def raises(completions, **columns): return [completions[0][10_000] for _ in completions]
def needs(completions, gold): return [1.0 for _ in completions]
""",
    "rows.jsonl": '{"question": "1+2", "answer": "3"}\n' * 8,
    "lists.jsonl": '{"question": "1+2", "answer": ["3"], "number": 3}\n' * 64,
    "asked.jsonl": '{"messages": [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]}\n',
    "other.jsonl": '{"problem": "1+2", "answer": "3"}\n' * 8,
    "holes.jsonl": '{"question": "1+2", "answer": "3"}\n{"question": "1+2"}\n{"question": "", "answer": "3"}\n' * 4,
    "long.jsonl": json.dumps({"question": "1+" * 99 + "2", "answer": "3"}) + "\n",
    "chats.jsonl": json.dumps(
        {"question": [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}], "answer": "3"}
    )
    + "\n",
    "bare.py": "class Bare:\n    def reset(self): return 'go'\n    def reply(self, text): return None\n",
    "needs.py": "class Needs:\n    def reset(self, city): return city\n    def reply(self, text): return None\n",
    "file": "",
    "old/run.json": '{"script": "train_grpo.py", "config": {}}',
    "old/metrics.jsonl": "{}\n",
}
FILES["chats.jsonl"] *= 50


def other_words(folder: pathlib.Path) -> None:
    toys.trained_tokenizer(["1 + 1"], 300).save_pretrained(folder)


TENSOR = "model.layers.1.mlp.up_proj.weight"
# name: (how a copy of the model is spoiled, what is said); more in unit/models/test_malformed_models.py
MODELS = {
    "no_weights": (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors files"),
    "words": (other_words, "has 261 tokens and the model vocab_size=32"),
    "missing": (set_tensors(lambda tensors: tensors.pop(TENSOR)), f"lack 1 tensors .* {TENSOR}"),
    "nan": (set_tensors(lambda tensors: tensors[TENSOR].fill_(float("nan"))), f"{TENSOR} holds NaN"),
}

SFT_OF_CHATS = f"{SFT} --model.path {{model}} --data.path {{here}}/asked.jsonl --evaluation.interval 1"
SFT_OF_CHATS += " --data.max-prompt-tokens 16 --generator.max-completion-tokens 32"
# command: what the last line on the screen must say
CASES = {
    # values
    f"{GRPO} --trainer.micro-batch-tokens 8": "raise it to at least 28",
    f"{GRPO} --reward.functions math 1": "unknown reward function 'math'.*math_reward",
    f'{GRPO} --generator.engine speculative_config {{{{"method":"ngram"}}}}': "needs a GPU: vLLM's CPU backend samples",
    # flags
    f"{GRPO} --lr 1e-5": "write --trainer.learning-rate VALUE",
    f"{GRPO} trainer.learning_rate=1e-6": "trainer.learning_rate=1e-6; docs/from-trl.md",
    f"{GRPO} --num-step 3": "--num-steps",
    # recipes
    f"train_grpo.py {TINY}.py": "is no file; Python files beside it",
    "train_grpo.py {here}/recipe.yaml": "is no recipe, which is a Python file",
    "train_grpo.py configs/toy_sft.py": "train_sft.py",
    "train_grpo.py {here}/lr.py": "trainer.learning_rate",
    # ranks
    f"2: train_grpo.py {TINY} --model.path {{model}}": "--dry-run --gpus 2 names",
    f"2: train_grpo.py {TINY} --roles.num-trainers 2 --roles.num-generators 0 --roles.num-references 0": "generator",
    f"2: {ROWS}/none.jsonl --roles.num-trainers 2": "none.jsonl does not exist",
    f"3: {GRPO} --roles.num-trainers 3 --prompts-per-step 32": "--prompts-per-step 33",
    # data
    f"{ROWS}/none.jsonl": "none.jsonl does not exist",
    f"{ROWS}/other.jsonl": "columns there: problem, answer; name one of them with --data.prompt-column",
    f"{ROWS}/lists.jsonl --reward.functions math_reward 1": "is list .'3'., .*--data.answer-column answer.0",
    f"{ROWS}/holes.jsonl": "row 2: column 'answer' is missing; row 3",
    f"{ROWS}/chats.jsonl": "question.:-1",
    f"{ROWS}/long.jsonl": "max_prompt_tokens",
    f"{GRPO} --data.path configs/examples/toys.py:additions": "addition",
    f"{GRPO} --data.path some/rows": "could not be loaded",
    f"{SFT} --model.path {{model}} --data.path {{here}}/other.jsonl": "no row format",
    f"{SFT} --model.path {{model}} --data.path {{here}}/holes.jsonl --completion-column answer": "8 of 12 rows",
    SFT_OF_CHATS: "data.prompt_column=question.*column 'question' is missing.*columns there: messages",
    f"{SFT_OF_CHATS} --data.prompt-column messages.:-1": "data.answer_column=answer.*column 'answer' is missing",
    f"{SFT_OF_CHATS} --generator.max-completion-tokens 200": "up to 216 tokens.*128 positions",
    # models
    f"{GRPO} --model.path {{here}}/none": "none does not exist",
    f"{GRPO} --model.path some/model": "neither a local folder nor a hub model",
    **{f"{GRPO} --model.path {{here}}/{name}": said for name, (_, said) in MODELS.items()},
    f"{GRPO} --model.path {{here}}/narrow": "head_dim",
    f"{GRPO} --model.reference-path {{here}}/words --algorithm.kl-coef 0.1": "another vocabulary",
    f"{GRPO} --model.path {{here}}/many --model.reference-path {{model}} --algorithm.kl-coef 0.1": "has 32 vocab",
    # rewards and losses
    f"{GRPO} --reward.functions {{here}}/mine.py:f 1": "functions there: no_metrics",
    f"{GRPO} --reward.functions {{here}}/mine.py:raises 1": "IndexError",
    f"{GRPO} --reward.functions {{here}}/mine.py:nan 1": "nan",
    f"{GRPO} --reward.functions {{here}}/mine.py:needs 1": "gold",
    f"{GRPO} --algorithm.loss {{here}}/mine.py:no_metrics": "return .loss_BT, dict of metrics.",
    f"{GRPO} --algorithm.loss {{here}}/mine.py:needs": "mine.py:needs, line 5: TypeError",
    "-m grpo.check_loss grop": "unknown",
    "-m grpo.check_reward math configs/toy_arithmetic.py": "unknown reward function 'math'",
    f"{GRPO} --environment.name {{here}}/bare.py:Bare --reward.functions": "no get_reward",
    f"{GRPO} --environment.name {{here}}/needs.py:Needs": "missing a required argument: 'city'",
    # folders and tools
    f"{GRPO} --run-dir {{here}}/old": "--overwrite",
    f"{GRPO} --run-dir {{here}}/file": "file",
    f"{GRPO} --metrics.wandb-project mine": "WANDB_MODE=offline",
    "-m grpo.replay {here}/old": "config.py is no file",
    "-m grpo.evaluate {here}/none": "none",
    "-m grpo.export {here}/old": "has no config.py",
    "-m grpo.look {here}/none": "none",
}


def folder_of_inputs(folder: pathlib.Path) -> pathlib.Path:
    """Everything that the commands name, in a folder."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    model = toys.make_model(folder / "model", toys.addition_tokenizer(), 0, SMALL | {"max_position_embeddings": 128})
    for name, (spoil, _) in MODELS.items():
        spoil(shutil.copytree(model, folder / name))
    for name, changes in {"narrow": {"head_dim": 16}, "many": {"vocab_size": 64}}.items():
        toys.make_model(folder / name, toys.addition_tokenizer(), 0, SMALL | changes)
    return folder


def screen_of(command: str, here: pathlib.Path, run: pathlib.Path) -> subprocess.CompletedProcess:
    """The exit code, and all that a command writes; `N: ` before it starts it with torchrun and so many ranks."""
    ranks, _, words = command.rpartition(": ")
    words = words.format(here=here, model=here / "model", run=run).split(" ")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    words[0] = words[0].replace("train_", f"{ROOT}/train_")
    return finish(start_python(*launch, *words))


def last_words(screen: str) -> str:
    """The last line, or the error of several that shows a completion; torchrun writes it into a frame."""
    found = re.findall(r"^(?:  traceback : )?(error: .*(?:\n  .*)*)\n(?:=+\n)?\Z", screen, flags=re.MULTILINE)
    return found[0] if found else screen.splitlines()[-1]


def own_traceback(screen: str) -> bool:
    """Whether a rank or tool printed one; the launcher's own, behind `E1124 ..`, is not ours."""
    return "Traceback" in re.split(r"^E\d{4} ", screen, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> pathlib.Path:
    return folder_of_inputs(tmp_path_factory.mktemp("wrong"))


@pytest.mark.slow
@pytest.mark.parametrize("command", CASES)
def test_the_last_line_says_what_is_wrong(command, here, tmp_path):
    result = screen_of(command, here, tmp_path / "run")
    assert result.returncode != 0 and not own_traceback(result.stdout), result.stdout
    assert re.search(CASES[command], last_words(result.stdout)), result.stdout


# Not by a dry run of this process: a tool, several ranks, a model's config alone, folders, what a reward does
WHOLE = ("-m ", "no_weights", ": train_", "mine.py:raises", "mine.py:nan", "--run-dir {here}", "wandb")
BY_DRY_RUN = [command for command in CASES if not any(part in command for part in WHOLE)]


@pytest.mark.parametrize("command", BY_DRY_RUN)
def test_a_dry_run_says_what_is_wrong(command, here, tmp_path):
    script, *words = command.format(here=here, model=here / "model", run=tmp_path / "run").split(" ")
    if "--algorithm.loss" in words:
        pytest.importorskip("grpo.features.trial")
    with pytest.raises((BadInput, ValueError)) as refused:
        if script == "train_sft.py":
            train_sft.main(change(checked_config(SFTConfig, words), {"dry_run": True}))
        else:
            train_grpo.main(change(checked_config(GRPOConfig, words), {"dry_run": True}))
    message = " ".join(str(refused.value).split("\n"))
    if LACKS in message:
        pytest.skip(message)
    assert re.search(CASES[command], message), message
    assert not (tmp_path / "run").exists()


# ---- what a refused run leaves ---------------------------------------------------------------------------------------


def start(flags: str) -> None:
    """Begin a run and end it before its first step, as rank 0 does without the other ranks."""
    config = load(GRPOConfig, TINY, [TINY, *flags.split()])
    session = Session(config, "train_grpo.py", read_grpo, config.roles, RANK_0, "")
    try:
        session.read_on_driver()
    finally:
        session.held.close()


def test_a_refused_run_overwrites_nothing(model, tmp_path):
    run = tmp_path / "run"
    os.close(begin_run(str(run), "train_grpo.py", {}, {}))
    (run / "checkpoints/step-00000001").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(BadInput):
        start(f"--model.path {tmp_path}/none --run-dir {run} --overwrite")
    assert (run / "checkpoints").is_dir() and (run / "metrics.jsonl").read_text() == "{}\n"
    start(f"--model.path {model} --run-dir {run} --overwrite")
    assert not (run / "checkpoints/step-00000001").exists() and not (run / "metrics.jsonl").exists()


def test_a_refused_run_can_be_corrected(model, tmp_path):
    """What it left is not an earlier run that the corrected one must not overwrite."""
    long = "--data.max-prompt-tokens 501 --trainer.micro-batch-tokens 600"  # the toy model has 512 positions
    with pytest.raises(BadInput):
        start(f"--model.path configs/examples/toys.py:addition_model --run-dir {tmp_path}/run {long}")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"initial_model"}
    start(f"--model.path {model} --run-dir {tmp_path}/run")


def test_evaluation_writes_into_its_own_folder_only(model, tmp_path):
    def evaluate_into(name: str) -> None:
        flags = f"--run-dir {tmp_path / name} --data.answer-column answer --evaluation.num-prompts 2"
        config = evaluate.load_config(str(model), [TINY, *flags.split()], num_ranks=1)
        session = Session(config, "grpo.evaluate", evaluate.read, config.roles, RANK_0, "")
        try:
            session.read_on_driver()
        finally:
            session.held.close()

    evaluate_into("alone")
    (tmp_path / "alone/evaluation.jsonl").write_text("{}\n")
    with pytest.raises(BadInput, match="alone holds an earlier run .evaluation.jsonl.*--overwrite"):
        evaluate_into("alone")
    start(f"--model.path {model} --run-dir {tmp_path}/run")
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    with pytest.raises(BadInput, match="run holds an earlier run .metrics.jsonl"):
        evaluate_into("run")


# ---- under torchrun --------------------------------------------------------------------------------------------------

# The first of these lines begins what torchrun itself says about a rank that failed.
LAUNCHER = re.compile(r"^\S* ?E\d{4} .*|^Traceback \(most recent call last\):\n  File \"<frozen runpy>\"", re.MULTILINE)


def error_of(*arguments: object, nproc: int) -> str:
    """What our ranks wrote from the one error line on; torchrun repeats it as the root cause."""
    result = run_torchrun("train_grpo.py", TINY, *arguments, nproc=nproc)
    assert result.returncode != 0
    launcher = LAUNCHER.search(result.stdout)
    assert launcher, result.stdout  # else the cut would be at nothing
    root_cause = result.stdout.partition("Root Cause")[2]  # torchrun's report, the last thing on the screen
    assert "traceback : error: " in root_cause or "ended with the message above" in root_cause, result.stdout
    output = result.stdout[: launcher.start()]
    assert len(re.findall("^error:", output, re.MULTILINE)) == 1 and "Traceback" not in output
    return output[output.index("error:") :]


def test_another_number_of_processes_than_roles():
    """Before any group exists."""
    error = error_of(nproc=2)
    for part in ("2 trainer + 1 reference + 1 generator", "needs 4", "started 2", "--dry-run --gpus 2"):
        assert part in error


def test_a_reward_that_always_fails(model, tmp_path):
    """In the driver, when all ranks have their models; the completion is on the lines below."""
    flags = f"--model.path {model} --run-dir {tmp_path}/run --reward.functions {REWARDS}:always_raises 1"
    error = error_of(split(1, 0, 1), flags, nproc=2)
    assert error.startswith("error: reward function ")
    for part in ("always_raises", "KeyError: 'no such thing'", "completion: '", "answer: '"):
        assert part in error
