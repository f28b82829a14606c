"""Whether the package works on this machine, and which backend vLLM picks: read-only checks."""
