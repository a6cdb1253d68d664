"""The reward model on the driver: what it reads of a rollout, what is refused, and how its score joins the others."""

import json
import pathlib
import shutil
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from configs.examples import toys
from grpo import features
from grpo.config import GRPOConfig, SFTConfig, TrainerConfig, change
from grpo.config.checks import validate
from grpo.features.reward_model.model import conversation, open_reward_model
from grpo.models.hf_folder import check_folder
from grpo.rewards.pool import RewardPool
from grpo.run.scorer import Scorer
from grpo.tools.evaluate import load_config
from grpo.types import Prompt, Rollout
from tests.rollouts import completion
from tests.tiny_models import SMALL, make_reward_model

TRAINER = TrainerConfig(micro_batch_tokens=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """256 positions, tokens that are bytes and a few pairs, ChatML."""
    made = tmp_path_factory.mktemp("reward_model") / "model"
    return make_reward_model(made, "qwen3-tied", toys.trained_tokenizer(["1 + 1 = 2"], 300))


def rollout(content: str | list[dict] = "1+1", text: str = "2", episode: dict | None = None) -> Rollout:
    return completion([5, 6], prompt=Prompt(0, [1, 2], content=content), text=text, episode=episode)


# ---- What it reads


def test_it_reads_prompt_and_answer_in_its_own_chat_template(folder):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    turns = [{"text": "call", "answers": ["3"]}, {"text": "It is 3.", "answers": []}]
    asked = [turns[0], {"text": "It is 3.", "answers": ["Sure?"], "role": "user"}, {"text": "Yes.", "answers": []}]
    episode = {"turns": turns, "opening": None, "info": {}}
    start = "<|im_start|>"
    cases = {
        f"{start}user\n1+1<|im_end|>\n{start}assistant\n<think>2<|im_end|>\n": conversation(rollout(), "<think>"),
        f"{start}system\nBe brief.<|im_end|>\n{start}user\n1+1<|im_end|>\n{start}assistant\n2<|im_end|>\n": (
            conversation(rollout(chat))
        ),
        f"{start}user\n1+1<|im_end|>\n{start}assistant\ncall<|im_end|>\n{start}tool\n3<|im_end|>\n"
        f"{start}assistant\nIt is 3.<|im_end|>\n": conversation(rollout(episode=episode)),
        f"{start}user\n1+1<|im_end|>\n{start}assistant\n<think>call<|im_end|>\n{start}tool\n3<|im_end|>\n"
        f"{start}assistant\n<think>It is 3.<|im_end|>\n{start}user\nSure?<|im_end|>\n"
        f"{start}assistant\n<think>Yes.<|im_end|>\n": (
            conversation(rollout(episode=episode | {"turns": asked}), "<think>")
        ),
    }
    reader = open_reward_model(folder, TRAINER)
    for text, ids in zip(cases, reader.read(list(cases.values())), strict=True):
        assert reader.tokenizer.decode(ids) == text and ids.count(reader.tokenizer.eos_token_id) == text.count("end")


def test_what_it_cannot_read_has_a_reason_in_its_place(folder, tmp_path):
    """ChatML around "1+1" and an answer has 24 tokens; one of a row's 100 places is for what follows a conversation."""
    reader = open_reward_model(folder, TRAINER)
    short, too_long, longest = reader.read([conversation(rollout(text=n * "x")) for n in (1, 76, 75)])
    assert (len(short), len(longest)) == (25, 99) and "not 1 to 99 tokens" in too_long
    assert open_reward_model(folder, TrainerConfig()).max_tokens == 255  # of 256 positions
    template = (
        "{{ raise_exception('no x') if 'x' in messages[1].content }}{{ messages[0].content + messages[1].content }}"
    )
    reader = open_reward_model(with_template(folder, tmp_path / "picky", template), TRAINER)
    refused, read = reader.read([conversation(rollout(text=text)) for text in ("x", "y")])
    assert "no x" in refused and reader.tokenizer.decode(read) == "1+1y"


# ---- What is refused


def copy_of(folder: str, to: pathlib.Path, **changes: object) -> str:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return str(to)


def with_template(folder: str, to: pathlib.Path, template: str) -> str:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(copy_of(folder, to))
    (to / "chat_template.jinja").unlink()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(to)
    return str(to)


def test_models_that_cannot_score_are_refused_with_the_reason(folder, tmp_path):
    labels = {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    policy = toys.make_model(tmp_path / "policy", toys.addition_tokenizer(), 0, SMALL)
    of_policy = copy_of(policy, tmp_path / "unnamed", architectures=["Qwen3ForSequenceClassification"], num_labels=1)
    reasons = {
        tmp_path / "nowhere": "does not exist",
        policy: "Qwen3ForCausalLM in architectures .*ForSequenceClassification",
        copy_of(folder, tmp_path / "none", architectures=None): "nothing in architectures .*ForSequenceClassification",
        copy_of(folder, tmp_path / "two", **labels): "has 2 outputs .num_labels, id2label.; .* have 1",
        copy_of(folder, tmp_path / "bert", model_type="bert"): "is a bert model; only qwen3",
        of_policy: "lack 1 tensors of config.json's model, the first is score.weight",
        with_template(folder, tmp_path / "plain", ""): "has no chat template; put the one that",
        with_template(folder, tmp_path / "deaf", "{{ messages[0].content }}"): "leaves the assistant's reply out",
    }
    for path, reason in reasons.items():
        with pytest.raises((ValueError, FileNotFoundError), match=reason):
            open_reward_model(str(path), TRAINER)
    with pytest.raises(ValueError, match="Qwen3ForSequenceClassification in architectures has no language model head"):
        check_folder(folder)


def test_what_a_config_with_one_may_be():
    """It is reward enough, also for ranks of a reference, and grpo.evaluate has no ranks for it."""
    one = {"reward.model": "my/judge", "reward.functions": {}, "roles.num_references": 1}
    validate(change(GRPOConfig(), one | {"sampling.dynamic": True, "evaluation.interval": 5}))
    validate(change(SFTConfig(), {"reward.model": "my/judge", "reward.functions": {}, "evaluation.interval": 5}))
    with pytest.raises(ValueError, match="reward.functions is empty; name one.* or a reward.model"):
        validate(change(GRPOConfig(), {"reward.functions": {}}))
    measures = {"algorithm.distill_coef": 1.0, "model.reference_path": "my/teacher", "group_size": 1}
    validate(change(GRPOConfig(), one | measures | {"reward.model_weight": 0.0}))
    with pytest.raises(ValueError, match="group_size=1"):
        validate(change(GRPOConfig(), one | measures))
    with pytest.raises(
        ValueError, match="reward.model=my/judge needs ranks that train.*--reward.model '' leaves it out"
    ):
        load_config("my/model", ["--reward.model", "my/judge"], num_ranks=1)


# ---- Its part of the reward


class Says:
    """A model that says these scores."""

    def __init__(self, *scores: float):
        self.scores_left = list(scores)

    def scores(self, sequences: list[list[int]]) -> list[float]:
        return [self.scores_left.pop(0) for _ in sequences]


def test_its_score_joins_the_weighted_sum(folder, tmp_path):
    """Weights 2 and 0.5. Completions: long enough, too short, one that is too long to be read, a score that is NaN."""
    mine = tmp_path / "mine.py"
    mine.write_text("def dots(completions, **columns): return [x.count('.') or None for x in completions]\n")
    fields = {"reward.functions": {f"{mine}:dots": 2.0}, "reward.num_workers": 1, "trainer.micro_batch_tokens": 100}
    config = change(GRPOConfig(), fields | {"reward.model": folder, "reward.model_weight": 0.5})
    tokenizer = toys.trained_tokenizer(["1 + 1 = 2"], 300)
    policy = SimpleNamespace(tokenizer=tokenizer, stop_token_ids=[tokenizer.eos_token_id])
    parts = dict(features.call(config, "reward_part", config))
    scorer = Scorer(config, policy, RewardPool(config.reward, 64), parts, None, [])
    try:
        scorer.parts["reward_model"].model = Says(-3.0, 4.0, float("nan"))
        texts = ["a..", "no dot", 80 * ".", "."]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        prompt = Prompt(0, [1, 2], content="1+1")
        scorer.submit([completion(x, prompt=prompt) for x in ids], group_size=4, step=1)
        found = scorer.collect()
    finally:
        scorer.pool.close()
    assert [r.rewards["reward_model"] for r in found] == [-3.0, 4.0, None, None]
    assert [r.reward for r in found] == [2 * 2 + 0.5 * -3, 0.5 * 4, None, None]
    assert [list(r.failures) for r in found] == [[], [], ["reward_model"], ["reward_model"]]
    assert "not 1 to 99 tokens" in found[2].failures["reward_model"]
    assert "not finite" in found[3].failures["reward_model"]
