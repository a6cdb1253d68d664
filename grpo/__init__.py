"""PlainRL: GRPO and SFT as plain torchrun scripts: trainer, reference and generator ranks in one torchrun."""

__path__ += [f"{folder}/tools" for folder in __path__]  # `python -m grpo.look` runs tools/look.py
