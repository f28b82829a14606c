"""What the installed series of vLLM cannot do, as marks of tests that need it."""

import pytest

from vllm_dcp_mla.compat.releases import installed_release

RELEASE = installed_release()


def since(minor, reason):
    """Skips before vLLM 0.``minor``, for a reason that is stock's."""
    return pytest.mark.skipif(RELEASE.minor < minor, reason=f"vLLM {RELEASE.series}: {reason}")


has_flash_attn_4 = since(33, "no FLASH_ATTN_MLA_SPARSE_FA4")
serves_hopper = since(33, "Hopper left to stock: no kernel call to replace there")
_NO_GATHER = "PCP with DCP refused: stock gathers no KV"
gathers_pcp_with_dcp = since(30, _NO_GATHER)
gathers_here = since(
    33,
    "PCP with DCP refused here: its gather was tried with 0.33 only"
    if RELEASE.gathers_pcp_with_dcp
    else _NO_GATHER,
)
interleaves = since(30, "no interleave above 1")
takes_new_names = since(32, "no new backend names")

#: Stock's trtllm-gen workspace grows with DCP; its indexer's decode build makes no tensor of the
#: rank. No code of the package depends on either.
SIZES_WORKSPACE = KEEPS_RANK_ON_DEVICE = RELEASE.minor >= 30

#: FLASHINFER_MLA_SPARSE's builder promises FULL graphs of decodes of any lengths, and so does ours.
ANY_BATCH_GRAPHS = RELEASE.minor < 32

#: For parameters; the larger one is skipped, with its reason, where stock refuses it.
INTERLEAVES = (1, pytest.param(64, marks=interleaves))
#: For hypothesis.
INTERLEAVE_SIZES = (1, 64) if RELEASE.interleaves else (1,)
