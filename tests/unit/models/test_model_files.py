"""A model's folder is data: nothing in it is run, and an export takes along only what a tokenizer reads."""

import json
import pathlib

import pytest
import transformers

from configs.examples import toys
from grpo.config import DataConfig, GeneratorConfig, GRPOConfig, SFTConfig
from grpo.data.chat import load_tokenizer
from grpo.models.export import write_form
from grpo.models.hf_folder import ChatForm, copied_files, read_hf_config, stop_token_ids
from grpo.run.policy import learned_form


def names(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in copied_files(folder))


def test_what_an_export_copies(tmp_path):
    """A tokenizer with all of its templates, what links within the folder lead to, and nothing else that lies there."""
    folder = tmp_path / "model"
    tokenizer = toys.trained_tokenizer(["a few words"], 300)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
    tokenizer.save_pretrained(folder)
    for name in ("tokenizer.py", "tokenizer.pkl", "x.model", "chat_template.jinja.bak", "tokenizer.bin", "real"):
        (folder / name).write_text("{}")
    (folder / "vocab.json").mkdir()  # a folder of that name
    (folder / "vocab.txt").symlink_to("absent")
    (folder / "merges.txt").symlink_to("real")
    assert names(folder) == [
        *("additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja", "chat_template.jinja"),
        *("merges.txt", "tokenizer.json", "tokenizer_config.json"),
    ]
    for file in copied_files(folder):
        copy = tmp_path / "copy" / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True, parents=True)
        copy.write_bytes(file.read_bytes())
    assert load_tokenizer(str(tmp_path / "copy")).chat_template == tokenizer.chat_template


@pytest.mark.parametrize("name", ["added_tokens.json", "additional_chat_templates/mine.jinja"])
def test_links_that_lead_out_are_refused_by_name(name, tmp_path):
    """The hub's cache is links to blobs, models--A--B/snapshots/REVISION/tokenizer.json -> ../../blobs/HASH."""
    home = tmp_path / "models--A--B"
    snapshot = home / "snapshots/0123abcd"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    (home / "blobs").mkdir()
    (home / "blobs/hash").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/hash")
    (tmp_path / "link").symlink_to(snapshot)
    assert names(snapshot) == names(tmp_path / "link") == ["tokenizer.json"]
    (home / "refs").write_text("key")
    (snapshot / name).symlink_to(home / "refs")
    with pytest.raises(ValueError, match=rf"{name} is a link to {home}/refs"):
        copied_files(snapshot)


def base_tokenizer(folder: pathlib.Path, form: ChatForm) -> pathlib.Path:
    """A folder with a base model's tokenizer, whose EOS ends texts and not turns, after `write_form`."""
    tokenizer = toys.trained_tokenizer(["a few words"], 300)
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.save_pretrained(folder)
    write_form(folder, form)
    return folder


def test_a_form_brings_its_template_and_what_ends_a_turn(tmp_path):
    before = {"_from_model_config": True, "eos_token_id": 5, "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(before))
    folder = base_tokenizer(tmp_path, ChatForm("{{ messages[0].content }}!", (2,)))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.chat_template == "{{ messages[0].content }}!" != toys.CHAT_TEMPLATE
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 2 != tokenizer.eos_token_id
    expected = sorted({2, 5, tokenizer.eos_token_id})
    assert stop_token_ids(str(folder), tokenizer) == expected
    after = json.loads((folder / "generation_config.json").read_text())
    assert after == {"eos_token_id": expected, "temperature": 0.6}


@pytest.mark.parametrize("name", ["generation_config.json", "config.json", ""])
def test_answers_of_an_exported_folder_end_where_completions_ended(name, tmp_path):
    """Many folders name one end in the tokenizer and another in the file from which transformers takes the ends.

    A form without news leaves the folder as it is.
    """
    if name:
        (tmp_path / name).write_text(json.dumps({"eos_token_id": 7}))
    tokenizer = load_tokenizer(str(base_tokenizer(tmp_path, ChatForm())))
    assert tokenizer.chat_template == toys.CHAT_TEMPLATE
    ends = {7, tokenizer.eos_token_id} if name else {tokenizer.eos_token_id}
    options = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert {*options.eos_token_id} == ends
    before = (tmp_path / "generation_config.json").stat()
    write_form(tmp_path, ChatForm("", (tokenizer.eos_token_id,)))
    assert (tmp_path / "generation_config.json").stat() == before


@pytest.mark.parametrize(
    "template, carried", [("", ""), ("{{ messages }}", "{{ messages }}"), ("{{ question }}", ""), ("Q: {question}", "")]
)
def test_what_sft_carries_to_the_folder_it_leaves(template, carried, tmp_path):
    tokenizer = toys.trained_tokenizer(["a few words"], 300)
    path = template
    if template.startswith("{{"):
        (tmp_path / "own.jinja").write_text(template)
        tokenizer.chat_template, path = template, str(tmp_path / "own.jinja")
    config = SFTConfig(data=DataConfig(prompt_template=path))
    assert learned_form(config, tokenizer).template == carried


def test_what_ended_completions_in_grpo_ends_answers_of_the_folder_it_leaves(tmp_path):
    """A base model was stopped at <|im_end|> while it learned to write that; nothing else would stop it there."""
    tokenizer = load_tokenizer(str(base_tokenizer(tmp_path, ChatForm())))
    config = GRPOConfig(generator=GeneratorConfig(stop_token_ids=(2,)))
    write_form(tmp_path, learned_form(config, tokenizer))
    assert stop_token_ids(str(tmp_path), tokenizer) == sorted({2, tokenizer.eos_token_id})


@pytest.mark.parametrize("model_type", ["qwen3", "their_own"])
def test_code_that_comes_with_a_model_is_not_run(tmp_path, model_type):
    """A tokenizer is what tokenizer.json says, whatever class another file names."""
    toys.addition_tokenizer().save_pretrained(tmp_path)
    auto_map = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    for name, facts in (
        ("config", {"model_type": model_type}),
        ("tokenizer_config", {"tokenizer_class": "T", "eos_token": "<eos>"}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(facts | {"auto_map": auto_map}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    if model_type == "qwen3":  # transformers' own class
        assert type(read_hf_config(str(tmp_path))).__module__.startswith("transformers.")
    else:
        with pytest.raises(ValueError, match="is a their_own model"):
            read_hf_config(str(tmp_path))
    template = DataConfig(prompt_template="{question}")
    assert type(load_tokenizer(str(tmp_path), template)) is transformers.PreTrainedTokenizerFast
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="bring tokenizer.json"):
        load_tokenizer(str(tmp_path), template)
    assert not (tmp_path / "ran").exists()
