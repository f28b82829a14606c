"""A GPU that is not there: stock vLLM's own selection code, asked on any machine."""
