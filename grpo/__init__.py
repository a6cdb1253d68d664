"""PlainRL: GRPO and SFT as plain torchrun scripts: trainer, reference and generator ranks in one torchrun."""
