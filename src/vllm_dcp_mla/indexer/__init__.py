"""Metadata of the sparse indexer under DCP: no waiting, one compiled kernel, bounded chunks.

Importing the package touches neither torch nor vLLM.
"""
