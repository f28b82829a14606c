"""Speed of what this package does, beside what stock vLLM offers and beside the machine's floor."""
