"""A column chooses among several teachers: what a row must say, and what held-out rows need not."""

from types import SimpleNamespace

import pytest

from grpo.config import EvaluationConfig, GRPOConfig, ModelConfig, RewardConfig
from grpo.data.prepare import load_eval_prompts
from grpo.run.inputs import check_functions, held_out_prompts
from tests.unit.data.test_data import config_of, prompts_of, word_tokenizer, write_rows

MODEL = ModelConfig(teachers={"math": "m", "code": "c"})


def rows_of(folder, *domains: object) -> str:
    return write_rows(folder / "rows.jsonl", [{"question": "add n1", "answer": "n2", "domain": d} for d in domains])


def test_a_prompt_carries_the_name_of_its_teacher(tmp_path):
    data = config_of(rows_of(tmp_path, "code", "math", "code"), teacher_column="domain", shuffle=False)
    prompts = prompts_of(data, word_tokenizer(), model=MODEL).draw(3)
    assert [prompt.columns["domain"] for prompt in prompts] == ["code", "math", "code"]


@pytest.mark.parametrize("value, shown", [("mth", "'mth'"), (1, "1"), (["math"], r"\['math'\]"), ("", "''")])
def test_an_unknown_teacher_is_told_with_its_row_also_after_a_start_that_knew_it(tmp_path, value, shown):
    data = config_of(rows_of(tmp_path, "math", "code", value), teacher_column="domain")
    if isinstance(value, str):  # nothing of this start is taken for the next one
        prompts_of(data, word_tokenizer(), model=ModelConfig(teachers=MODEL.teachers | {value: "x"}))
    words = f"1 of 3 rows of .* row 3: column 'domain' is {shown}, and model.teachers has math, code "
    with pytest.raises(ValueError, match=words):
        prompts_of(data, word_tokenizer(), model=MODEL)


def test_held_out_rows_need_no_teacher(tmp_path):
    data = config_of(rows_of(tmp_path, "math"), teacher_column="domain")
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"question": "add n1", "answer": "n2"}])
    (prompt,) = load_eval_prompts(data, EvaluationConfig(path=held_out, num_prompts=1), word_tokenizer())
    assert prompt.columns == {"question": "add n1", "answer": "n2"}
    (tmp_path / "own.py").write_text("def own(completions, domain, **others):\n    return [1.0 for _ in completions]\n")
    reward = RewardConfig(functions={f"{tmp_path}/own.py:own": 1.0})
    config = GRPOConfig(data=data, model=MODEL, reward=reward, evaluation=EvaluationConfig(path=held_out))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 30}')
    check_functions(config)  # training rows have what it asks for
    with pytest.raises(ValueError, match="own.*domain.*data.columns"):
        held_out_prompts(config, SimpleNamespace(tokenizer=word_tokenizer(), vocab_size=30))
    with pytest.raises(ValueError, match="'domain' is missing in .*name one of them with --data.teacher-column"):
        prompts_of(config_of(held_out, teacher_column="domain"), word_tokenizer(), model=MODEL)
