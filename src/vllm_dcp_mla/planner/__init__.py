"""What a configuration costs and whether it works, without torch, vLLM or a GPU."""
