"""A reward model's scores are those of transformers, wherever its ranks are."""

import pytest

from configs.examples.toys import trained_tokenizer
from tests.tiny_models import make_reward_model
from tests.torchrun import torchrun

KINDS = ("qwen3-tied", "qwen2-untied", "llama3", "smollm3", "gemma3", "olmo3")
LAYOUTS = {  # (trainers, references, tensor_parallel)
    "sharded over the trainers": (2, 0, 1),
    "two ranks of its own": (1, 2, 1),
    "on trainers that share each layer": (2, 0, 2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """One of each family, and one whose padding is the token with which every conversation ends."""
    folder, tokenizer = tmp_path_factory.mktemp("reward_models"), trained_tokenizer(["1 + 1 = 2"], 300)
    made = [make_reward_model(folder / kind, kind, tokenizer) for kind in KINDS]
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = tokenizer.chat_template.replace(" + '\\n' }}", " }}")
    assert tokenizer.apply_chat_template([{"role": "assistant", "content": "2"}], tokenize=False).endswith("<|im_end|>")
    return [*made, make_reward_model(folder / "padding", "qwen3-untied", tokenizer)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_transformers(layout, folders):
    num_trainers, num_references, _ = LAYOUTS[layout]
    nproc = num_trainers + num_references
    print(torchrun("tests/dist/programs/reward_model.py", *LAYOUTS[layout], *folders, nproc=nproc))
