"""The machine that is measured: its name, its threads, and the folder of what was found on it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import infinicore

RESULTS = Path(__file__).parent / "results"
# What a virtual machine calls "Intel(R) Xeon(R) Processor", by vendor, family and model, or on Arm by
# implementer and part. A model that is left out stands for all of its family.
MICROARCHITECTURES = {
    ("GenuineIntel", "6", "85"): "Skylake",
    ("GenuineIntel", "6", "106"): "Ice Lake",
    ("GenuineIntel", "6", "143"): "Sapphire Rapids",
    ("GenuineIntel", "6", "207"): "Emerald Rapids",
    ("AuthenticAMD", "25"): "Zen 3",
    ("AuthenticAMD", "26"): "Zen 5",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
}
SUCCESSORS = {"Skylake": ("avx512_vnni", "Cascade Lake"), "Zen 3": ("avx512f", "Zen 4")}  # told by a flag


def arguments(about: str | None) -> argparse.ArgumentParser:
    """A parser with the option that all benchmarks have"""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    told = "of each contender (default: %(default)s, as many as this process may use CPUs)"
    parser.add_argument("--threads", type=int, default=infinicore.get_num_threads(), help=told)
    return parser


def machine(num_threads: int) -> dict[str, str]:
    cpu = f"{cpu_name()} ({platform.machine()}, {infinicore._native.isa()})"
    return {
        "CPU": f"{cpu}, {os.cpu_count()} cores, {num_threads} threads each",
        "versions": ", ".join(f"{package} {version(package)}" for package in ("infinilm", "torch")),
    }


def folder(num_threads: int) -> Path:
    """Of this CPU's results at its level with so many threads"""
    return RESULTS / f"{short(cpu_name())}-{infinicore._native.isa()}-{num_threads}"


def cpu_name() -> str:
    """Of its microarchitecture, or what the system calls it"""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    listed = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    named = re.search(r"^Model name:\s*(.+)", listed, re.MULTILINE)
    return microarchitecture(info.read_text()) or (named[1] if named else platform.machine())


def microarchitecture(cpuinfo: str) -> str | None:
    """Of the first CPU in /proc/cpuinfo, if it is one of those we know"""
    fields = dict(re.findall(r"^(.+?)[ \t]*: ?(.*)$", cpuinfo.partition("\n\n")[0], re.MULTILINE))
    x86 = [fields.get(name, "") for name in ("vendor_id", "cpu family", "model")]
    arm = [fields.get(name, "") for name in ("CPU implementer", "CPU part")]
    known = (MICROARCHITECTURES.get(tuple(key)) for key in (x86, x86[:2], arm))
    name = next(filter(None, known), None)
    flag, successor = SUCCESSORS.get(name or "", ("", name))
    return successor if flag in fields.get("flags", "").split() or not flag else name


def short(name: str) -> str:
    """As part of a folder's name: `NVIDIA H200` becomes `h200`."""
    plain = re.sub(r"\(.*?\)|@.*|\b(CPU|Processor|NVIDIA|[\w-]+-Core)\b", " ", name)
    return "-".join(re.findall(r"[a-z0-9.]+", plain.lower()))


def write(stem: Path, content: dict[str, Any], text: str) -> None:
    """As JSON and Markdown"""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)
