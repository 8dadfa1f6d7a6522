"""docs/adding_an_op.md is followed to the letter, on a copy of the sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infinicore import _native

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "adding_an_op.md").read_text()
HUNK = re.compile(r"```diff\n--- (\S+)\n(.*?)```", re.DOTALL)
SOURCES = ("infinicore", "infinilm", "csrc", "tests", "CHANGELOG.md", "CMakeLists.txt", "pyproject.toml")


def apply(root: Path, name: str, hunk: str) -> None:
    """Lines of the file, in one place, become what the guide makes of them."""
    lines = hunk.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] != "+")
    after = "".join(line[1:] for line in lines if line[0] != "-")
    text = (root / name).read_text()
    assert text.count(before) == 1, f"{name} has {text.count(before)} places for:\n{before}"
    (root / name).write_text(text.replace(before, after))


def copy_sources(folder: Path) -> Path:
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.so"))
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources as the guide leaves them"""
    copy_sources(tmp_path)
    for name, hunk in HUNK.findall(GUIDE):
        apply(tmp_path, name, hunk)
    return tmp_path


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python on the copy, with the packages of this environment but not this project's own"""
    paths = [str(copy), *(path for path in sys.path if path.endswith("-packages"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-S", "-P", *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


def test_the_guide_names_eight_files_at_most() -> None:
    assert 0 < len({name for name, _ in HUNK.findall(GUIDE)}) <= 8


def test_the_python_steps_give_an_op_that_runs_and_its_pins_hold(copy: Path) -> None:
    """With the native core as it is, which does not know the op: the reference runs."""
    shutil.copy(_native.__file__, copy / "infinicore")
    facts = "tests/test_public_names.py", "tests/test_functional.py", "-k", "relu_squared or names or every"
    result = run(copy, "-m", "pytest", "-v", "-p", "no:cacheprovider", *facts)
    assert result.returncode == 0 and "test_relu_squared_is_the_square" in result.stdout, result.stdout


@pytest.mark.slow
def test_the_whole_guide_gives_a_kernel_that_passes_the_tests_of_every_op(copy: Path) -> None:
    """Compiled at the portable level alone, which takes about a minute."""
    tools = Path(sys.executable).parent
    configure = [tools / "cmake", "-S", ".", "-B", "build", "-G", "Ninja", "-DINFINICORE_LEVELS=portable"]
    places = [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    subprocess.run([*configure, *places], cwd=copy, check=True, capture_output=True)
    subprocess.run([tools / "cmake", "--build", "build"], cwd=copy, check=True, capture_output=True)
    shutil.copy(next((copy / "build").glob("_native*.so")), copy / "infinicore")
    result = run(
        copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_ops.py", "-k", "relu_squared"
    )
    assert result.returncode == 0 and "passed" in result.stdout, result.stdout
