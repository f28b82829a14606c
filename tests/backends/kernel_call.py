"""Hands an implementation what stock's ``forward_mqa`` hands to its kernel."""

from vllm_dcp_mla.compat.releases import installed_release


def call_kernel(impl, query, cache, topk, counts, *, layer, block_size, is_decode=True):
    """The kernel's (out, lse), by the hook of the installed series."""
    adapter = installed_release().adapter
    if adapter == "v0_29":  # stock has no method of its own there
        return impl._attend(query, cache, topk, counts, layer, block_size)
    if adapter == "v0_30":
        assert cache.shape[1] == block_size
        impl._prepare_mqa_kernel(layer, query.device)
        return impl._run_mqa_kernel(query, cache, topk, counts)
    return impl._forward_mqa_kernel(
        query, cache, topk, counts, layer=layer, block_size=block_size, is_decode=is_decode
    )
