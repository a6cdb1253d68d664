"""Agents of several kinds on a real engine: log-probs are the trainer's, and nothing outlives a run that is killed."""

import os
import pathlib
import shutil
import signal

import pytest
import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from configs.examples import toys
from grpo.tools.recorded import read_step
from tests import ROOT, write_lines
from tests.e2e.runs import NO_KL, ONE_RANK, TINY, read_completions, read_metrics, split
from tests.tiny_models import SMALL
from tests.torchrun import finish, start_python, torchrun
from tests.unit import chat_templates as templates
from tests.unit.workers.processes import alive, wait_until

pytest.importorskip("openai")  # comes with vLLM

AGENTS = ROOT / "tests" / "e2e" / "tiny_agents.py"
# Kind of an agent -> its turns and sequences
KINDS = {
    "rounds": (3, 1),
    "forgets": (3, 2),
    "branches": (4, 3),
    "many": (16, 16),
    "impatient": (3, 1),
    "shell": (1, 1),
}
CALLS = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {a}}}}}\n</tool_call>' for a in range(64)]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random model with Qwen3's template, which strips thoughts. A whole call is a token, so it calls tools."""
    texts = ["question number round", "add two numbers", "Be brief", "user assistant system"] * 20
    backend = toys.trained_tokenizer(texts, 400).backend_tokenizer
    backend.add_special_tokens(templates.SPECIAL)
    added = [*templates.ADDED, *CALLS]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=templates.SPECIAL,
        chat_template=templates.QWEN3,
    )
    changes = SMALL | {"max_position_embeddings": 1024}
    return toys.make_model(tmp_path_factory.mktemp("chat") / "model", tokenizer, 0, changes)


def flags_of(model: pathlib.Path, folder: pathlib.Path, agent: str, rows: list[dict]) -> str:
    path = write_lines(folder / "rows.jsonl", [{"question": "?", "answer": "", **row} for row in rows])
    columns = " ".join(f"{name} {name}" for name in rows[0])
    stops = " ".join(map(str, range(60, 300, 9)))  # some turns end by themselves
    return (
        f"--model.path {model} --data.path {path} --data.columns {columns} --run-dir {folder / 'run'} "
        f"--environment.agent {AGENTS}:{agent} --environment.calls hermes --environment.memory-gib 4 "
        "--environment.max-turn-tokens 12 --environment.max-turns 40 "
        "--environment.reset-seconds 600 --environment.call-seconds 600 "
        f"--data.max-prompt-tokens 600 --generator.max-completion-tokens 400 --generator.stop-token-ids 2 {stops} "
        f"--trainer.micro-batch-tokens 1024 --prompts-per-step {len(rows)} {NO_KL}"
    )


@pytest.mark.parametrize(
    ("layout", "nproc", "num_steps"),
    [
        (ONE_RANK, 1, 1),
        (f"{split(1, 0, 2)} --overlap-steps 1", 3, 2),  # the second step a step behind
        (f"{split(1, 0, 2)} --generator.tensor-parallel 2", 3, 1),
    ],
    ids=["one engine", "two engines", "an engine of two ranks"],
)
def test_each_sampled_token_is_trained_once_with_its_log_prob(chat_model, tmp_path, layout, nproc, num_steps):
    """An openai client with a tool, edited histories, branches, requests at once, retries and curl."""
    kinds = [kind for kind in KINDS if kind != "shell" or shutil.which("curl")]
    rows = [{"kind": kind, "number": 16} for kind in kinds]
    flags = flags_of(chat_model, tmp_path, "of_the_row", rows)
    flags = f"{flags} {layout} --record --num-steps {num_steps} --reward.functions"
    torchrun("train_grpo.py", TINY, flags, nproc=nproc)
    records = [record for record in read_completions(tmp_path / "run") if record["step"] == 1]
    assert len(records) == 4 * len(kinds)
    num_calls = 0
    for record in records:
        turns = record["episode"]["turns"]
        kind = record["columns"]["kind"]
        assert record["episode"]["ended_by"] == "done", record["episode"]
        assert (len(turns), len(record.get("sequences") or [1])) == KINDS[kind]
        num_calls += record["episode"]["counts"]["calls"]
    assert num_calls > 0
    batch = read_step(str(tmp_path / "run"), 1).batch
    sampled = sum(turn["tokens"] for record in records for turn in record["episode"]["turns"])
    assert int(batch.loss_mask_N.sum()) == sampled
    assert batch.num_sequences == 4 * sum(KINDS[kind][1] for kind in kinds)
    metrics, *others = [one for one in read_metrics(tmp_path / "run") if "loss" in one]
    assert len(others) == num_steps - 1
    assert metrics["mismatch/max"] < 1e-5
    assert torch.isfinite(batch.generator_logprobs_N[batch.loss_mask_N]).all()


@pytest.mark.parametrize("sign", ["SIGTERM", "SIGKILL"])
def test_a_signal_in_the_middle_of_episodes(chat_model, tmp_path, sign):
    """A run that is asked to stop ends its step and is saved; one that is killed leaves no agent behind."""
    flags = flags_of(chat_model, tmp_path, "waits", [{"folder": str(tmp_path)}])
    process = start_python(ROOT / "train_grpo.py", TINY, f"{flags} {ONE_RANK} --num-steps 1000 --reward.functions")
    wait_until(lambda: len([*tmp_path.glob("agent.*")]) == 4, "four agents to play")
    pids = [int(path.suffix[1:]) for path in tmp_path.glob("agent.*")]
    os.kill(process.pid, signal.Signals[sign])
    if sign == "SIGTERM":
        (tmp_path / "go").touch()
        result = finish(process)
        assert "stopped by SIGTERM, saved after step 1" in result.stdout, result.stdout
    else:
        finish(process)
    wait_until(lambda: not any(map(alive, pids)), "the agents to be gone")
