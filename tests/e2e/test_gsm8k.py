"""GSM8K from its files to a policy: SFT on chats, GRPO from the folder that SFT left, evaluation of both folders."""

import json
import pathlib

import pytest
import torch

from grpo.config import SFTConfig
from grpo.config.recipes import load_recipe
from grpo.data.chat import load_tokenizer
from grpo.data.prepare import load_chat_sources, usable_chats
from grpo.data.streams import ChatStream
from tests.e2e.runs import read_metrics
from tests.torchrun import ROOT, run_python, torchrun

DATA = ROOT.parent / "shared" / "data" / "gsm8k"
DIGITS = f"{pathlib.Path(__file__).parent / 'tiny_rewards.py'}:digit_share"
# One function for both scripts: SFT reads `messages`, GRPO and evaluation read `prompt` and `answer`.
CHAT = """
def chat(row):
    prompt = [{"role": "system", "content": "Show your work."}, {"role": "user", "content": row["question"]}]
    messages = [*prompt, {"role": "assistant", "content": row["answer"]}]
    return {"prompt": prompt, "answer": row["answer"], "messages": messages}
"""


def unigram_entropy(run_dir: pathlib.Path) -> float:
    """Of the labels that the run saw, in nats: the least loss of a model that ignores what stands before a token."""
    config = load_recipe(str(run_dir / "config.py"), SFTConfig)
    tokenizer = load_tokenizer(str(run_dir / "model"), config.data)
    stream = ChatStream(usable_chats(load_chat_sources(config), config, tokenizer), config)
    examples = stream.draw(config.num_steps * config.sequences_per_step)
    labels = torch.cat([torch.tensor(one.ids)[torch.tensor(one.mask)] for one in examples])
    shares = torch.bincount(labels).double() / len(labels)
    return -torch.special.xlogy(shares, shares).sum().item()


@pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} does not exist; it has GSM8K's train.jsonl and test.jsonl")
@pytest.mark.slow
def test_gsm8k_from_chats_to_a_policy(tmp_path: pathlib.Path):
    (tmp_path / "rows.py").write_text(CHAT)
    data = ["--data.path", f"{DATA}/train.jsonl:train[:1000]", "--data.row", tmp_path / "rows.py:chat"]
    held_out = ["--evaluation.path", DATA / "test.jsonl", "--evaluation.num-prompts", 8]

    sft = tmp_path / "sft"
    flags = ["configs/toy_sft_gsm8k.py", *data, "--num-trainers", 1, "--num-steps", 32, "--evaluation.interval", 0]
    torchrun("train_sft.py", *flags, "--metrics.no-tensorboard", "--run-dir", sft, nproc=1)
    losses = [m["loss"] for m in read_metrics(sft)]
    assert losses[0] > 7  # a guess among 2048 tokens costs 7.6 nats
    entropy = unigram_entropy(sft)
    assert 5.5 < entropy < 6.5
    print(f"SFT: loss {losses[0]:.2f}, then {losses[-1]:.2f}; unigram entropy of its labels {entropy:.2f} nats")
    assert sum(losses[-5:]) / 5 < entropy - 0.3, losses

    grpo = tmp_path / "grpo"
    flags = ["configs/toy_gsm8k.py", *data, "--model.path", sft / "model", "--data.system-prompt", ""]
    flags += ["--roles.colocated", "--roles.num-trainers", 1, "--roles.num-references", 0, "--num-steps", 2]
    flags += ["--reward.functions", "math_reward", 1, DIGITS, 0.1, "--reward.answer-format", "hashes", *held_out]
    flags += ["--trainer.learning-rate", 1e-3, "--sync-check-interval", 1, "--metrics.no-tensorboard"]
    output = torchrun("train_grpo.py", *flags, "--run-dir", grpo, nproc=1)
    assert "completions end at '<|im_end|>'" in output
    for m in read_metrics(grpo):
        assert m["mismatch/mean"] < 1e-5 and m["grad_norm"] > 0

    texts = {}
    for model in (sft, grpo):
        alone = tmp_path / f"{model.name}-alone"
        run_python("-m", "grpo.evaluate", model / "model", grpo / "config.py", "--run-dir", alone)
        lines = [json.loads(line) for line in (alone / "evaluation.jsonl").read_text().splitlines()]
        assert [line["row"] for line in lines] == [*range(8)]
        assert lines[0]["prompt"].startswith("<|im_start|>system\nShow your work.<|im_end|>\n<|im_start|>user\nJanet")
        (metrics,) = read_metrics(alone)
        assert metrics["eval/reward_mean"] > 0
        print(f"{model.name}: {metrics}")
        texts[model] = [line["completion"] for line in lines]
    assert texts[sft] != texts[grpo]  # two updates that can be seen
