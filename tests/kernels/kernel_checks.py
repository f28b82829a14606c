"""What every kernel that leaves rows as they are merged must do, on the CPU and on a GPU."""

import math

import torch
from kernel_batches import expected, make_batch, make_partials

CACHES = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
#: Outputs are bf16: half a unit in the last place is 2^-9 of an element. The weights are rounded
#: to 16 bits before they are summed, which moves an output by 2^-9 of the values' size (about 4
#: here) over the root of their number.
OUT = {"rtol": 2**-7, "atol": 8e-3}
LSE = {"rtol": 1e-4, "atol": 1e-3}


def launch(kernel, batch, num_sms=8):
    """One launch; empty rows are cleared as the backend does it."""
    from vllm_dcp_mla.kernels.split import clear_empty_rows

    kernel.launch(batch, make_partials(num_sms, batch.query.device))
    if not kernel.clears_empty_rows:
        clear_empty_rows(batch.out, batch.lse, batch.counts)


def check(kernel, batch):
    """Every row of a batch that was launched: out, and the LSE in the base that it declares."""
    out, lse = expected(batch)
    unit = math.log(2.0) if kernel.lse_base == "e" else 1.0
    torch.testing.assert_close(batch.out.cpu().double(), out, **OUT)
    if batch.lse is not None:
        torch.testing.assert_close(batch.lse.cpu().double(), lse * unit, **LSE)
    empty = batch.counts.cpu() == 0
    assert not batch.out.cpu()[empty].any()


def agrees_with_float64(kernel, tokens, heads, topk, *, cache="bf16", num_sms=8, **changes):
    """A random batch, some of whose rows are empty."""
    batch = make_batch(
        tokens, heads, topk, dtype=CACHES[cache], query_dtype=torch.bfloat16, **changes
    )
    if tokens > 1 and changes.get("counts") is None:
        batch.counts[tokens // 2] = 0
    launch(kernel, batch, num_sms)
    check(kernel, batch)
