"""What a stranger gets wrong, each as whole command: the last line on the screen says what, and no traceback of ours.

    python -m pytest -m slow tests/e2e/test_wrong_inputs.py
    python -m tests.e2e.test_wrong_inputs > table.md

Checks of the same inputs in one process are in test_bad_input.py and unit/test_malformed_*.py.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.examples import toys
from tests.e2e.runs import TINY
from tests.tiny_models import SMALL
from tests.torchrun import ROOT, finish, start_python

DEADLINE = 600.0  # seconds of a busy machine
ALONE = "--roles.colocated --roles.num-trainers 1 --roles.num-references 0 --model.path {model} --run-dir {run}"
GRPO, SFT = f"train_grpo.py {TINY} {ALONE}", "train_sft.py configs/toy_sft.py --num-trainers 1 --run-dir {run}"
ROWS = f"{GRPO} --data.path {{here}}"

FILES = {
    "recipe.yaml": "trainer:\n  learning_rate: 1e-6\n",
    "lr.py": f"from grpo.config import change\nconfig = change({TINY!r}, {{'trainer.lr': 1e-6}})\n",
    "raises.py": "x = 1\nconfig = x / 0\n",
    "mine.py": """
def no_metrics(inputs, config): return -inputs.logprobs_BT
def nan(completions, **columns): return [float("nan") for _ in completions]
def raises(completions, **columns): return [completions[0][10_000] for _ in completions]
def needs(completions, gold): return [1.0 for _ in completions]
def row(row): return {"prompt": row["problem"]}
""",
    "rows.jsonl": '{"question": "1+2", "answer": "3"}\n' * 8,
    "other.jsonl": '{"problem": "1+2", "answer": "3"}\n' * 8,
    "empty.jsonl": "",
    "broken.jsonl": '{"question": "1+2", "answer": "3"}\n{"question": \n',
    "holes.jsonl": '{"question": "1+2", "answer": "3"}\n{"question": "1+2"}\n{"question": "", "answer": "3"}\n' * 4,
    "long.jsonl": json.dumps({"question": "1+" * 99 + "2", "answer": "3"}) + "\n",
    "chats.jsonl": json.dumps(
        {"question": [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}], "answer": "3"}
    )
    + "\n",
    "file": "",
    "old/run.json": '{"script": "train_grpo.py", "config": {}}',
    "old/metrics.jsonl": "{}\n",
}
FILES["chats.jsonl"] *= 50


def set_config(**changes: object) -> Callable[[pathlib.Path], None]:
    def spoil(folder: pathlib.Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def set_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[pathlib.Path], None]:
    def spoil(folder: pathlib.Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def cut(folder: pathlib.Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def other_words(folder: pathlib.Path) -> None:
    toys.trained_tokenizer(["1 + 1"], 300).save_pretrained(folder)


TENSOR = "model.layers.1.mlp.up_proj.weight"
# name: (how a copy of the model is spoiled, what is said)
MODELS = {
    "no_weights": (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors files"),
    "cut": (cut, "is not a whole .safetensors file"),
    "no_tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "bring tokenizer.json"),
    "words": (other_words, "has 261 tokens and the model vocab_size=32"),
    "shape": (set_config(hidden_size=128), "and by config.json 32 x 128"),
    "missing": (set_weights(lambda tensors: tensors.pop(TENSOR)), f"lack 1 tensors .* {TENSOR}"),
    "nan": (set_weights(lambda tensors: tensors[TENSOR].fill_(float("nan"))), f"{TENSOR} holds NaN"),
    "gpt2": (set_config(model_type="gpt2"), "is a gpt2 model; only qwen3"),
}

# command: what the last line on the screen must say
CASES = {
    # values
    f"{GRPO} --num-steps 0": "num_steps=0 must be",
    f"{GRPO} --trainer.micro-batch-tokens 8": "raise it to at least 28",
    f"{GRPO} --reward.functions math 1": "unknown reward function 'math'.*math_reward",
    f"{GRPO} --overlap-steps 1": "set --overlap-steps 0",
    f"{GRPO} --evaluation.interval 1 --checkpoint.interval 1 --checkpoint.keep-best acuracy": "did you mean accuracy",
    f"{GRPO} --generator.engine max_num_seq 4": "max_num_seqs",
    f"{GRPO} --trainer.lora-alpha 64": "lora_alpha=64.0 does nothing with",
    # flags
    f"{GRPO} --lr 1e-5": "write --trainer.learning-rate VALUE",
    f"{GRPO} trainer.learning_rate=1e-6": "trainer.learning_rate=1e-6; write --field VALUE",
    f"{GRPO} --record true": "true; write --field VALUE, ",
    f"{GRPO} --num-step 3": "--num-steps",
    f"{GRPO} stray": "stray",
    # recipes
    f"train_grpo.py {TINY}.py": "does not exist; recipes in that folder",
    "train_grpo.py {here}/recipe.yaml": "is no recipe, which is a Python file",
    "train_grpo.py configs/toy_sft.py": "train_sft.py",
    "train_grpo.py {here}/raises.py": "line 2: ZeroDivisionError",
    "train_grpo.py {here}/lr.py": "trainer.learning_rate",
    # ranks
    f"2: train_grpo.py {TINY} --model.path {{model}}": "for 2 processes: --roles",
    f"2: train_grpo.py {TINY} --roles.num-trainers 2 --roles.num-generators 0 --roles.num-references 0": "generator",
    f"2: {ROWS}/none.jsonl --roles.num-trainers 2": "none.jsonl does not exist",
    f"3: {GRPO} --roles.num-trainers 3 --prompts-per-step 32": "--prompts-per-step 33",
    # data
    f"{ROWS}/none.jsonl": "none.jsonl does not exist",
    f"{ROWS}/empty.jsonl": "has no rows",
    f"{ROWS}/broken.jsonl": "line 2: not JSON",
    f"{ROWS}/other.jsonl": "--data.prompt-column",
    f"{ROWS}/holes.jsonl": "rows 2, 5, 8, 11: column 'answer' is missing; rows 3",
    f"{ROWS}/chats.jsonl": "question.:-1",
    f"{ROWS}/long.jsonl": "max_prompt_tokens",
    f"{GRPO} --data.path configs/examples/toys.py:additions": "addition",
    f"{GRPO} --data.path some/rows": "could not be loaded",
    f"{ROWS}/rows.jsonl --data.row {{here}}/mine.py:row": "KeyError",
    f"{SFT} --model.path {{model}} --data.path {{here}}/other.jsonl": "no row format",
    # models
    f"{GRPO} --model.path {{here}}/none": "none does not exist",
    f"{GRPO} --model.path some/model": "neither a local folder nor a hub model",
    **{f"{GRPO} --model.path {{here}}/{name}": said for name, (_, said) in MODELS.items()},
    f"{GRPO} --model.path {{here}}/narrow": "head_dim",
    f"{GRPO} --model.reference-path {{here}}/words --algorithm.kl-coef 0.1": "another vocabulary",
    # rewards and losses
    f"{GRPO} --reward.functions {{here}}/mine.py:raises 1": "IndexError",
    f"{GRPO} --reward.functions {{here}}/mine.py:nan 1": "nan",
    f"{GRPO} --reward.functions {{here}}/mine.py:needs 1": "gold",
    f"{GRPO} --algorithm.loss {{here}}/mine.py:no_metrics": "return .loss_BT, dict of metrics.",
    f"{GRPO} --algorithm.loss {{here}}/mine.py:needs": "mine.py:needs, line 5: TypeError",
    "-m grpo.check_loss grop": "unknown",
    "-m grpo.check_reward math configs/toy_arithmetic.py": "unknown reward function 'math'",
    # folders and tools
    f"{GRPO} --run-dir {{here}}/old": "--overwrite",
    f"{GRPO} --run-dir {{here}}/file": "file",
    f"{GRPO} --metrics.wandb-project mine": "WANDB_MODE=offline",
    "-m grpo.replay {here}/old": "config.py does not exist",
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
    toys.make_model(folder / "narrow", toys.addition_tokenizer(), 0, SMALL | {"head_dim": 16})
    return folder


def screen_of(command: str, here: pathlib.Path, run: pathlib.Path) -> subprocess.CompletedProcess:
    """The exit code, and all that a command writes; `N: ` before it starts it with torchrun and so many ranks."""
    ranks, _, words = command.rpartition(": ")
    words = words.format(here=here, model=here / "model", run=run).split(" ")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    words[0] = words[0].replace("train_", f"{ROOT}/train_")
    return finish(start_python(*launch, *words), DEADLINE)


def last_words(screen: str) -> str:
    """The last line, or the error of several that shows a completion; torchrun writes it into a frame."""
    found = re.findall(r"^(?:  traceback : )?(error: .*(?:\n  .*)*)\n(?:=+\n)?\Z", screen, flags=re.MULTILINE)
    return found[0] if found else screen.splitlines()[-1]


def own_traceback(screen: str) -> bool:
    """Whether a rank or tool printed one; the launcher's own, behind `E1124 ..`, is not ours."""
    return "Traceback" in re.split(r"^E\d{4} ", screen, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return folder_of_inputs(tmp_path_factory.mktemp("wrong"))


@pytest.mark.slow
@pytest.mark.parametrize("command", CASES)
def test_the_last_line_says_what_is_wrong(command: str, here: pathlib.Path, tmp_path: pathlib.Path):
    result = screen_of(command, here, tmp_path / "run")
    assert result.returncode != 0 and not own_traceback(result.stdout), result.stdout
    assert re.search(CASES[command], last_words(result.stdout)), result.stdout


def main() -> None:
    """Print a table of all of them."""
    chosen = [command for command in CASES if not sys.argv[1:] or any(word in command for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as folder:
        here = folder_of_inputs(pathlib.Path(folder))
        print("| Input | Last line on the screen | Verdict |\n| --- | --- | --- |")
        for number, command in enumerate(chosen):
            result = screen_of(command, here, here / f"run{number}")
            last = last_words(result.stdout)
            traced = own_traceback(result.stdout)
            good = result.returncode and not traced and re.search(CASES[command], last)
            verdict = "clear" if good else "traceback" if traced else f"unclear, exit code {result.returncode}"
            print(f"| `{command.partition('{run}')[2] or command}` | {last.splitlines()[0]} | {verdict} |", flush=True)


if __name__ == "__main__":
    main()
