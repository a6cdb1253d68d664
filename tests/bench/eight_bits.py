"""How far log-probs move if the linear layers of a model have 8 bits, by transformers: what a frozen base would cost.

    python tests/bench/eight_bits.py MODEL

MODEL is a folder, such as runs/smollm2-135m. The model answers four questions four times in float32 (384 tokens). Each
line is the mean and largest difference of two log-probs of these tokens, nats. The LM head keeps its precision.
"""

import sys
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

QUESTIONS = (
    "Reply with the number only. Which is the smallest, 59, 63 or 15?",
    "Write two sentences about the sea.",
    "What is 12 times 7? Explain.",
    "Name three colours.",
)
Rounding = Callable[[torch.Tensor], torch.Tensor]


def int8(weight: torch.Tensor) -> torch.Tensor:
    """Round to 8-bit integers, with a scale for each row."""
    scale = weight.abs().amax(-1, keepdim=True) / 127
    return (weight / scale).round() * scale


def float8(values: torch.Tensor) -> torch.Tensor:
    """Round to 8-bit floats, with a scale for each row: an output of a weight, a token of an input."""
    scale = values.abs().amax(-1, keepdim=True) / 448
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def model_of(folder: str, dtype: torch.dtype, weights: Rounding | None, inputs: Rounding | None) -> PreTrainedModel:
    """Load the model to compute in `dtype`, with weights and inputs of its linear layers rounded."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear) or name == "lm_head":
            continue
        if weights:
            layer.weight.data = weights(layer.weight.data)
        if inputs:
            layer.register_forward_pre_hook(lambda _, x: (inputs(x[0].float()).to(x[0].dtype),))
    return model.to(dtype)


@torch.no_grad()
def main(folder: str) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    start = model_of(folder, torch.float32, None, None)
    answers = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        prompts = ids["input_ids"].repeat(4, 1)
        whole = start.generate(prompts, do_sample=True, max_new_tokens=24, pad_token_id=tokenizer.eos_token_id)
        answers.append((whole, prompts.shape[1]))

    def logprobs(dtype=torch.float32, weights=None, inputs=None) -> torch.Tensor:
        model = model_of(folder, dtype, weights, inputs)
        values = []
        for whole, length in answers:
            logits = model(whole).logits[:, length - 1 : -1].float()
            values.append(logits.log_softmax(-1).gather(2, whole[:, length:, None]).flatten())
        return torch.cat(values)

    def show(what: str, one: torch.Tensor, other: torch.Tensor) -> None:
        difference = (one - other).abs()
        print(f"{what}: {difference.mean():.3f}, at most {difference.max():.2f}", flush=True)

    own, rounded = logprobs(), logprobs(weights=int8)
    show("bfloat16 and float32, weights as they are", logprobs(torch.bfloat16), own)
    show("int8 weights and weights as they are, float32", rounded, own)
    show("int8 weights on both sides, bfloat16 and float32", logprobs(torch.bfloat16, int8), rounded)
    rounded = logprobs(weights=float8)
    show("float8 weights and weights as they are, float32", rounded, own)
    show(
        "float8 weights on both sides, float8 inputs on one, float32", logprobs(weights=float8, inputs=float8), rounded
    )


if __name__ == "__main__":
    main(sys.argv[1])
