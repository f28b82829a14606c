"""Stock vLLM with several ranks, on random weights, compared with one rank."""
