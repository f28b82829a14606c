"""Everything that ties the package to particular vLLM and FlashInfer releases."""
