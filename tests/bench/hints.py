"""Additions of which some have their answer in the prompt, so that a start learns to read it (see distill.py)."""

import zlib

PLAIN_FRAC = 0.5


def some_hinted(row: dict[str, str]) -> dict[str, str]:
    """Put the answer before the question, as "168;70+98", in all rows except a share of PLAIN_FRAC."""
    is_plain = zlib.crc32(row["question"].encode()) % 1000 < 1000 * PLAIN_FRAC
    prompt = row["question"] if is_plain else f"{row['answer']};{row['question']}"
    return {"prompt": prompt, "completion": row["completion"]}
