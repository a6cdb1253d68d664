"""GRPO and SFT as plain torchrun scripts: trainer (torchtitan), reference and generator (vLLM) ranks in one torchrun."""
