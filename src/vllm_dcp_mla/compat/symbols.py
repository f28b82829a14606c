"""Every vLLM and FlashInfer symbol relied on, checked in the source text; nothing is imported.

One that is missing, or lost an argument, switches the package off as a whole. Which ones are relied
on differs by series.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import flashinfer
from .installed import package_folder
from .releases import NEWEST, RELEASES, Release, installed_release
from .source import SourceFile

_FLASHINFER = "vllm/v1/attention/backends/mla/flashinfer_mla_sparse.py"
_FLASH_ATTN = "vllm/v1/attention/backends/mla/flashattn_mla_sparse.py"
_FLASHMLA = "vllm/v1/attention/backends/mla/flashmla_sparse.py"
_SPARSE = "vllm/model_executor/layers/attention/sparse_mla_attention.py"
_BACKEND = "vllm/v1/attention/backend.py"
_UTILS = "vllm/v1/attention/backends/mla/sparse_utils.py"
_REGISTRY = "vllm/v1/attention/backends/registry.py"
_MLA = "vllm/model_executor/layers/attention/mla_attention.py"
_COMPRESSOR = "vllm/v1/attention/backends/mla/compressor_utils.py"
_FLASHMLA_OPS = "vllm/v1/attention/ops/flashmla.py"
_FLASHMLA_LIBRARY = "vllm/third_party/flashmla/flash_mla_interface.py"
_FLASH_ATTN_LIBRARY = "vllm/vllm_flash_attn/flash_attn_interface.py"
_WORKER = "vllm/v1/worker/gpu_worker.py"

_INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
_MODEL = "vllm/model_executor/models/deepseek_v2.py"
_DCP = "vllm/v1/attention/ops/dcp.py"
_CACHE = "vllm/v1/kv_cache_interface.py"
_DEEP_GEMM = "vllm/utils/deep_gemm.py"
_WARMUP = "vllm/model_executor/warmup/jit_warmup.py"
_MERGE = "vllm/v1/attention/ops/merge_attn_states.py"
_GROUPS = "vllm/distributed/parallel_state.py"
_AUTOTUNE = "vllm/model_executor/warmup/flashinfer_autotune_cache.py"
_ATTENTION_UTILS = "vllm/v1/attention/backends/utils.py"
_TRITON = "vllm/model_executor/warmup/jit_warmup_triton_helper.py"
_DRAFTS = "vllm/v1/worker/gpu/spec_decode/target_dependent_ar"
_DSA_MODEL = "vllm/models/deepseek_v32"

_CHUNK_ARGS = (
    *("start_idx", "end_idx", "query_start_loc", "query_start_loc_cpu", "uncompressed_seq_lens"),
    *("compressed_seq_lens", "compressed_seq_lens_cpu", "block_table", "compress_ratio"),
    *("query_slice", "skip_kv_gather", "dcp_rank", "dcp_world_size"),
    "cp_kv_cache_interleave_size",
)
_KERNEL_ARGS = ("q", "kv_cache", "topk_indices", "layer", "block_size", "is_decode")
_FORWARD_ARGS = ("q", "attn_metadata", "layer")
_INDEX_ARGS = ("BLOCK_SIZE", "BLOCK_STRIDE_ROWS", "NUM_TOPK_TOKENS", "return_valid_counts")
_DCP_INDEX_ARGS = (*_INDEX_ARGS, "dcp_size", "dcp_rank", "cp_kv_cache_interleave_size")
_GATHERED_INDEX_ARGS = (
    *(*_DCP_INDEX_ARGS, "HAS_PREFILL_WORKSPACE", "prefill_workspace_request_ids"),
    *("prefill_workspace_starts", "prefill_workspace_rank_stride"),
)
_MERGE_ARGS = (
    *("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse"),
    "output_lse",
)
_BUILDER_ARGS = ("kv_cache_spec", "layer_names", "vllm_config", "device")
_COMBINATION_ARGS = (
    *("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla"),
    *("has_sink", "use_sparse", "use_mm_prefix", "device_capability"),
)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A function, class, method or assigned name of a source file.

    Attributes:
        file: path below site-packages.
        name: dotted name inside the file.
        arguments: argument names a function must have.
        since, until: minor numbers of the first and last series that it is relied on in.
    """

    file: str
    name: str
    arguments: tuple[str, ...] = ()
    since: int = RELEASES[0].minor
    until: int = NEWEST.minor

    def __str__(self) -> str:
        return f"{self.file[: -len('.py')].replace('/', '.')}.{self.name}"


SYMBOLS: tuple[Symbol, ...] = (
    Symbol(_REGISTRY, "register_backend", ("backend", "class_path")),
    Symbol(_REGISTRY, "_ATTN_OVERRIDES"),
    Symbol(_REGISTRY, "AttentionBackendEnum.register", ("name", "value"), since=32),
    Symbol(_REGISTRY, "AttentionBackendEnum.CUSTOM", until=31),
    Symbol(_REGISTRY, "AttentionBackendEnum.get_path"),
    Symbol(_REGISTRY, "AttentionBackendEnum.is_overridden"),
    Symbol(_REGISTRY, "AttentionBackendEnum.FLASHINFER_MLA_SPARSE"),
    Symbol(_REGISTRY, "AttentionBackendEnum.FLASH_ATTN_MLA_SPARSE_FA4", since=33),
    Symbol(_REGISTRY, "AttentionBackendEnum.FLASH_ATTN_MLA_SPARSE", since=33),
    Symbol(_REGISTRY, "AttentionBackendEnum.FLASHMLA_SPARSE"),
    Symbol(_BACKEND, "AttentionBackend.supports_combination", _COMBINATION_ARGS),
    Symbol(_BACKEND, "AttentionBackend.supports_compute_capability", ("capability",)),
    Symbol(_BACKEND, "AttentionBackend.get_builder_cls"),
    Symbol(_BACKEND, "AttentionBackend.get_impl_cls"),
    Symbol(
        _BACKEND,
        "AttentionMetadataBuilder.get_cudagraph_support",
        ("vllm_config", "kv_cache_spec"),
        since=33,
    ),
    Symbol(_BACKEND, "AttentionImplBase.need_to_return_lse_for_decode"),
    Symbol(_BACKEND, "AttentionImplBase.lse_base_on_e"),
    Symbol(_SPARSE, "SparseMLACommonImpl.forward_mqa", _FORWARD_ARGS, since=33),
    Symbol(
        _SPARSE,
        "SparseMLACommonImpl._forward_mqa_kernel",
        (*_KERNEL_ARGS, "valid_counts"),
        since=33,
    ),
    Symbol(_SPARSE, "SparseMLACommonMetadataBuilder.__init__", _BUILDER_ARGS),
    Symbol(_UTILS, "flat_kv_row_view", ("kv_cache", "block_size")),
    Symbol(_UTILS, "request_row_bounds", ("req_idx",), since=33),
    Symbol(_UTILS, "triton_convert_req_index_to_global_index", _GATHERED_INDEX_ARGS, since=33),
    Symbol(_MERGE, "merge_attn_states", _MERGE_ARGS, since=33),
    Symbol(_ATTENTION_UTILS, "get_dcp_local_seq_lens", since=33),
    Symbol("vllm/utils/torch_utils.py", "async_tensor_h2d", ("data", "device"), since=33),
    Symbol(_BACKEND, "CommonAttentionMetadata.dcp_local_seq_lens_cpu_upper_bound", since=33),
    Symbol(_BACKEND, "CommonAttentionMetadata.req_idx", since=33),
    Symbol(_BACKEND, "max_decode_query_len", ("vllm_config",), since=33),
    Symbol(_GROUPS, "get_tp_group", since=33),
    Symbol(_GROUPS, "get_pcp_group", since=33),
    Symbol(_GROUPS, "init_model_parallel_group", ("group_ranks", "group_name"), since=33),
    Symbol(_GROUPS, "GroupCoordinator.device_group", since=33),
    Symbol(
        f"{_DRAFTS}/speculator.py",
        "TargetDependentARSpeculator.init_cudagraph_manager",
        ("cudagraph_mode",),
        since=33,
    ),
    Symbol(f"{_DRAFTS}/cudagraph_utils.py", "SpeculatorCudaGraphManager", since=33),
    Symbol(
        "vllm/v1/worker/gpu/cudagraph_utils.py",
        "CudaGraphManager.__init__",
        ("vllm_config", "device", "cudagraph_mode", "decode_query_len"),
        since=33,
    ),
    Symbol("vllm/config/compilation.py", "CUDAGraphMode.NONE", since=33),
    Symbol("vllm/forward_context.py", "get_forward_context", since=33),
    Symbol("vllm/forward_context.py", "ForwardContext.attn_metadata", since=33),
    Symbol("vllm/forward_context.py", "ForwardContext.no_compile_layers", since=33),
    Symbol(f"{_DSA_MODEL}/attention.py", "DeepseekV32Attention.forward", since=33),
    Symbol(
        f"{_DSA_MODEL}/common/kernels.py",
        "fused_norm_rope",
        (
            *("slot_mapping", "indexer_slot_mapping", "indexer_k_cache", "mla_kv_cache"),
            *("mla_k_scale", "kv_c_out", "k_pe_out", "index_k_out"),
        ),
        since=33,
    ),
    Symbol(
        "vllm/model_executor/layers/sparse_attn_indexer.py",
        "sparse_attn_indexer",
        ("k_cache_prefix", "skip_k_cache_insert", "pcp_shard_decode_requests"),
        since=33,
    ),
    Symbol(
        "vllm/v1/attention/ops/pcp.py",
        "maybe_gather_indexer_k",
        ("num_decode_tokens", "use_pcp", "pcp_shard_decode_requests"),
        since=33,
    ),
    Symbol(_FLASHINFER, "FlashInferMLASparseMetadata"),
    Symbol(_FLASHINFER, "FlashInferMLASparseTRTLLMBackend.supports_combination", _COMBINATION_ARGS),
    Symbol(_FLASHINFER, "FlashInferMLASparseMetadataBuilder.__init__", _BUILDER_ARGS),
    Symbol(_FLASHINFER, "FlashInferMLASparseTRTLLMMetadataBuilder"),
    Symbol(
        _FLASHINFER, "FlashInferMLASparseTRTLLMMetadataBuilder.__init__", _BUILDER_ARGS, since=30
    ),
    Symbol(_FLASHINFER, "FlashInferMLASparseImpl.forward_mqa", _FORWARD_ARGS, until=32),
    Symbol(
        _FLASHINFER,
        "FlashInferMLASparseImpl._prepare_mqa_kernel",
        ("layer", "device"),
        since=30,
        until=32,
    ),
    Symbol(
        _FLASHINFER,
        "FlashInferMLASparseImpl._run_mqa_kernel",
        ("q", "kv_cache", "topk_indices", "seq_lens"),
        since=30,
        until=32,
    ),
    Symbol(
        _FLASHINFER,
        "FlashInferMLASparseImpl._forward_mqa_kernel",
        (*_KERNEL_ARGS, "seq_lens"),
        since=33,
    ),
    Symbol(_FLASH_ATTN, "FlashAttnMLASparseFA4Backend.supports_combination", since=33),
    Symbol(_FLASH_ATTN, "FlashAttnMLASparseFA4MetadataBuilder", since=33),
    Symbol(
        _FLASH_ATTN,
        "FlashAttnMLASparseFA4Impl._forward_mqa_kernel",
        (*_KERNEL_ARGS, "valid_counts"),
        since=33,
    ),
    Symbol(_UTILS, "triton_filter_and_convert_dcp_index", _DCP_INDEX_ARGS, until=29),
    Symbol(_UTILS, "triton_convert_req_index_to_global_index", _INDEX_ARGS, until=29),
    Symbol(_FLASHMLA, "FlashMLASparseBackend"),
    Symbol(_FLASHMLA, "FlashMLASparseBackend.supports_combination", _COMBINATION_ARGS, since=30),
    Symbol(_FLASH_ATTN, "FlashAttnMLASparseBackend.get_supported_kernel_block_sizes", since=33),
    Symbol(_FLASH_ATTN, "FlashAttnMLASparseBackend.customize_spec", since=33),
    Symbol(_FLASH_ATTN, "FlashAttnMLASparseMetadata", since=33),
    Symbol(_FLASH_ATTN, "FlashAttnMLASparseMetadataBuilder.__init__", _BUILDER_ARGS, since=33),
    Symbol(
        _SPARSE,
        "SparseMLACommonMetadataBuilder._init_reorder_batch_threshold",
        ("reorder_batch_threshold", "supports_spec_as_decode", "supports_dcp_with_varlen"),
        since=33,
    ),
    Symbol("vllm/logger.py", "init_logger"),
    Symbol("vllm/platforms/interface.py", "Platform.get_device_capability"),
    Symbol(_MLA, "MLAAttention._uses_flat_kv_cache", since=33),
    Symbol(_MLA, "MLAAttention.bind_kv_cache", since=33),
    Symbol(_FLASHMLA_OPS, "is_flashmla_sparse_supported", since=33),
    Symbol(_FLASHMLA_LIBRARY, "flash_mla_sparse_fwd", ("d_v", "topk_length", "out"), since=33),
    Symbol(
        _FLASH_ATTN_LIBRARY,
        "flash_attn_varlen_func",
        ("q_v", "seqused_k", "block_table", "return_softmax_lse", "out", "fa_version"),
        since=33,
    ),
    Symbol(_FLASH_ATTN_LIBRARY, "is_fa_version_supported", ("fa_version",), since=33),
    Symbol(_FLASH_ATTN_LIBRARY, "fa_version_unsupported_reason", ("fa_version",), since=33),
    Symbol(_COMPRESSOR, "_COMPRESSED_SLOT_MAPPING_KERNEL", since=33),
    Symbol(_INDEXER, "_PREPARE_UNIFORM_DECODE_KERNEL", since=33),
    Symbol(_INDEXER, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL", since=33),
    Symbol(_WORKER, "Worker.wake_up", ("tags",)),
    Symbol(_BACKEND, "CommonAttentionMetadata.seq_lens_cpu_upper_bound"),
    Symbol(_BACKEND, "CommonAttentionMetadata.query_start_loc_cpu"),
    Symbol(_BACKEND, "CommonAttentionMetadata.num_actual_tokens"),
    Symbol(_BACKEND, "CommonAttentionMetadata.block_table_tensor"),
    Symbol(_BACKEND, "AttentionLayer"),
    Symbol(_CACHE, "is_quantized_kv_cache"),
    Symbol(_INDEXER, "DeepseekV32IndexerBackend.get_builder_cls"),
    Symbol(_INDEXER, "DeepseekV32IndexerMetadata"),
    Symbol("vllm/envs.py", "environment_variables"),
    Symbol(_WARMUP, "JitWarmupRegistry._active"),
    Symbol(_DCP, "_dcp_a2a_pack_send", ("seq_lens", "query_start_loc")),
    Symbol(_DCP, "mask_dcp_empty_shards_", ("lse", "seq_lens", "query_start_loc"), until=29),
    Symbol(_MODEL, "DeepseekV32IndexerBackend"),
    Symbol(_MODEL, "DeepseekV32IndexerCache.get_attn_backend"),
    Symbol(_INDEXER, "DeepseekV32IndexerMetadataBuilder.__init__", ("block_table_width",)),
    Symbol(_INDEXER, "DeepseekV32IndexerMetadataBuilder.build", ("common_attn_metadata",)),
    Symbol(
        _INDEXER,
        "DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks",
        ("prefill_query_lens_cpu", "max_logits_bytes"),
        since=30,
    ),
    Symbol(_INDEXER, "split_indexer_prefill_chunks", ("seq_lens_cpu", "workspace_size"), until=29),
    Symbol(
        _INDEXER,
        "DeepseekV32IndexerMetadataBuilder._dcp_localize_decode_seq_lens",
        ("seq_lens", "num_decodes", "seq_lens_is_buffer_view"),
    ),
    Symbol(_INDEXER, "build_prefill_chunk_metadata", _CHUNK_ARGS, until=29),
    Symbol(_INDEXER, "build_prefill_chunk_metadata", (*_CHUNK_ARGS, "pcp_plan"), since=30),
    Symbol(_INDEXER, "BuildPrefillChunkMetadataKernel.get_warmup_keys", ("vllm_config",)),
    Symbol(_INDEXER, "get_paged_mqa_logits_metadata"),
    *(
        Symbol(_INDEXER, f"DeepseekV32IndexerPrefillChunkMetadata.{field}")
        for field in (
            *("block_table", "cu_seqlen_ks", "cu_seqlen_ke", "cu_seq_lens", "token_to_seq"),
            *("total_seq_lens", "token_start", "token_end", "num_reqs", "skip_kv_gather"),
            *("local_cu_seq_lens", "local_total_seq_lens", "max_local_total_seq_lens"),
        )
    ),
    Symbol(_INDEXER, "DeepseekV32IndexerPrefillChunkMetadata.pcp_deinterleave_idx", since=30),
    Symbol(_INDEXER, "DeepseekV32IndexerPrefillChunkMetadata.max_seqlen_k", since=33),
    Symbol(_GROUPS, "get_dcp_group"),
    Symbol(_GROUPS, "get_world_group"),
    Symbol(_GROUPS, "model_parallel_is_initialized"),
    *(
        Symbol(_GROUPS, f"GroupCoordinator.{attribute}")
        for attribute in ("rank", "ranks", "rank_in_group", "cpu_group")
    ),
    Symbol(_AUTOTUNE, "flashinfer_autotune_root", since=33),
    Symbol(_AUTOTUNE, "flashinfer_autotune_filename", ("dp_rank", "rank"), since=33),
    Symbol(_DEEP_GEMM, "_paged_mqa_logits_schedule_slots", ("num_sms", "next_n")),
    Symbol(_TRITON, "VllmTritonJitKernel.warmup_inputs", ("compile_key",), since=30),
    Symbol(_TRITON, "TritonWarmupTensor"),
    Symbol(_WARMUP, "kernel_launcher", since=30),
    Symbol(_WARMUP, "VllmJitKernel.compile", ("compile_key",)),
    Symbol(_WARMUP, "VllmJitKernel.register_warmup"),
    Symbol(_WARMUP, "VllmJitKernel.warmup"),
)


def symbols_of(release: Release) -> tuple[Symbol, ...]:
    """What is relied on in a series."""
    return tuple(s for s in SYMBOLS if s.since <= release.minor <= s.until)


def missing_symbols() -> list[str]:
    """What the installed vLLM and FlashInfer lack of what is relied on, one phrase each.

    A FlashInfer that is not installed is no difference: selection refuses for it.
    """
    vllm = package_folder("vllm")
    if vllm is None:
        return ["vllm is not installed"]
    return [*_missing_of_vllm(vllm.parent), *_missing_of_flashinfer()]


def _missing_of_flashinfer() -> list[str]:
    folder = package_folder("flashinfer")
    if folder is None:
        return []
    signature = flashinfer.read_signature(folder)
    if signature is None:
        return [f"flashinfer's {flashinfer.FUNCTION} is gone"]
    if signature.missing:
        return [f"flashinfer's {flashinfer.FUNCTION} lost {', '.join(signature.missing)}"]
    return []


def _missing_of_vllm(root: Path) -> list[str]:
    files: dict[str, SourceFile | None] = {}
    problems = []
    for symbol in symbols_of(installed_release()):
        if symbol.file not in files:
            path = root / symbol.file
            files[symbol.file] = SourceFile(path.read_text("utf-8")) if path.is_file() else None
        file = files[symbol.file]
        if file is None:
            problems.append(f"{symbol.file} is gone")
        elif (lack := file.lacks(symbol.name, symbol.arguments)) is not None:
            problems.append(f"{symbol} {lack}")
    return list(dict.fromkeys(problems))
