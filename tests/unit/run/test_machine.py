"""What a config asks of the machine, each with a machine that has it and one that does not."""

import re
import shutil

import pytest
import torch
import transformers

from grpo import config as c
from grpo.run import machine
from grpo.run.machine import Device, check_disk, check_gpus, check_memory, check_versions, fit_to_machine
from tests.unit.models.test_memory import QWEN3_1_7B, QWEN3_8B, sizes

H100 = Device(8, "H100", 79.2)
ROLES = c.RolesConfig(num_trainers=4, num_references=0, num_generators=4)


def grpo(**fields) -> c.GRPOConfig:
    return c.GRPOConfig(**{"roles": ROLES} | fields)


def test_the_versions_of_this_environment_fit_and_another_one_is_named(monkeypatch):
    row = check_versions()
    assert row.fits and "torchtitan 0.3.0" in row.found and "vllm 0.32.0" in row.found
    installed = machine.installed_version

    def other(package: str) -> str | None:
        return {"vllm": None, "torchtitan": "0.2.0"}.get(package, installed(package))

    monkeypatch.setattr(machine, "installed_version", other)
    row = check_versions()
    assert not row.fits and "launch/setup.sh" in row.to_do
    assert "torchtitan 0.2.0, pinned is 0.3.0" in row.found and "vllm missing, pinned is 0.32.0" in row.found
    assert "transformers" in row.found and "transformers 5.19.0, pinned" not in row.found


GPUS = {
    9: (True, "9 x H100 of 79.2 GiB, 8 needed (4 trainer + 4 generator)"),
    8: (True, "8 needed"),
    4: (False, "for 4: --roles.no-colocated --roles.num-trainers 2 --roles.num-references 0 --roles.num-generators 2"),
    3: (False, "for 3: --roles.no-colocated --roles.num-trainers 1"),
}


@pytest.mark.parametrize("num_gpus", GPUS)
def test_gpus_against_the_layout(num_gpus):
    fits, told = GPUS[num_gpus]
    row = check_gpus(grpo(), Device(num_gpus, "H100", 79.2))
    assert row.fits == fits and told in str(row)


def test_gpus_that_torch_does_not_see(monkeypatch):
    none = Device(0, "2 CPU cores", 20)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert check_gpus(grpo(), none).fits
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    row = check_gpus(grpo(), none)
    assert not row.fits and "sees no GPU" in row.found


def statuses(config: c.GRPOConfig | c.SFTConfig, raw: dict = QWEN3_8B, device: Device = H100) -> dict[str, bool]:
    return {row.check.removeprefix("memory of a "): row.fits for row in check_memory(config, sizes(raw), device)}


def test_memory_of_each_role_against_a_gpu():
    """Qwen3-8B: on 4 trainers 30.5 + 41.4 GiB, on one 122 + 41.4; 15.3 GiB of weights in an engine's 67.3."""
    assert statuses(grpo()) == {"trainer": True, "generator": True}
    one = c.RolesConfig(num_trainers=1, num_references=1, num_generators=1)
    with_kl = grpo(roles=one, algorithm=c.AlgorithmConfig(kl_coef=0.1))
    assert statuses(with_kl) == {"trainer": False, "generator": True, "reference": True}
    small = Device(8, "L4", 16.0)  # an engine may use 13.6
    assert statuses(with_kl, device=small) == dict.fromkeys(("trainer", "generator", "reference"), False)
    assert statuses(c.SFTConfig(num_trainers=8)) == {"trainer": True}


def test_memory_of_a_trainer_that_shares_its_gpu():
    """Qwen3-1.7B: a peak of 46.6 GiB, at rest 19.2; the engine takes 27.7, 47.5 or 63.4 of 79.2 GiB."""

    def colocated(**generator) -> dict[str, bool]:
        layout = c.RolesConfig(colocated=True, num_trainers=1, num_references=0)
        found = statuses(grpo(roles=layout, generator=c.GeneratorConfig(**generator)), QWEN3_1_7B)
        assert found.pop("generator")
        return found

    assert colocated(gpu_memory_utilization=0.35) == {"trainer": True}
    assert colocated(gpu_memory_utilization=0.6) == {"trainer": False}
    while_training, awake = "trainer while it trains", "trainer while the engine is awake"
    assert colocated(gpu_memory_utilization=0.6, sleep=True) == {while_training: True, awake: True}
    assert colocated(gpu_memory_utilization=0.8, sleep=True) == {while_training: True, awake: False}
    evaluates = c.SFTConfig(evaluation=c.EvaluationConfig(interval=5), generator=c.GeneratorConfig())  # 0.85
    assert not statuses(evaluates, QWEN3_1_7B)["trainer"]


COLOCATED = c.RolesConfig(colocated=True, num_trainers=1, num_references=0)
FLAG_OF_LORA = "--trainer.lora-rank 16"


@pytest.mark.parametrize("lora_rank", [0, 16])
def test_parts_add_up_and_advice_is_what_is_not_set_yet(lora_rank):
    """Qwen3-1.7B on 24 GiB, a sleeping engine, full checkpointing: LoRA fits, and is not proposed where it is there."""
    trainer = c.TrainerConfig(activation_checkpointing="full", lora_rank=lora_rank)
    config = grpo(roles=COLOCATED, trainer=trainer, generator=c.GeneratorConfig(sleep=True, gpu_memory_utilization=0.9))
    rows = check_memory(config, sizes(QWEN3_1_7B), Device(1, "L4", 24.0))
    rows = [row for row in rows if row.check.startswith("memory of a trainer")]
    assert len(rows) == 2 and not rows[1].fits
    for row in rows:
        total, of, parts = re.match(r"([\d.]+) of ([\d.]+) GiB \((.*)\)", row.found).groups()
        terms = [float(number) for number in re.findall(r"(?:^|, )(\d+\.\d) ", parts)]
        assert float(total) == pytest.approx(sum(terms), abs=0.05 * (len(terms) + 1)) and of == "24.0"
        assert "checkpointing" not in row.to_do and "--generator.sleep" not in row.to_do
        assert (FLAG_OF_LORA in row.to_do.partition(";")[0]) == (not lora_rank and not row.fits)
    assert "--generator.gpu-memory-utilization 0.35" in rows[1].to_do
    with_advice = grpo(
        roles=COLOCATED,
        trainer=c.TrainerConfig(activation_checkpointing="full", lora_rank=16),
        generator=c.GeneratorConfig(sleep=True, gpu_memory_utilization=0.35),
    )
    assert all(row.fits for row in check_memory(with_advice, sizes(QWEN3_1_7B), Device(1, "L4", 24.0)))


def test_memory_of_all_ranks_on_a_cpu():
    """Qwen3-1.7B: 4 trainers of 24.9 GiB are far above 20 GiB already; a tiny model is far below."""
    cpu = Device(0, "2 CPU cores", 20)
    assert statuses(grpo(), QWEN3_1_7B, cpu) == {"memory": False}
    tiny = QWEN3_1_7B | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    assert statuses(grpo(), tiny, cpu) == {"memory": True}


DISK = {  # checkpoint config -> (checkpoints at one time, exports)
    (("interval", 0),): (0, 1),
    (("interval", 200), ("export", False)): (1, 0),
    (("interval", 100), ("keep", 2)): (2, 1),  # of 200 steps
    (("interval", 10), ("keep", 2)): (3, 1),
    (("interval", 10), ("keep", 2), ("keep_best", "accuracy")): (4, 1),
}


@pytest.mark.parametrize("fields", DISK)
def test_disk_for_checkpoints_and_export(fields, tmp_path, monkeypatch):
    """Qwen3-1.7B: a checkpoint is 1,720,574,976 x 12 bytes = 19.23 GiB, an export x 2 bytes = 3.20 GiB."""
    checkpoints, exports = DISK[fields]
    config = grpo(checkpoint=c.CheckpointConfig(**dict(fields)), run_dir=str(tmp_path / "run"), num_steps=200)
    needed = checkpoints * 1_720_574_976 * 12 + exports * 1_720_574_976 * 2
    for free, fits in ((needed + 2**20, True), (needed - 2**20, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(2**50, 0, free))
        row = check_disk(config, sizes(QWEN3_1_7B))
        assert row.fits == fits and f"{checkpoints} checkpoints of 19.23 GiB" in row.found
    assert all(flag in row.to_do for flag in ("--run-dir", "--checkpoint.keep", "--checkpoint.no-export"))


def test_what_a_resumed_run_replaces_counts_as_room(tmp_path, monkeypatch):
    config = grpo(checkpoint=c.CheckpointConfig(interval=100, export=False), run_dir=str(tmp_path), num_steps=200)
    tiny = sizes(QWEN3_1_7B | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**50, 0, 0))
    assert not check_disk(config, tiny).fits
    there = tmp_path / "checkpoints" / "step-00000100" / "shard"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"0" * (2 * 12 * tiny.parameters))
    assert check_disk(config, tiny).fits


def test_a_start_warns_of_each_problem_in_one_line(tmp_path, monkeypatch, capsys):
    transformers.AutoConfig.for_model(**QWEN3_8B).save_pretrained(tmp_path)
    config = grpo(run_dir=str(tmp_path / "run"), checkpoint=c.CheckpointConfig(interval=10))
    monkeypatch.setattr(machine, "look_at_device", lambda: H100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**50, 0, 2**50))
    decided = fit_to_machine(config, ROLES, str(tmp_path))
    assert decided.trainer.activation_checkpointing == "selective" and decided.generator.max_num_seqs == 64
    choice = "trainer.activation_checkpointing: {}, by arithmetic"
    engines = "engines: 4; each gets at most 64 sequences and decodes all of them at once"
    engines += ", as far as 13.50 GiB of KV cache go"  # 64 x 1,536 tokens of 144 KiB
    assert capsys.readouterr().out == f"{engines}\n{choice.format('selective')}\n"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**50, 0, 2**30))
    monkeypatch.setattr(machine, "look_at_device", lambda: Device(8, "L4", 22.0))
    fit_to_machine(config, ROLES, str(tmp_path))
    _, second, *told = capsys.readouterr().out.splitlines()
    assert second == choice.format("full")
    assert [line.partition(": ")[2].partition(":")[0] for line in told] == ["memory of a trainer", "disk"]
    assert all(line.startswith("warning: ") for line in told) and "free in" in told[1]


def test_engines_alone_get_what_an_evaluation_asks_for(tmp_path, monkeypatch, capsys):
    """Qwen3-8B: a token's cache is 2 x 36 layers x 8 heads x 128 x 2 bytes = 144 KiB; 0.85 x 79.2 GiB hold 15.3 of
    weights, 3 that are left alone, and at half of 1536 tokens 465 sequences of 1024 on each of two engines."""
    transformers.AutoConfig.for_model(**QWEN3_8B).save_pretrained(tmp_path)
    monkeypatch.setattr(machine, "look_at_device", lambda: H100)
    alone = c.RolesConfig(num_trainers=0, num_references=0, num_generators=2)
    evaluation = c.EvaluationConfig(interval=1, num_samples=8)
    config = grpo(roles=c.RolesConfig(num_trainers=1, num_generators=2), evaluation=evaluation)
    assert fit_to_machine(config, alone, str(tmp_path)).generator.max_num_seqs == 465
    assert capsys.readouterr().out == "engines: 2; each gets at most 1024 sequences and decodes 465 of them at once\n"
