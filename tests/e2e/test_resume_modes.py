"""10 steps equal 5 steps, SIGTERM in the middle of the fifth, and 5 more, in every mode that a run has.

Slow: three runs for each mode. The default run resumes in test_resume.py, test_overlap.py, test_lora_runs.py and
test_sft.py.
"""

import json
import pathlib
import re
from dataclasses import dataclass

import pytest

from configs.examples import toys
from tests import write_lines
from tests.e2e.conftest import BY_CHANCE
from tests.e2e.runs import COLOCATED, NO_KL, TINY, assert_same_run, split, steps_of
from tests.tiny_models import KINDS, SMALL, make_image_model, make_reward_model, make_tiny
from tests.torchrun import torchrun

HERE = pathlib.Path(__file__).parent
NUM_STEPS, STOPPED = 10, 5
SFT = "configs/toy_sft.py"

DYNAMIC = f"--sampling.dynamic --reward.functions {BY_CHANCE} 1"
UPDATES = "--algorithm.num-mini-batches 2 --algorithm.num-epochs 2"
SCHEDULE = "--trainer.schedule cosine --trainer.warmup-steps 3"
EVALUATION = "--evaluation.interval 4 --evaluation.num-prompts 4"
LORA = "--trainer.lora-rank 2 --trainer.lora-alpha 8"
# In braces are the tests' own: {a}, {b} are files of rows, {teacher}, {judge}, {images}, {moe} .. are folders
TEACHER = "--model.reference-path {teacher} --algorithm.distill-coef 0.5"
OWN_FAMILY = "--model.reference-path {gemma3} --algorithm.distill-coef 0.5"
MOVING = "--algorithm.reference-interval 2 --algorithm.reference-mixture"
OVERLAP = "--overlap-steps 1"
CARRIED = "--sampling.carry-over 2 --generator.max-completion-tokens 40"
TURNS = (
    f"--environment.name {HERE}/tiny_environments.py:Digits --environment.answer-steps 4 "
    "--environment.max-turn-tokens 12 --generator.max-completion-tokens 48 --algorithm.advantages return_to_go"
)
SAVED = "--checkpoint.interval 3"
TRUNCATED = "--generator.sampling top_p 0.9 min_p 0.02"
ROUNDED = "--trainer.moments bfloat16 --trainer.adam-beta2 0.95"
MUON = f"--trainer.optimizer muon {SCHEDULE}"
JUDGE = "--reward.model {judge} --reward.model-weight 0.3"
MIXED = "--data.path a {a} b {b} --data.weights a 2"
CURRICULUM = "--data.curriculum configs/examples/curriculum.py:medium_first"
PACKED = "--sequences-per-step 5 --trainer.micro-batch-tokens 64"
SHORT = "--data.max-prompt-tokens 16 --generator.max-completion-tokens 12 --trainer.micro-batch-tokens 128"
VALIDATION = "--validation.interval 4 --validation.path a {a}"
TP = "--trainer.tensor-parallel 2"
ENGINE_TP = "--generator.tensor-parallel 2"
BOTH = f"{COLOCATED} --roles.num-trainers 2"


@dataclass(frozen=True)
class Mode:
    """What a run has, and the rank of its torchrun that gets the signal, and where."""

    nproc: int
    flags: str
    rank: int = 0
    phase: str = "train"
    recipe: str = TINY

    @property
    def script(self) -> str:
        return "sft" if self.recipe == SFT else "grpo"


MODES = {
    "split, a reference of its own, accumulation, a schedule, evaluation": Mode(
        4, f"{split(2, 1, 1)} {SCHEDULE} {EVALUATION} --trainer.micro-batch-tokens 64", 2, "reference"
    ),
    "TP 2, an engine of 2 ranks, no reference": Mode(4, f"{split(2, 0, 2)} {TP} {ENGINE_TP} {NO_KL}", rank=3),
    "colocated on 2 ranks, dynamic sampling": Mode(2, f"{BOTH} {DYNAMIC}", rank=1),
    "a curriculum, mixed prompts, overlap, dynamic sampling": Mode(
        2, f"{split(1, 0, 1)} {MIXED} {OVERLAP} {DYNAMIC} {CURRICULUM}", phase="reference"
    ),
    "a curriculum, groups carried over, dynamic sampling": Mode(
        3, f"{split(1, 0, 2)} {MIXED} {CARRIED} {DYNAMIC} {CURRICULUM} {NO_KL}", rank=2
    ),
    "a moving reference, FSDP 2, dynamic sampling": Mode(3, f"{split(2, 0, 1)} {MOVING} 0.3 {DYNAMIC} {SAVED}", rank=1),
    "an averaged reference": Mode(2, f"{split(1, 0, 1)} {MOVING} 0.1"),
    "overlap, dynamic sampling, several updates, further checkpoints": Mode(
        2, f"{split(1, 0, 1)} {OVERLAP} {DYNAMIC} {UPDATES} {SAVED}"
    ),
    "overlap, LoRA, mixed prompts": Mode(2, f"{split(1, 0, 1)} {OVERLAP} {LORA} {MIXED}"),
    "groups carried over, overlap": Mode(3, f"{split(1, 0, 2)} {CARRIED} {OVERLAP} {NO_KL}", phase="reference"),
    "groups carried over, dynamic sampling, an engine of 2 ranks": Mode(
        3, f"{split(1, 0, 2)} {ENGINE_TP} {CARRIED} {DYNAMIC} {NO_KL}", rank=2
    ),
    "groups carried over, overlap, dynamic sampling, further checkpoints": Mode(
        2, f"{split(1, 0, 1)} {CARRIED} {OVERLAP} {DYNAMIC} {SAVED} {NO_KL}"
    ),
    "groups carried over, overlap, a mixture of experts": Mode(
        3, f"{split(1, 0, 2)} --model.path {{moe}} {CARRIED} {OVERLAP} {NO_KL}", rank=2
    ),
    "groups carried over, overlap, top_p and min_p": Mode(
        3, f"{split(1, 0, 2)} {CARRIED} {OVERLAP} {NO_KL} {TRUNCATED}", rank=2
    ),
    "turns, a teacher, several updates, top_p and min_p": Mode(
        3, f"{split(1, 1, 1)} {TURNS} {TEACHER} {UPDATES} {TRUNCATED}", rank=1
    ),
    "turns, overlap, two engines": Mode(3, f"{split(1, 0, 2)} {TURNS} {OVERLAP} {EVALUATION} {NO_KL}", rank=2),
    "turns, TP 2": Mode(2, f"{BOTH} {TP} {ENGINE_TP} {TURNS}", rank=1),
    "turns, a teacher, LoRA, dynamic sampling, several updates": Mode(
        3, f"{split(1, 1, 1)} {TURNS} {TEACHER} {LORA} {DYNAMIC} {UPDATES}", rank=1
    ),
    "LoRA, FSDP 2": Mode(3, f"{split(2, 0, 1)} {LORA} {UPDATES}", rank=1),
    "LoRA, colocated": Mode(2, f"{BOTH} {LORA} {DYNAMIC}"),
    "a reward model, dynamic sampling, overlap, evaluation": Mode(
        3, f"{split(1, 1, 1)} {DYNAMIC} {OVERLAP} {JUDGE} {NO_KL} {EVALUATION}", rank=1
    ),
    "a teacher, groups carried over": Mode(3, f"{split(1, 1, 1)} {TEACHER} {MIXED} {CARRIED} {NO_KL}"),
    "a teacher, overlap": Mode(3, f"{split(2, 0, 1)} {TEACHER} {OVERLAP} {NO_KL}", phase="reference"),
    "SFT, mixed, packed, validation": Mode(2, f"{MIXED} {PACKED} {VALIDATION} {SCHEDULE}", rank=1, recipe=SFT),
    "SFT, mixed, packed, further checkpoints": Mode(2, f"{MIXED} {PACKED} {SAVED} {VALIDATION}", recipe=SFT),
    "SFT, two ranks a row": Mode(2, f"{PACKED} --trainer.context-parallel 2", rank=1, recipe=SFT),
    "SFT, TP 2": Mode(2, f"{PACKED} {TP}", rank=1, recipe=SFT),
    "SFT, FSDP 2, moments in bfloat16": Mode(2, f"{PACKED} {ROUNDED}", rank=1, recipe=SFT),
    "SFT, FSDP 2, Muon": Mode(2, f"{PACKED} {MUON}", rank=1, recipe=SFT),
    "SFT, TP 2, Muon": Mode(2, f"{PACKED} {MUON} {TP}", recipe=SFT),
    "FSDP 2, Muon, several updates": Mode(3, f"{split(2, 0, 1)} {MUON} {UPDATES}", rank=1),
    "SFT of a model that sees images": Mode(2, f"--model.path {{images}} {PACKED}", recipe=SFT),
    "SFT, evaluation by a reward model": Mode(2, f"{EVALUATION} {SHORT} {JUDGE} --reward.functions", recipe=SFT),
    "SFT, LoRA, mixed, packed": Mode(2, f"{MIXED} {PACKED} {LORA}", recipe=SFT),
    "SFT of a mixture of experts, mixed, packed": Mode(2, f"--model.path {{moe}} {MIXED} {PACKED}", rank=1, recipe=SFT),
    "windows, a teacher with them, LoRA, evaluation": Mode(
        3, f"{split(1, 1, 1)} --model.path {{gemma3}} {OWN_FAMILY} {LORA} {EVALUATION}", rank=1
    ),
    "SFT of OLMo 3, TP 2": Mode(2, f"--model.path {{olmo3}} {PACKED} {TP}", recipe=SFT),
}


@pytest.fixture(scope="module")
def inputs(model, tmp_path_factory) -> dict[str, object]:
    """What the flags name in braces."""
    folder = tmp_path_factory.mktemp("inputs")
    rows = toys.addition("train")[:15]
    for name, part in (("a", rows[:9]), ("b", rows[9:])):
        write_lines(folder / f"{name}.jsonl", part)
    changes = json.loads((model / "config.json").read_text())
    teacher = {name: changes[name] for name in ("hidden_size", "intermediate_size", "max_position_embeddings")}
    toys.make_model(folder / "teacher", toys.addition_tokenizer(), 7, teacher | {"num_hidden_layers": 1})
    make_reward_model(folder / "judge", "llama3", toys.trained_tokenizer(["1 + 1 = 2"], 300))
    make_image_model(folder / "images", SMALL | KINDS["qwen3_5"] | {"head_dim": 32, "num_attention_heads": 4})
    found = {name: folder / name for name in ("teacher", "judge", "images")}
    found |= {kind: make_tiny(folder, kind) for kind in ("moe", "gemma3", "olmo3")}
    return found | {"a": folder / "a.jsonl", "b": folder / "b.jsonl", "model": model}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_10_steps_equal_5_a_stop_and_5(
    name,
    inputs,
    tmp_path,
    monkeypatch,
):
    """Metrics without clocks, completions and the last weights are equal to the last digit."""
    mode = MODES[name]
    if "{images}" in mode.flags:
        pytest.importorskip("grpo.features.qwen3_5")
    flags = f"--model.path {{model}} --num-steps {NUM_STEPS} --metrics.no-tensorboard {mode.flags}".format(**inputs)

    def run(recipe: str, run_dir: pathlib.Path, *more: str) -> str:
        arguments = (recipe, flags, "--run-dir", run_dir, *more)
        return torchrun(f"train_{mode.script}.py", *arguments, nproc=mode.nproc)

    run(mode.recipe, whole := tmp_path / "whole")
    stop = {"recipe": mode.recipe, "script": mode.script, "rank": mode.rank, "phase": mode.phase, "step": STOPPED}
    stop["heard"] = str(tmp_path / "heard")
    monkeypatch.setenv("STOP", json.dumps(stop))
    output = run(str(HERE / "stop_in_a_step.py"), parts := tmp_path / "parts")
    assert re.search(rf"^stopped by SIGTERM, saved after step {STOPPED};", output, re.MULTILINE), output[-2000:]
    assert [m["step"] for m in steps_of(parts)] == [*range(1, STOPPED + 1)]
    output = run(mode.recipe, parts, "--resume")
    assert f"starting at step {STOPPED}" in output

    assert [m["step"] for m in steps_of(parts)] == [*range(1, NUM_STEPS + 1)]
    assert_same_run(whole, parts)
