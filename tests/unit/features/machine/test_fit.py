"""What a config asks of the machine, each with a machine that has it and one that does not."""

import re
import shutil

import pytest
import torch
import transformers

from grpo import config as c
from grpo.config.checks import check_world_size
from grpo.config.recipes import load
from grpo.features.machine import fit, memory
from grpo.features.machine.fit import advise_whole_replicas, check_gpus, fit_to_machine, ways_out
from grpo.features.machine.memory import Device, Needs, Verdict, check_disk, check_memory, check_versions
from grpo.run.command_line import DEFAULT_RECIPES
from tests.unit.features.machine.test_memory import needs
from tests.unit.models.test_hf_folder import QWEN3_1_7B, QWEN3_8B

H100 = Device(8, "H100", 79.2)
CPU = Device(0, "2 CPU cores", 20)
ROLES = c.RolesConfig(num_trainers=4, num_references=0, num_generators=4)
COLOCATED = c.RolesConfig(colocated=True, num_trainers=1, num_references=0)
LONG_ROWS = {"generator.max_completion_tokens": 32768}
TINY = QWEN3_1_7B | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}


def grpo(**fields) -> c.GRPOConfig:
    selective = c.TrainerConfig(activation_checkpointing="selective")
    return c.GRPOConfig(**{"roles": ROLES, "trainer": selective} | fields)


def test_the_versions_of_this_environment_fit_and_another_one_is_named(monkeypatch):
    row = check_versions()
    assert row.outcome == "fits"
    monkeypatch.setattr(memory, "installed_version", {"torchtitan": "0.2.0", "transformers": "5.19.0"}.get)
    row = check_versions()
    assert row.outcome == "PROBLEM" and "launch/setup.sh" in row.to_do
    assert "torchtitan 0.2.0, not 0.3.0" in row.has and "vllm missing, not 0.32.0" in row.has
    assert "transformers" not in row.has


def test_layouts_for_fewer_gpus_pass_the_checks():
    """Those that are named start on that number of ranks; with engines of four ranks, half of them are none."""
    engines_of_four = c.GeneratorConfig(tensor_parallel=4)
    behind = c.change(grpo(), {"overlap_steps": 1, "algorithm.importance_correction": "truncate"})
    for config, num_layouts in (
        (grpo(), 2),
        (behind, 2),
        (grpo(generator=engines_of_four), 1),
        (c.SFTConfig(num_trainers=8), 1),
    ):
        row = check_gpus(needs(TINY, config, Device(4, "H100", 79.2)))
        assert row.outcome == "PROBLEM" and row.needs.startswith("8 (")
        layouts = row.to_do.removeprefix("try ").split(", or ")
        assert len(layouts) == num_layouts
        for flags in layouts:
            check_world_size(load(type(config), DEFAULT_RECIPES[type(config)], flags.split()), 4)


def test_gpus_that_torch_does_not_see(monkeypatch):
    for cuda, outcome in ((None, "fits"), ("13.0", "PROBLEM")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert check_gpus(needs(TINY, grpo(), CPU)).outcome == outcome


def memory_rows(of_run: Needs) -> list[Verdict]:
    return [*check_memory(of_run, ways_out(of_run))]


def answers(config: c.GRPOConfig | c.SFTConfig, raw: dict, device: Device = H100, **frozen: dict) -> dict[str, str]:
    rows = memory_rows(needs(raw, config, device, **frozen))
    return {re.sub("memory of (a )?", "", row.what): row.outcome for row in rows}


def test_memory_of_each_role_against_a_machine():
    """Qwen3-8B: on 4 trainers 30.5 + 41.4 GiB, on one 122 + 41.4; 15.3 GiB of weights in an engine's 67.3."""
    assert answers(grpo(), QWEN3_8B) == {"trainer": "fits", "generator": "fits"}
    assert answers(grpo(), QWEN3_8B, Device(8, "A", 76.0))["trainer"] == "tight"  # 71.9 are above 92 % of it
    one = c.RolesConfig(num_trainers=1, num_references=1, num_generators=1)
    with_kl = grpo(roles=one, algorithm=c.AlgorithmConfig(kl_coef=0.1))
    assert answers(with_kl, QWEN3_8B) == {"trainer": "PROBLEM", "generator": "fits", "reference": "fits"}
    problems = dict.fromkeys(("trainer", "generator", "reference"), "PROBLEM")
    assert answers(with_kl, QWEN3_8B, Device(8, "L4", 16.0)) == problems  # an engine may use 13.6
    assert answers(grpo(), QWEN3_1_7B, CPU) == {"all ranks": "PROBLEM"}  # 4 trainers of 24.9 GiB
    assert answers(grpo(), TINY, CPU) == {"all ranks": "fits"}


def test_memory_of_a_trainer_that_shares_its_gpu():
    """Qwen3-1.7B: a peak of 46.6 GiB, at rest 19.2; the engine takes 27.7, 47.5 or 63.4 of 79.2 GiB.

    Asleep it keeps 5 of them, and a reference of 3.2 GiB stays while it is awake.
    """

    def colocated(share: float, sleep: bool = False, kl_coef: float = 0) -> dict[str, str]:
        generator = c.GeneratorConfig(gpu_memory_utilization=share, sleep=sleep)
        algorithm = c.AlgorithmConfig(kl_coef=kl_coef)
        found = answers(grpo(roles=COLOCATED, generator=generator, algorithm=algorithm), QWEN3_1_7B)
        return {role: answer for role, answer in found.items() if role != "generator"}

    assert colocated(0.3) == {"trainer": "fits"}
    assert colocated(0.6) == {"trainer": "PROBLEM"}
    training, awake = "trainer while it trains", "trainer while the engine is awake"
    assert colocated(0.6, sleep=True) == {training: "fits", awake: "fits"}
    assert colocated(0.74, sleep=True) == {training: "fits", awake: "tight"}
    assert colocated(0.74, sleep=True, kl_coef=0.1)[awake] == "PROBLEM"
    evaluates = c.SFTConfig(evaluation=c.EvaluationConfig(interval=5), generator=c.GeneratorConfig())  # 0.85
    evaluates = c.change(evaluates, {"trainer.activation_checkpointing": "selective"})
    assert answers(evaluates, QWEN3_1_7B)["trainer"] == "PROBLEM"


def test_a_cache_for_few_of_the_sequences_is_told_with_ways_out():
    """Qwen3-8B: 144 KiB a token, so 33,280 tokens are 4.57 GiB; 0.85 x 79.2 - 15.3 - 3 = 49 GiB hold 10 of 64."""
    config = c.change(grpo(), LONG_ROWS)
    (row,) = [row for row in memory_rows(needs(QWEN3_8B, config, H100)) if "generator" in row.what]
    assert (row.outcome, row.needs, row.has[:3]) == ("tight", "64 sequences of full length", "10,")
    assert all(flag in row.to_do for flag in ("kv_cache_dtype fp8", "--generator.tensor-parallel", "--generator.sleep"))
    none = c.change(config, {"generator.gpu_memory_utilization": 0.25})
    assert answers(none, QWEN3_8B)["generator"] == "PROBLEM"  # vLLM refuses a cache that holds none


ADVICE = {  # model, GiB of a GPU, changes -> flags that fit
    "one is enough": (
        QWEN3_1_7B,
        24.0,
        {"trainer.lora_rank": 16, "generator.sleep": True, "generator.gpu_memory_utilization": 0.9},
        "it fits with --generator.gpu-memory-utilization 0.35",
    ),
    "only together": (
        QWEN3_8B,
        139.8,
        LONG_ROWS | {"algorithm.kl_coef": 0.1, "generator.gpu_memory_utilization": 0.35},
        "it fits with --generator.sleep --trainer.moments bfloat16 --algorithm.kl-coef 0.0",
    ),
    "by ranks that share rows": (
        QWEN3_8B,
        79.2,
        {"roles": ROLES, "generator.max_completion_tokens": 120_000},
        "it fits with --trainer.context-parallel 4",
    ),
    "none": (QWEN3_8B, 24.0, {"trainer.lora_rank": 16}, "it needs more trainers, or larger GPUs"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_fits(name):
    raw, gib, changes, flags = ADVICE[name]
    full = {"trainer.activation_checkpointing": "full"}
    device = Device(1, "GPU", gib)
    config = c.change(grpo(roles=COLOCATED), full | changes)
    row = next(row for row in memory_rows(needs(raw, config, device)) if row.outcome == "PROBLEM")
    assert row.to_do.startswith(flags)


def test_whole_replicas_are_advised_where_they_fit(capsys):
    """1.7B on GPUs of 141 GiB fits four times; 8B, whose states are 122 GiB, does not, nor do rows on several ranks."""
    h200 = Device(4, "H200", 139.8)
    four = c.RolesConfig(colocated=True, num_trainers=4, num_references=0)
    config = c.change(grpo(roles=four), {"generator.gpu_memory_utilization": 0.35, "trainer.micro_batch_tokens": 8192})
    after = needs(QWEN3_1_7B, c.change(config, {"trainer.data_replicas": 4}), h200)
    assert {row.outcome for row in memory_rows(after)} == {"fits"}
    advise_whole_replicas(needs(QWEN3_1_7B, config, h200))
    assert capsys.readouterr().out.endswith("--trainer.data-replicas 4\n")
    for others in (
        after,
        needs(QWEN3_8B, config, h200),
        needs(QWEN3_1_7B, c.change(config, {"trainer.context_parallel": 2}), h200),
    ):
        advise_whole_replicas(others)
        assert not capsys.readouterr().out


DISK = {  # checkpoint config -> (checkpoints at one time, exports)
    (("interval", 0),): (1, 1),  # of a run that is stopped
    (("interval", 200), ("export", False)): (1, 0),
    (("interval", 10), ("keep", 2)): (3, 1),
    (("interval", 10), ("keep", 2), ("keep_best", "accuracy")): (4, 1),
}


@pytest.mark.parametrize("fields", DISK)
def test_disk_for_checkpoints_and_export(fields, tmp_path, monkeypatch):
    """Qwen3-1.7B: a checkpoint is 1,720,574,976 x 12 bytes = 19.23 GiB, an export x 2 bytes = 3.20 GiB.

    What a resumed run replaces counts as room.
    """
    checkpoints, exports = DISK[fields]
    config = grpo(checkpoint=c.CheckpointConfig(**dict(fields)), run_dir=str(tmp_path / "run"), num_steps=200)
    needed = checkpoints * 1_720_574_976 * 12 + exports * 1_720_574_976 * 2

    def answer(free: int) -> str:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**50, 0, free))
        row = check_disk(needs(QWEN3_1_7B, config))
        assert f"{checkpoints} x 19.23 GiB" in row.needs
        assert all(flag in row.to_do for flag in ("--run-dir", "--checkpoint.no-export"))
        return row.outcome

    assert answer(needed + 2**20) == "fits" and answer(needed - 2**20) == "PROBLEM"
    there = tmp_path / "run" / "checkpoints" / "step-00000100" / "shard"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"0" * 2**21)
    assert answer(needed - 2**20) == "fits"


def test_a_start_decides_and_warns_of_each_problem_in_one_line(tmp_path, monkeypatch, capsys):
    """Qwen3-8B: 64 x 1,536 tokens of 144 KiB are 13.5 GiB. Two engines alone, for an evaluation of 256 x 8: 0.85 x 79.2
    GiB hold 15.3 of weights, 3 that are left alone, and at half of 1,536 tokens 465 sequences of 1,024 on each.
    """
    transformers.AutoConfig.for_model(**QWEN3_8B).save_pretrained(tmp_path)
    config = c.GRPOConfig(roles=ROLES, run_dir=str(tmp_path / "run"), checkpoint=c.CheckpointConfig(interval=10))

    def start(device: Device, free: int, config=config, layout=ROLES) -> tuple[c.GRPOConfig, list[str]]:
        monkeypatch.setattr(fit, "look_at_device", lambda: device)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**50, 0, free))
        fitted, num_problems = fit_to_machine(config, layout, str(tmp_path))
        lines = capsys.readouterr().out.splitlines()
        assert num_problems == sum(line.startswith("warning: ") for line in lines)
        return fitted, lines

    fitted, lines = start(H100, 2**50)
    assert fitted.trainer.activation_checkpointing == "selective" and fitted.generator.max_num_seqs == 64
    assert lines == [
        "engines: 4; each decodes 64 sequences at once in 13.50 GiB of KV cache",
        "trainer.micro_batch_tokens: 16384",
        "trainer.activation_checkpointing: selective",
    ]
    fitted, (_, _, _, trainer, disk) = start(Device(8, "L4", 22.0), 2**30)
    assert fitted.trainer.activation_checkpointing == "full"
    assert trainer.startswith("warning: memory of a trainer: ") and disk.startswith("warning: disk: ")
    evaluates = c.EvaluationConfig(interval=1, num_samples=8)
    config = c.GRPOConfig(roles=c.RolesConfig(num_trainers=1, num_generators=2), evaluation=evaluates)
    alone = c.RolesConfig(num_trainers=0, num_references=0, num_generators=2)
    fitted, lines = start(H100, 2**50, config, alone)
    assert fitted.generator.max_num_seqs == 465 and lines == [
        "engines: 2; each decodes 465 sequences at once in 49.06 GiB of KV cache"
    ]
