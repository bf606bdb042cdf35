"""Published checkpoints of GPT-2 and Llama as runs, and runs as such checkpoints."""
