"""Stock vLLM's own way from its command line to a class, with this package's name asked for."""

import json

import pytest

from release_marks import RELEASE
from vllm_dcp_mla.models import load_config
from vllm_dcp_mla.plugin import alias
from vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

OURS = "vllm_dcp_mla.backends.trtllm.DcpFlashInferMLASparseBackend"
STOCKS = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse.FlashInferMLASparseTRTLLMBackend"
IMPORTS = """
from dataclasses import asdict
from vllm_dcp_mla.simulate import platform, selection
platform.install()
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
"""
BODY = """
args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args({arguments!r})
config = EngineArgs.from_cli_args(args).create_engine_config()
with set_current_vllm_config(config):
    report(asked=config.attention_config.backend.name, **asdict(selection._select(config)))
"""


@pytest.fixture(scope="module")
def vllm_process():
    with VllmProcess(IMPORTS) as process:
        yield process


@pytest.fixture
def select(vllm_process, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(load_config("glm-5.2")))

    def select(*flags, **env):
        arguments = [
            *("--model", str(tmp_path), "--skip-tokenizer-init", "--load-format", "dummy"),
            *("--tensor-parallel-size", "8", "--max-model-len", "131072", *flags),
        ]
        return vllm_process.run(BODY.format(arguments=arguments), **env)

    return select


DCP = ("--decode-context-parallel-size", "8")
FP8 = ("--kv-cache-dtype", "fp8_e4m3")


def test_our_name_is_served_by_our_class(select):
    report = select("--attention-backend", alias(), *FP8, *DCP)
    assert report["asked"] == alias()
    assert report["error"] is None
    assert report["cls"] == OURS


def test_what_our_name_cannot_serve_is_refused_with_a_reason(select):
    report = select("--attention-backend", alias(), "--kv-cache-dtype", "fp8_ds_mla", *DCP)
    assert (report["asked"], report["cls"]) == (alias(), None)
    assert "kv_cache_dtype" in report["error"]


def test_our_name_is_stocks_class_without_dcp(select):
    report = select("--attention-backend", alias(), *FP8)
    assert report["cls"] == STOCKS


def test_a_name_of_stocks_is_overridden(select):
    report = select("--attention-backend", "FLASHINFER_MLA_SPARSE", *FP8, *DCP)
    assert (report["asked"], report["cls"]) == ("FLASHINFER_MLA_SPARSE", OURS)


@pytest.mark.skipif(RELEASE.takes_new_names, reason="CUSTOM is used by older releases only")
def test_custom_is_nobodys_without_the_plugin(select):
    report = select("--attention-backend", "CUSTOM", *FP8, *DCP, VLLM_PLUGINS="other")
    assert (report["asked"], report["cls"]) == ("CUSTOM", None)
    assert "register" in report["error"]
