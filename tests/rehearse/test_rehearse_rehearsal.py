import io
import json
import os
import stat
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from rehearse_results import held, rank, scores, states
from rich.console import Console

from vllm_dcp_mla.models import UnservedModelError
from vllm_dcp_mla.rehearse import rehearsal, report
from vllm_dcp_mla.rehearse.checkpoint import RehearsalModel
from vllm_dcp_mla.rehearse.config import SCORES, small_config
from vllm_dcp_mla.rehearse.configuration import Configuration, cover
from vllm_dcp_mla.rehearse.faults import FAULTS
from vllm_dcp_mla.rehearse.machine import LocalGpu, Machine, MachineError
from vllm_dcp_mla.rehearse.outside import NoReferenceError
from vllm_dcp_mla.rehearse.rehearsal import Options, rehearse
from vllm_dcp_mla.rehearse.schedule import EngineResult

GIB = 1 << 30
ONE = Configuration("glm-5.2", 2, 1, 2, "bfloat16", "ag_rs", 0, "none", "reference")
OPTIONS = Options(512, 8192, None, 60.0)


def machine(gpus=1, nccl=(2, 30, 3), free=140):
    one = LocalGpu(name="H200", arch=(9, 0), total_bytes=141 * GIB, free_bytes=free * GIB)
    return Machine(gpus=(one,) * gpus, nccl=nccl, versions={"torch": "2.12", "vllm": None})


class Stage:
    """Engines that answer as told, and where their files are."""

    def __init__(self):
        self.specs, self.folder, self.arguments = {}, None, None
        self.breaks, self.drifts, self.raises = set(), 1.0, None
        self.written = []

    def write(self, model, folder, *, index_topk=None, max_model_len, scores):
        folder.mkdir(parents=True)
        config = small_config("glm-5.2", index_topk=index_topk)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        self.written.append((model, index_topk, scores))
        return RehearsalModel(
            *(Path(model).name, folder, "GlmMoeDsaForCausalLM", 3, (2,)),
            *(index_topk or 2048, 2048, 16384, 576, 128),
        )

    def outside(self, model, prompts):
        raise NoReferenceError("Transformers is too old.")

    def run(self, specs, folder, **arguments):
        self.folder, self.arguments = folder, arguments
        self.private = stat.S_IMODE(folder.stat().st_mode) == 0o700
        results = {}
        for spec, requests in specs:
            assert spec.name not in self.specs, "each engine runs once"
            self.specs[spec.name] = spec, requests
            assert (Path(spec.model) / "model.safetensors").exists()
            (folder / spec.name).mkdir()
            (folder / spec.name / "rank0.log").write_text("log")
            if spec.name in self.breaks:
                results[spec.name] = EngineResult(spec, 3.0, failure="it broke")
                continue
            noise = 0.0 if spec.world == 1 else 0.01 * (self.drifts if spec.dcp > 1 else 1)
            said = scores(noise, len(results), len(requests.prompts))
            ranks = [rank(n, said, spec.strict) for n in range(spec.world)]
            for one in ranks:
                one["held"] = held(spec)
                if requests.soak is not None:
                    one["soak"] = {
                        "distances": [[0, 0.001]],
                        "aborted": 1,
                        "steps": 5,
                        "states": states(*range(3), 9, 9, 9),
                    }
            results[spec.name] = EngineResult(spec, 30.0, ranks)
        if self.raises is not None:
            raise self.raises
        return results


@pytest.fixture
def stage(monkeypatch, tmp_path):
    made = Stage()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rehearsal, "write_checkpoint", made.write)
    monkeypatch.setattr(rehearsal.schedule, "run", made.run)
    monkeypatch.setattr(rehearsal.outside, "first_scores", made.outside)
    monkeypatch.setattr(rehearsal.schedule.mps, "available", lambda: True)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    return made


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def outcome_of(configurations=(ONE,), on=None, options=OPTIONS):
    return rehearse(list(configurations), on or machine(), options, lambda text: None)


def test_a_good_run_leaves_no_folder(stage, tmp_path):
    outcome = outcome_of()
    assert outcome.ok
    assert [case.name.removeprefix(ONE.name) for case in outcome.cases] == [
        *(": runs", ": to 512 tokens", ": to 1536 tokens", ": to 3072 tokens"),
        ": memory against plan",
    ]
    assert list(stage.specs) == [ONE.baseline(1).name, ONE.baseline(2).name, ONE.name]
    assert stage.private
    assert (outcome.folder, outcome.shared) == (None, True)
    assert left_in(tmp_path) == []


def test_a_bad_run_keeps_its_logs_without_the_weights(stage, tmp_path):
    stage.drifts = 2.0
    outcome = outcome_of()
    assert not outcome.ok
    assert outcome.folder == stage.folder
    assert left_in(outcome.folder) == sorted(stage.specs)
    assert (outcome.folder / ONE.name / "rank0.log").exists()


def test_a_prompt_that_a_shared_cache_has_no_room_for_is_refused(stage, tmp_path):
    """Of three layers, two with an indexer: blocks of 64 tokens, one of them vLLM's own."""
    token_bytes = 3 * 576 * 2 + 2 * (128 + 4)
    most = (2 * GIB // (64 * token_bytes) - 1) * 64
    with pytest.raises(MachineError, match=f"takes a KV cache of {most + 64:,} tokens") as said:
        outcome_of(options=replace(OPTIONS, long_tokens=most))
    assert f"which is {most:,} tokens of bfloat16" in str(said.value)
    assert stage.specs == {}
    assert left_in(tmp_path) == []
    outcome_of(on=machine(2), options=replace(OPTIONS, long_tokens=most))
    assert len(stage.specs) == 3
    stage.specs.clear()
    outcome_of(options=replace(OPTIONS, long_tokens=most - 64))
    assert len(stage.specs) == 3


@pytest.mark.parametrize("scores", SCORES)
def test_the_models_have_the_scores_that_were_asked_for(stage, scores):
    outcome = outcome_of(options=replace(OPTIONS, scores=scores))
    assert [said for *_, said in stage.written] == [scores]
    assert report.as_json(outcome, machine())["scores"] == scores


def test_a_folder_called_model_keeps_its_logs_too(stage, tmp_path):
    folder = tmp_path / "model"
    one = Configuration(str(folder), 2, 1, 2, "bfloat16", "ag_rs", 0, "none", "reference")
    stage.breaks = {one.name}
    outcome = outcome_of([one])
    assert (outcome.folder / one.name / "rank0.log").exists()


def test_a_failed_baseline_is_one_case_of_several_configurations(stage):
    stage.breaks = {ONE.baseline(2).name}
    others = [Configuration("glm-5.2", 2, 1, 2, "bfloat16", "a2a", 0, "none", "reference")]
    outcome = outcome_of([ONE, *others])
    failed = [case for case in outcome.cases if not case.ok]
    assert [case.name for case in failed] == [f"{ONE.baseline(2).name}: runs"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("a bug"), SystemExit(3)])
def test_what_ends_a_run_early_leaves_no_folder(stage, tmp_path, error):
    stage.raises = error
    with pytest.raises(type(error)):
        outcome_of()
    assert left_in(tmp_path) == []


def test_a_model_that_cannot_be_made_leaves_no_folder(stage, tmp_path, monkeypatch):
    def write(*arguments, **named):
        raise UnservedModelError("no DSA model")

    monkeypatch.setattr(rehearsal, "write_checkpoint", write)
    with pytest.raises(UnservedModelError):
        outcome_of()
    assert left_in(tmp_path) == []


def test_a_full_disk_is_said(stage, tmp_path, monkeypatch):
    def write(*arguments, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rehearsal, "write_checkpoint", write)
    with pytest.raises(MachineError, match=r"cannot be written to .*No space left.*TMPDIR"):
        outcome_of()
    assert left_in(tmp_path) == []


def test_no_temporary_folder_is_said(stage, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(MachineError, match=r"no folder for the rehearsal: .*; set TMPDIR"):
        outcome_of()


@pytest.mark.parametrize(
    ("on", "said"),
    [
        (machine(nccl=(2, 29, 7)), "NCCL 2.29.7 refuses that"),
        (machine(free=20), "2 ranks on it need 24"),
    ],
)
def test_a_machine_that_cannot_is_refused_before_anything_is_written(stage, tmp_path, on, said):
    with pytest.raises(MachineError, match=said):
        outcome_of(on=on)
    assert (stage.written, left_in(tmp_path)) == ([], [])


def test_with_a_gpu_each_vllm_sizes_its_cache(stage):
    outcome = outcome_of(on=machine(gpus=2, nccl=(2, 20, 0)))
    assert not outcome.shared
    assert {(s.shared, s.kv_cache_bytes) for s, _ in stage.specs.values()} == {(False, None)}


def test_all_engines_of_a_model_serve_the_same_prompts(stage):
    outcome_of(cover("reference"), options=Options(None, 8192, None, 60.0))
    by_model = {}
    for spec, requests in stage.specs.values():
        by_model.setdefault(spec.model, []).append(requests)
    assert len(by_model) == 2
    for asked in by_model.values():
        assert all(requests == asked[0] for requests in asked)
    assert len(stage.written) == 2
    assert {topk for _, topk, _ in stage.written} == {None}


def test_a_fault_runs_alone_and_only_its_conduct_is_judged(stage):
    fault = FAULTS["kill-start"]
    stage.breaks = {ONE.name}
    outcome = outcome_of(options=Options(512, 8192, None, 60.0, fault))
    assert list(stage.specs) == [ONE.name]
    assert stage.arguments["fault"] is fault
    assert [(c.name, c.problems) for c in outcome.cases] == [(f"{ONE.name}: runs", ("it broke",))]


def test_a_soak_crowds_the_cache_and_lasts_longer(stage):
    outcome = outcome_of(options=Options(512, 8192, None, 60.0, None, 120.0))
    soaked, asked = stage.specs[ONE.name]
    assert asked.soak.seconds == 120
    assert stage.specs[ONE.baseline(1).name][1].soak is None
    # Two of the longest request, of which each rank holds a half.
    row = 4 * (576 * 2 + 128 + 4)
    assert soaked.kv_cache_bytes == 2 * 3136 * row // 2
    assert asked.generated == 64
    assert len(asked.prompts) == 24
    assert stage.arguments["engine_seconds"] == 180
    assert stage.arguments["placement"].capacity == 2, "nothing else runs beside it"
    assert outcome.ok
    assert f"{ONE.name}: memory against plan" in {case.name for case in outcome.cases}


def rendered(outcome, on):
    console = Console(width=200, record=True, markup=False, file=io.StringIO())
    console.print(report.table(outcome, on))
    for line in report.remarks(outcome):
        console.print(line)
    return console.export_text()


def test_the_table_names_the_machine_and_each_case(stage):
    outcome = outcome_of()
    text = rendered(outcome, machine())
    assert "H200; torch 2.12, vllm None" in text
    for case in outcome.cases:
        assert case.name in text
    assert text.count("good") == 5 + 1
    assert "WRONG" not in text
    assert f"{ONE.name} ran vllm_dcp_mla.backends.trtllm.Impl (reference)." in text
    assert "5 of 5 cases are good, in " in text
    assert f"{ONE.name}: memory against plan: compared to the byte: " in text


def test_the_table_says_what_is_wrong_and_where_the_logs_are(stage):
    stage.breaks = {ONE.name}
    outcome = outcome_of()
    text = rendered(outcome, machine())
    assert f"{ONE.name}: runs: it broke" in text
    assert f"{ONE.name} did not run." in text
    assert f"The logs are in {outcome.folder}." in text
    assert "0 of 1 cases are good" in text
    assert "WRONG" in text


def test_json_is_strict_and_has_its_keys(stage):
    stage.drifts = 0.0  # and yet the baselines have noise
    on = machine()
    said = json.loads(json.dumps(report.as_json(outcome_of(), on), allow_nan=False))
    assert set(said) >= {"ok", "problems", "machine", "engines", "not_rehearsed", "cases", "logs"}
    keys = {"name", "ok", "error", "limit", "collectives", "syncs", "late_compiles", "seconds"}
    assert all(set(case) >= keys for case in said["cases"])
    assert said["ok"] is True
    assert said["machine"]["nccl"] == [2, 30, 3]
    assert said["engines"][ONE.name]["kv_tokens"] == 640


def test_json_names_the_problems_and_logs_of_a_bad_run(stage):
    stage.breaks = {ONE.name}
    said = report.as_json(outcome_of(), machine())
    assert (said["ok"], said["problems"], said["logs"]) == (False, ["it broke"], str(stage.folder))
    assert said["engines"][ONE.name] == {"ran": None, "seconds": 3.0}


def test_memory_that_differs_is_named(stage, monkeypatch):
    real = stage.run

    def run(specs, folder, **arguments):
        results = real(specs, folder, **arguments)
        results[ONE.name].ranks[1]["held"]["lines"]["block_tables"] += 4
        return results

    monkeypatch.setattr(rehearsal.schedule, "run", run)
    said = report.as_json(outcome_of(), machine())
    (problem,) = said["problems"]
    assert problem.startswith("runner's block tables (block_tables): rank 1 holds ")
    (case,) = [case for case in said["cases"] if not case["ok"]]
    (line,) = [line for line in case["lines"] if line["key"] == "block_tables"]
    assert list(line["held"]) == [line["planned"], line["planned"] + 4]


def test_what_was_not_rehearsed(stage):
    said = report.not_rehearsed(outcome_of())
    assert len(said) == 5
    for word in (
        *("external_launcher", "MTP", "VLLM_USE_DIRECT_DCP_A2A", "trtllm-gen's cubins"),
        "Transformers is too old.",
    ):
        assert sum(word in sentence for sentence in said) == 1


def test_a_gpu_each_rehearses_more(stage):
    said = report.not_rehearsed(outcome_of(on=machine(gpus=2)))
    assert not any("shared a GPU" in sentence for sentence in said)


def test_late_compilations_of_stocks_are_told(stage, monkeypatch):
    real = stage.run

    def run(specs, folder, **arguments):
        results = real(specs, folder, **arguments)
        results[ONE.name].ranks[0]["late_compiles"] = [["vllm", "k (Triton, vllm.x:1)"]]
        return results

    monkeypatch.setattr(rehearsal.schedule, "run", run)
    outcome = outcome_of()
    assert outcome.ok
    lines = report.remarks(outcome)
    assert f"{ONE.name} compiled while serving: vllm: k (Triton, vllm.x:1)." in lines


@pytest.mark.parametrize("scores", ["normal", "heavy"])
def test_other_scores_than_usual_are_told(stage, scores):
    lines = report.remarks(replace(outcome_of(), scores=scores))
    assert ("Indexers' scores were heavy." in lines) == (scores == "heavy")
