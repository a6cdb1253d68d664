"""What transformers' own classifier says of conversations, as its users call it: no code of the project."""

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast


@torch.no_grad()
def scores_by_transformers(folder: str, conversations: list[list[dict]]) -> list[float]:
    """Score conversations in float32, in one batch with padding on the right."""
    # as tokenizer.json has it: AutoTokenizer would make one of another class of it
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="right")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in conversations]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    return model(**batch).logits[:, 0].tolist()
