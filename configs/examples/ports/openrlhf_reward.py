"""A reward file as OpenRLHF has it, and the adapter that makes it a reward function here."""

import re


def reward_func(queries, prompts, labels):
    """As OpenRLHF calls it: whole texts, prompts and labels."""
    scores = []
    for query, label in zip(queries, labels, strict=True):
        gold = label.split("####")[-1].strip().replace(",", "")
        found = (re.findall(r"-?\d[\d,]*", query) or [""])[-1].replace(",", "")
        scores.append(1.0 if found == gold else 0.0)
    return {"rewards": scores, "scores": scores}


def rewards(completions, prompts, answer, **columns):
    """Call it with prompt and completion in one text, and take the dict's rewards."""
    queries = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
    return reward_func(queries, prompts, answer)["rewards"]
