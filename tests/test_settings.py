import pytest

from vllm_dcp_mla.settings import Settings, SettingsError, load_settings, user_workspace_bytes


def test_defaults():
    assert load_settings({}, {}) == Settings()
    assert Settings().slab_limit_bytes == 537_919_488


def test_an_empty_variable_is_an_unset_one():
    env = {"VLLM_DCP_MLA_KERNEL": "", "VLLM_DCP_MLA_DISABLE": ""}
    assert load_settings(None, env) == Settings()


def test_configuration_wins_over_environment():
    env = {"VLLM_DCP_MLA_KERNEL": "reference", "VLLM_DCP_MLA_SLAB_LIMIT_BYTES": "3000000"}
    assert load_settings(None, env).kernel == "reference"
    assert load_settings(None, env).slab_limit_bytes == 3_000_000
    assert load_settings({"dcp_mla": {"kernel": "trtllm_gen"}}, env).kernel == "trtllm_gen"


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("0", False), ("true", True), ("on", True), ("off", False)]
)
def test_switches(text, value):
    assert load_settings(None, {"VLLM_DCP_MLA_DISABLE": text}).disable is value


@pytest.mark.parametrize(
    ("config", "env", "named"),
    [
        (None, {"VLLM_DCP_MLA_KERNEL": "fast"}, ["VLLM_DCP_MLA_KERNEL", "'fast'", "reference"]),
        (
            None,
            {"VLLM_DCP_MLA_DISABLE": "maybe"},
            ["VLLM_DCP_MLA_DISABLE is 'maybe': it must be on or off"],
        ),
        (None, {"VLLM_DCP_MLA_SLAB_LIMIT_BYTES": "-1"}, ["SLAB_LIMIT_BYTES", "'-1'"]),
        ({"dcp_mla": {"slab": 1}}, {}, ["slab", "not a setting", "slab_limit_bytes"]),
        ({"dcp_mla": {"slab_limit_bytes": "x"}}, {}, ["dcp_mla.slab_limit_bytes", "'x'"]),
        ({"dcp_mla": [1]}, {}, ["--additional-config", "[1]"]),
        ({"dcp_mla": {"allow_untested": True}}, {}, ["VLLM_DCP_MLA_ALLOW_UNTESTED=1"]),
    ],
)
def test_refusals_name_place_and_value(config, env, named):
    with pytest.raises(SettingsError) as caught:
        load_settings(config, env)
    assert all(part in str(caught.value) for part in named), str(caught.value)


@pytest.mark.parametrize("text", ["2GiB", "", "0", "-5", "1.5"])
def test_users_workspace_must_be_a_number(text):
    with pytest.raises(SettingsError, match="VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE is"):
        user_workspace_bytes({"VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE": text})


def test_users_workspace():
    assert user_workspace_bytes({}) is None
    assert user_workspace_bytes({"VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE": "104857600"}) == 104857600
