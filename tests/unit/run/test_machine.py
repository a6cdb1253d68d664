"""What a config asks of the machine, each with a machine that has it and one that does not."""

import re
import shutil

import pytest
import torch
import transformers

from grpo import config as c
from grpo.run import machine
from grpo.run.machine import (
    Device,
    check_disk,
    check_gpus,
    check_memory,
    check_versions,
    fit_to_machine,
    propose_layout,
)
from tests.unit.models.test_memory import QWEN3_1_7B, QWEN3_8B, sizes

H100 = Device(8, "H100", 79.2)
ROLES = c.RolesConfig(num_trainers=4, num_references=0, num_generators=4)


def grpo(**fields) -> c.GRPOConfig:
    return c.GRPOConfig(**{"roles": ROLES} | fields)


def test_the_versions_of_this_environment_fit_and_another_one_is_named(monkeypatch):
    row = check_versions()
    assert row.answer == "fits" and "torchtitan 0.3.0" in row.found and "vllm 0.32.0" in row.found
    installed = machine.installed_version

    def other(package: str) -> str | None:
        return {"vllm": None, "torchtitan": "0.2.0"}.get(package, installed(package))

    monkeypatch.setattr(machine, "installed_version", other)
    row = check_versions()
    assert row.answer == "PROBLEM" and "launch/setup.sh" in row.to_do
    assert "torchtitan 0.2.0, pinned is 0.3.0" in row.found and "vllm missing, pinned is 0.32.0" in row.found
    assert "transformers" in row.found and "transformers 5.19.0, pinned" not in row.found


def proposal(config: c.GRPOConfig, raw: dict, device: Device) -> str:
    """What the verdict on the GPUs says, with the layout that is proposed."""
    return str(check_gpus(config, device, propose_layout(sizes(raw), config, device)))


def test_a_layout_for_fewer_gpus_is_one_whose_memory_fits():
    """Qwen3-8B: 122 GiB of states. Split 2 + 2 needs 61 of 79.2 and more to train; 4 colocated 30.5 beside an engine.

    On one GPU nothing fits, and the first layout is named.
    """
    assert "8 needed (4 trainer + 4 generator)" in proposal(grpo(), QWEN3_8B, H100)
    assert "for 8" not in proposal(grpo(), QWEN3_8B, H100)
    four = Device(4, "H100", 79.2)
    of_small = "--roles.no-colocated --roles.num-trainers 2 --roles.num-references 0 --roles.num-generators 2"
    assert of_small in proposal(grpo(), QWEN3_1_7B, four)
    of_large = "--roles.colocated --roles.num-trainers 4 --roles.num-references 0"
    assert of_large in proposal(grpo(), QWEN3_8B, four)
    layout = propose_layout(sizes(QWEN3_8B), grpo(), four)
    fitted, _ = machine.decide(sizes(QWEN3_8B), c.change(grpo(), layout), COLOCATED, four)
    assert {row.answer for row in check_memory(sizes(QWEN3_8B), fitted, four)} == {"fits"}
    assert "for 1, whose memory follows: --roles.colocated" in proposal(grpo(), QWEN3_8B, Device(1, "H100", 79.2))


def test_gpus_that_torch_does_not_see(monkeypatch):
    none = Device(0, "2 CPU cores", 20)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert check_gpus(grpo(), none, {}).answer == "fits"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    row = check_gpus(grpo(), none, {})
    assert row.answer == "PROBLEM" and "sees no GPU" in row.found


def statuses(config: c.GRPOConfig | c.SFTConfig, raw: dict = QWEN3_8B, device: Device = H100) -> dict[str, str]:
    return {row.check.removeprefix("memory of a "): row.answer for row in check_memory(sizes(raw), config, device)}


def test_memory_of_each_role_against_a_gpu():
    """Qwen3-8B: on 4 trainers 30.5 + 41.4 GiB, on one 122 + 41.4; 15.3 GiB of weights in an engine's 67.3."""
    assert statuses(grpo()) == {"trainer": "fits", "generator": "fits"}
    assert statuses(grpo(), device=Device(8, "A", 76.0))["trainer"] == "tight"  # 71.9 are above 92 % of it
    one = c.RolesConfig(num_trainers=1, num_references=1, num_generators=1)
    with_kl = grpo(roles=one, algorithm=c.AlgorithmConfig(kl_coef=0.1))
    assert statuses(with_kl) == {"trainer": "PROBLEM", "generator": "fits", "reference": "fits"}
    small = Device(8, "L4", 16.0)  # an engine may use 13.6
    assert statuses(with_kl, device=small) == dict.fromkeys(("trainer", "generator", "reference"), "PROBLEM")
    assert statuses(c.SFTConfig(num_trainers=8)) == {"trainer": "fits"}


def test_a_cache_for_few_of_the_sequences_is_told_with_ways_out():
    """Qwen3-8B: 144 KiB a token, so 33,280 tokens are 4.57 GiB; 0.85 x 79.2 - 15.3 - 3 = 49 GiB hold 10 of 64."""
    long = {"generator.max_completion_tokens": 32768, "trainer.micro_batch_tokens": 33280}
    config = c.change(grpo(), long)
    (row,) = [row for row in check_memory(sizes(QWEN3_8B), config, H100) if "generator" in row.check]
    assert row.answer == "tight" and "hold 10 of 64 sequences of full length at once" in row.found
    assert "kv_cache_dtype fp8" in str(row) and "--generator.tensor-parallel" in str(row)
    none = c.change(config, {"generator.gpu_memory_utilization": 0.25})
    assert statuses(none)["generator"] == "PROBLEM"  # vLLM refuses a cache that holds none
    halves = c.change(config, {"generator.engine": {"kv_cache_dtype": "fp8"}, "generator.max_completion_tokens": 16384})
    assert statuses(halves)["generator"] == "fits"


def test_memory_of_a_trainer_that_shares_its_gpu():
    """Qwen3-1.7B: a peak of 46.6 GiB, at rest 19.2; the engine takes 27.7, 47.5 or 63.4 of 79.2 GiB."""

    def colocated(**generator) -> dict[str, str]:
        layout = c.RolesConfig(colocated=True, num_trainers=1, num_references=0)
        found = statuses(grpo(roles=layout, generator=c.GeneratorConfig(**generator)), QWEN3_1_7B)
        del found["generator"]
        return found

    assert colocated(gpu_memory_utilization=0.3) == {"trainer": "fits"}
    assert colocated(gpu_memory_utilization=0.6) == {"trainer": "PROBLEM"}
    while_training, awake = "trainer while it trains", "trainer while the engine is awake"
    assert colocated(gpu_memory_utilization=0.6, sleep=True) == {while_training: "fits", awake: "fits"}
    assert colocated(gpu_memory_utilization=0.8, sleep=True) == {while_training: "fits", awake: "PROBLEM"}
    evaluates = c.SFTConfig(evaluation=c.EvaluationConfig(interval=5), generator=c.GeneratorConfig())  # 0.85
    assert statuses(evaluates, QWEN3_1_7B)["trainer"] == "PROBLEM"


COLOCATED = c.RolesConfig(colocated=True, num_trainers=1, num_references=0)


def test_parts_add_up_and_advice_fits():
    """Qwen3-1.7B with LoRA on 24 GiB, full checkpointing, and a sleeping engine of 0.9 of it."""
    changes = {"trainer.activation_checkpointing": "full", "trainer.lora_rank": 16, "generator.sleep": True}
    config = c.change(grpo(roles=COLOCATED), changes | {"generator.gpu_memory_utilization": 0.9})
    device = Device(1, "L4", 24.0)
    _, row = (row for row in check_memory(sizes(QWEN3_1_7B), config, device) if "trainer" in row.check)
    total, of, parts = re.match(r"([\d.]+) of ([\d.]+) GiB \((.*)\)", row.found).groups()
    terms = [float(number) for number in re.findall(r"(?:^|, )(\d+\.\d) ", parts)]
    assert float(total) == pytest.approx(sum(terms), abs=0.05 * (len(terms) + 1)) and of == "24.0"
    assert row.answer == "PROBLEM" and row.to_do == "it fits with --generator.gpu-memory-utilization 0.35"
    followed = c.change(config, {"generator.gpu_memory_utilization": 0.35})
    assert "PROBLEM" not in statuses(followed, QWEN3_1_7B, device).values()


def test_memory_of_all_ranks_on_a_cpu():
    """Qwen3-1.7B: 4 trainers of 24.9 GiB are far above 20 GiB already; a tiny model is far below."""
    cpu = Device(0, "2 CPU cores", 20)
    assert statuses(grpo(), QWEN3_1_7B, cpu) == {"memory": "PROBLEM"}
    tiny = QWEN3_1_7B | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    assert statuses(grpo(), tiny, cpu) == {"memory": "fits"}


DISK = {  # checkpoint config -> (checkpoints at one time, exports)
    (("interval", 0),): (1, 1),  # of a run that is stopped
    (("interval", 200), ("export", False)): (1, 0),
    (("interval", 10), ("keep", 2)): (3, 1),
    (("interval", 10), ("keep", 2), ("keep_best", "accuracy")): (4, 1),
}


@pytest.mark.parametrize("fields", DISK)
def test_disk_for_checkpoints_and_export(fields, tmp_path, monkeypatch):
    """Qwen3-1.7B: a checkpoint is 1,720,574,976 x 12 bytes = 19.23 GiB, an export x 2 bytes = 3.20 GiB."""
    checkpoints, exports = DISK[fields]
    config = grpo(checkpoint=c.CheckpointConfig(**dict(fields)), run_dir=str(tmp_path / "run"), num_steps=200)
    needed = checkpoints * 1_720_574_976 * 12 + exports * 1_720_574_976 * 2
    for free, fits in ((needed + 2**20, "fits"), (needed - 2**20, "PROBLEM")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(2**50, 0, free))
        row = check_disk(sizes(QWEN3_1_7B), config)
        assert row.answer == fits and re.match(rf"{checkpoints} checkpoint.* of 19.23 GiB", row.found)
    assert all(flag in row.to_do for flag in ("--run-dir", "--checkpoint.no-export"))


def test_what_a_resumed_run_replaces_counts_as_room(tmp_path, monkeypatch):
    config = grpo(checkpoint=c.CheckpointConfig(interval=100, export=False), run_dir=str(tmp_path), num_steps=200)
    tiny = sizes(QWEN3_1_7B | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**50, 0, 0))
    assert check_disk(tiny, config).answer == "PROBLEM"
    there = tmp_path / "checkpoints" / "step-00000100" / "shard"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"0" * (2 * 12 * tiny.parameters))
    assert check_disk(tiny, config).answer == "fits"


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
