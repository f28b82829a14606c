"""The classes that vLLM sees."""
