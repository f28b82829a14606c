"""Selection that tells the truth: every refusal is a reason, and names what works instead."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.config import get_current_vllm_config_or_none

from .. import capability
from ..settings import Settings, SettingsError, load_settings, user_workspace_bytes
from .deployment import deployment_of


def current_settings() -> Settings:
    """The settings of the engine whose configuration is current."""
    config = get_current_vllm_config_or_none()
    return load_settings(config.additional_config if config is not None else None)


class CapabilityTableMixin:
    """Asks the capability table first, then the stock class that it is mixed into."""

    #: Whether the stock class refuses DCP as such, or with PCP: then the table alone answers.
    stock_refuses_dcp: ClassVar[bool] = False
    stock_refuses_pcp_with_dcp: ClassVar[bool] = False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: Any,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why vLLM must not pick this backend, None when it may."""
        config = get_current_vllm_config_or_none()
        asked = config is not None and config.model_config is not None and use_mla and use_sparse
        if asked and config.parallel_config.decode_context_parallel_size > 1:
            try:
                user_workspace_bytes()
                kernel = current_settings().kernel
            except SettingsError as error:
                return str(error)
            deployment = deployment_of(config, kv_cache_dtype, device_capability, kernel=kernel)
            reason = capability.explain(cls.get_name(), deployment)  # type: ignore[attr-defined]
            alone = cls.stock_refuses_dcp or (cls.stock_refuses_pcp_with_dcp and deployment.pcp > 1)
            if reason is not None or deployment.any_device or alone:
                return reason
        return super().supports_combination(  # type: ignore[misc]
            head_size,
            dtype,
            kv_cache_dtype,
            block_size,
            use_mla,
            has_sink,
            use_sparse,
            use_mm_prefix,
            device_capability,
        )
