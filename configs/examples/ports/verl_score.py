"""A reward file as verl has it, and the adapter that makes it a reward function here."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl calls it, for one completion. Many of these return a dict."""
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    right = bool(found) and found[-1].replace(",", "") == ground_truth
    return {"score": float(right), "acc": right}


def score(completions, answer, data_source, extra_info, **columns):
    """Call it for each completion, and take the dict's score."""
    texts = [completion[-1]["content"] for completion in completions]
    rows = zip(data_source, texts, answer, extra_info, strict=True)
    return [compute_score(*row)["score"] for row in rows]
