"""docs/adding_a_model.md is followed to the letter, on a copy of the sources without that model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from test_adding_an_op import ROOT, SOURCES, run

from infinicore import _native

GUIDE = (ROOT / "docs" / "adding_a_model.md").read_text()
THE_FILE = GUIDE[GUIDE.index("## 2.") : GUIDE.index("## 3.")]
MODEL = "infinilm/models/olmo2.py"
ADDED = re.findall(r"```diff\n--- (\S+)\n(.*?)```", GUIDE, re.DOTALL)


def written() -> str:
    return "\n\n\n".join(
        block.strip("\n") for block in re.findall(r"```python\n(.*?)```", THE_FILE, re.DOTALL)
    )


def lines_of(hunk: str) -> list[str]:
    return [line[1:] for line in hunk.splitlines()]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources without the model, and then as the guide leaves them"""
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, tmp_path / name)
    shutil.copy(_native.__file__, tmp_path / "infinicore")
    (tmp_path / MODEL).write_text(written() + "\n")
    return tmp_path


def test_the_blocks_of_the_guide_are_the_file_of_the_model() -> None:
    assert written() == (ROOT / MODEL).read_text().rstrip()


@pytest.mark.parametrize("name, hunk", ADDED)
def test_what_the_guide_adds_stands_in_the_files_it_names(name: str, hunk: str) -> None:
    found = (ROOT / name).read_text().splitlines()
    assert lines_of(hunk) and all(line in found for line in lines_of(hunk))


def test_without_its_line_in_the_registry_the_model_is_refused_by_name(copy: Path) -> None:
    registry = copy / "infinilm" / "models" / "registry.py"
    lines = [
        line for line in registry.read_text().splitlines() if line not in ('    "olmo2",', '    "olmoe",')
    ]
    registry.write_text("\n".join(lines))
    result = run(
        copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_models.py", "-k", "olmo2 and greedy"
    )
    assert result.returncode == 1 and "model_type 'olmo2' is unknown; expected one of" in result.stdout


def test_the_model_that_the_guide_writes_passes_its_proof(copy: Path) -> None:
    facts = "tests/test_models.py", "tests/test_models_gguf.py", "-k", "olmo2 and (greedy or folder)"
    result = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *facts)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout
