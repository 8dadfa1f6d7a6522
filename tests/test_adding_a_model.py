"""docs/adding_a_model.md is followed to the letter, on a copy of the sources without that model."""

from __future__ import annotations

import re
import shutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_adding_an_op import ROOT, copy_sources, run

from infinicore import _native
from infinilm.checkpoint import CheckpointError
from infinilm.models import registry
from infinilm.models.gguf import GGUF

GUIDE = (ROOT / "docs" / "adding_a_model.md").read_text()
THE_FILE = GUIDE[GUIDE.index("## 2.") : GUIDE.index("## 3.")]
MODEL = "infinilm/models/olmo2.py"
ADDED = re.findall(r"```diff\n--- (\S+)\n(.*?)```", GUIDE, re.DOTALL)


def written() -> str:
    blocks = re.findall(r"```python\n(.*?)```", THE_FILE, re.DOTALL)
    return "\n\n\n".join(block.strip("\n") for block in blocks)


def lines_of(hunk: str) -> list[str]:
    return [line[1:] for line in hunk.splitlines()]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources, with the model as the guide has it"""
    copy_sources(tmp_path)
    shutil.copy(_native.__file__, tmp_path / "infinicore")
    (tmp_path / MODEL).write_text(written() + "\n")
    return tmp_path


def proof(copy: Path, which: str) -> tuple[int, str]:
    facts = "tests/test_models.py", "tests/test_models_gguf.py", "-k", which
    result = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *facts)
    return result.returncode, result.stdout


def test_the_blocks_of_the_guide_are_the_file_of_the_model() -> None:
    assert written() == (ROOT / MODEL).read_text().rstrip()


@pytest.mark.parametrize("name, hunk", ADDED)
def test_what_the_guide_adds_stands_in_the_files_it_names(name: str, hunk: str) -> None:
    found = (ROOT / name).read_text().splitlines()
    assert lines_of(hunk) and all(line in found for line in lines_of(hunk))


def test_a_model_that_is_not_registered_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in registry.FILES:
        import_module(f"infinilm.models.{name}")
    others = [
        entry for entry in registry.ENTRIES if "olmo2" not in entry.model_class.config_class.model_types
    ]
    monkeypatch.setattr(registry, "ENTRIES", others)
    with pytest.raises(CheckpointError, match="model_type 'olmo2' is unknown; expected one of .*'olmoe'"):
        registry.entry_of(SimpleNamespace(path="x", is_gguf=False, config={"model_type": "olmo2"}))


@pytest.mark.parametrize(
    "llama",
    [
        SimpleNamespace(path="x", is_gguf=False, config={"model_type": "llama"}),
        SimpleNamespace(path="x", is_gguf=True, metadata={"general.architecture": "llama"}),
    ],
    ids=["folder", "gguf"],
)
def test_a_class_that_is_registered_later_takes_the_place_of_another(
    llama: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = registry.entry_of(llama)
    monkeypatch.setattr(registry, "ENTRIES", [*registry.ENTRIES])
    mine = registry.register(GGUF("llama"))(type("Mine", (before.model_class,), {}))
    assert registry.entry_of(llama).model_class is mine is not before.model_class
    registry.ENTRIES.append(before)  # as where a file of this folder is imported later
    assert registry.entry_of(llama).model_class is mine


def test_the_model_that_the_guide_writes_passes_its_proof(copy: Path) -> None:
    code, said = proof(copy, "olmo2 and (portable or folder) and not biases")
    assert code == 0 and " passed" in said, said
