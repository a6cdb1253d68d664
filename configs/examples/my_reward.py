"""Two rewards: one looks at a completion alone, one at all completions of a prompt."""

from grpo.rewards.builtin import group_level


def right_digits(completions, answer, **columns):
    """Share of the answer's digits that occur in the completion; None, which is no reward, where there is none."""
    rewards = []
    for text, digits in zip(completions, answer, strict=True):
        found = sum(digit in text for digit in digits)
        rewards.append(found / len(digits) if digits else None)
    return rewards


@group_level
def shorter_than_most(completions, num_tokens, **columns):
    """1 for the shortest completion of a prompt, 0 for the longest. Every call has `num_tokens` and `truncated`."""
    return [sum(other > mine for other in num_tokens) / max(len(num_tokens) - 1, 1) for mine in num_tokens]
