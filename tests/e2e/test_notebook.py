"""The parts as a library: a notebook goes on after a run that failed. The example runs in test_without_features.py."""

from tests.torchrun import run_python

AFTER_FAILURES = """
import pathlib, sys
from grpo.libraries import quiet_libraries

quiet_libraries()
import train_grpo
from configs.examples import toys
from grpo.config.recipes import change, for_one_process
from grpo.watch.failures import BadInput
from tests.tiny_models import SMALL

folder = pathlib.Path(sys.argv[1])
toys.make_model(folder / "model", toys.addition_tokenizer(), seed=0, changes=SMALL | {"max_position_embeddings": 128})
(folder / "mine").mkdir()
(folder / "mine/notes").touch()
changes = {"model.path": f"{folder}/model", "run_dir": f"{folder}/mine", "prompts_per_step": 2, "group_size": 2}
changes |= {"data.max_prompt_tokens": 32, "generator.max_completion_tokens": 8, "trainer.micro_batch_tokens": 128}
changes |= {"num_steps": 1, "evaluation.interval": 0, "data.path": "tests/e2e/tiny_rows.py:addition"}
config = for_one_process(change(pathlib.Path("configs/toy_arithmetic.py").absolute(), changes))
try:
    train_grpo.main(config)
except BadInput as error:
    print("refused:", error)
config = change(config, {"run_dir": f"{folder}/run"})
policy_loss = train_grpo.policy_loss
train_grpo.policy_loss = lambda *_: 1 / 0
try:
    train_grpo.main(config)
except ZeroDivisionError as error:
    print("failed:", error)
train_grpo.policy_loss = policy_loss
train_grpo.main(change(config, {"resume": True}))
"""


def test_a_notebook_goes_on_after_a_run_that_was_refused_and_one_that_failed(tmp_path):
    (tmp_path / "cells.py").write_text(AFTER_FAILURES)
    output = run_python(tmp_path / "cells.py", tmp_path)
    assert "refused: " in output and "failed: division by zero" in output
    assert "step 1/1" in output and output.splitlines()[-1] == f"done; everything is in {tmp_path}/run"
