"""vLLM's own arguments reach the engine, and a quantized engine quantizes again in every sync."""

import json
import pathlib

from grpo import features
from tests.e2e.runs import NO_KL, ONE_RANK, read_completions, read_metrics, run_tiny

# A recipe that tells what the engine was started with
TELLING = """
import json

from grpo.roles.engine import vllm_engine
from tests.e2e.tiny import config

start_engine = vllm_engine.start_engine


def tell(*arguments):
    llm = start_engine(*arguments)
    vllm = llm.llm_engine.vllm_config
    told = {
        "max_num_seqs": vllm.scheduler_config.max_num_seqs,
        "enable_prefix_caching": vllm.cache_config.enable_prefix_caching,
        "num_gpu_blocks": vllm.cache_config.num_gpu_blocks,
        "quantization": vllm.model_config.quantization,
    }
    print("engine", json.dumps(told), flush=True)
    return llm


vllm_engine.start_engine = tell
"""


def run(model: pathlib.Path, tmp_path: pathlib.Path, *flags: object) -> tuple[list[dict], dict]:
    """Metrics of a run on one rank, and what the engine was started with."""
    (tmp_path / "telling.py").write_text(TELLING)
    recipe = tmp_path / "telling.py"
    output = run_tiny(model, tmp_path / "run", f"{ONE_RANK} {NO_KL} --sync-check-interval 0", *flags, recipe=recipe)
    (told,) = (json.loads(line[7:]) for line in output.splitlines() if line.startswith("engine "))
    return read_metrics(tmp_path / "run"), told


def test_options_of_engine_and_sampling_arrive(model, tmp_path):
    """At least 5 tokens, then the stop string ends a completion; a word that is not allowed never occurs."""
    engine = "--generator.engine max_num_seqs 5 enable_prefix_caching false num_gpu_blocks_override 70"
    sampling = '--generator.sampling min_tokens 5 bad_words ["7"] --generator.stop 3 1'
    metrics, told = run(model, tmp_path, engine, sampling)
    expected = {"max_num_seqs": 5, "enable_prefix_caching": False, "num_gpu_blocks": 70, "quantization": None}
    assert told == expected
    lines = read_completions(tmp_path / "run")
    assert len(lines) == 2 * 16
    stopped = [line for line in lines if line["completion"][-1:] in ("3", "1") and line["finish_reason"] == "stop"]
    assert len(stopped) > 3
    for line in lines:
        assert line["num_tokens"] >= 5 and "7" not in line["completion"]
    # the log-probs are those of the fewer tokens that could be drawn, and the trainer's of all
    assert all(m["mismatch/max"] > 1e-3 for m in metrics)


def test_a_quantized_engine_quantizes_again_in_every_sync(model, tmp_path):
    """After each sync, trainer and generator are as far apart as at the start, when vLLM quantized the folder."""
    fp8 = "--generator.engine quantization fp8_per_channel --model.dtype bfloat16"
    metrics, told = run(model, tmp_path, fp8, "--num-steps 4")
    assert told["quantization"] == "fp8_per_channel"
    assert told["max_num_seqs"] == (16 if "machine" in features.present() else 256)  # all of a step's completions
    at_start, *synced = (m["mismatch/mean"] for m in metrics)
    assert at_start > 0.01  # fp8 is seen
    assert max(synced) < 1.2 * at_start
