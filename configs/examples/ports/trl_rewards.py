"""Reward functions and a row function as a TRL script has them: they run unchanged."""

import re


def correctness(completions, answer, **kwargs):
    """1 if the last number of a completion is that behind the solution's hashes."""
    texts = [completion[0]["content"] for completion in completions]
    gold = [solution.split("####")[-1].strip().replace(",", "") for solution in answer]
    found = [(re.findall(r"-?\d[\d,]*", text) or [""])[-1].replace(",", "") for text in texts]
    return [1.0 if number == right else 0.0 for number, right in zip(found, gold, strict=True)]


def short(completions, completion_ids, **kwargs):
    """From 0 for no tokens to -1 for 512."""
    return [-len(ids) / 512 for ids in completion_ids]


def make_row(row):
    """What the script did by `dataset.map`."""
    system = {"role": "system", "content": "Think step by step, then give the number."}
    return {"prompt": [system, {"role": "user", "content": row["question"]}], "answer": row["answer"]}
