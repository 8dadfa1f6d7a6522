"""What README and docs say about the repository is true of it."""

import builtins
import re
import shlex
import shutil
import subprocess
import symtable
import venv
from pathlib import Path

import pytest
from loras import tensors_for, write_adapter

from infinilm import cli, load_model
from infinilm.cli import batch, bench, chat, generate, info, serve

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
README = (ROOT / "README.md").read_text()


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def source_files() -> set[str]:
    files = (
        path
        for package in ("csrc", "infinicore", "infinilm", "benchmarks")
        for path in (ROOT / package).rglob("*")
    )
    return {name_of(path) for path in files if path.suffix in (".py", ".cpp", ".h", ".cu")}


def file_map() -> dict[str, str]:
    """Path to phrase, of each line under `File map`: an indented name stands in the folder above it."""
    lines = README.partition("## File map")[2].split("```")[1].strip().splitlines()
    folder, found = "", {}
    for line in lines:
        name, phrase = line.split(maxsplit=1)
        folder = folder if line.startswith(" ") else name
        found[folder + name if line.startswith(" ") else name] = phrase
    return found


def blocks(page: Path, language: str = "") -> list[str]:
    """The page's blocks of code in one language; those of shell have none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [content for name, content in found if name == language]


def run_example(page: Path, containing: str) -> None:
    """Run the one block of Python of a page that contains this text."""
    (example,) = (block for block in blocks(page, "python") if containing in block)
    exec(example, {})


def commands(page: Path) -> list[str]:
    """What a page has callers type after `infinilm`."""
    lines = "".join(blocks(page)).splitlines()
    found = (re.match(r"(?:\$ )?(?:[^#]*\| )?infinilm ([^#]+)", line) for line in lines)
    return [match[1] for match in found if match]


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The fragments GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_file_map_lists_every_source_file() -> None:
    assert sorted(source_files() - file_map().keys()) == []


def test_file_map_lists_nothing_that_is_absent() -> None:
    assert [path for path in file_map() if not (ROOT / path).exists()] == []


def test_start_with_infinicore_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_example(ROOT / "README.md", "import infinicore")
    assert "(3, 100) logits" in capsys.readouterr().out


def test_start_with_infinilm_runs(default_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_example(ROOT / "README.md", "LLM()")
    answer, counted = capsys.readouterr().out.split("\n", 1)
    assert "Paris" in answer and "four, five, six" in counted


def test_many_requests_at_once_run(default_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_example(ROOT / "README.md", "StructuredOutputsParams")
    assert capsys.readouterr().out.splitlines()[-1] in ("yes", "no")


def test_the_example_of_coroutines_runs(default_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_example(ROOT / "README.md", "AsyncLLM")
    assert "four" in capsys.readouterr().out


def test_the_example_of_adapters_runs(
    default_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, _ = load_model(default_model_path)
    (tmp_path / "adapters").mkdir()
    write_adapter(tmp_path / "adapters" / "poet", tensors_for(model))
    monkeypatch.chdir(tmp_path)
    run_example(ROOT / "README.md", "LoRARequest")
    first, *rest = capsys.readouterr().out.splitlines()
    assert rest and first not in rest


def test_reading_a_checkpoint_runs(default_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_example(ROOT / "docs" / "checkpoints.md", "open_checkpoint")
    assert "QuantizedTensor(Q4_1" in capsys.readouterr().out


WHOLE = [ROOT / name for name in ("README.md", "docs/checkpoints.md", "docs/package.md", "docs/rbe.md")]


@pytest.mark.parametrize("block", [block for page in WHOLE for block in blocks(page, "python")])
def test_a_block_of_python_imports_what_it_uses(block: str) -> None:
    table = symtable.symtable(block, "block", "exec")
    bound = {
        symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()
    }
    used = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    assert used - bound - set(dir(builtins)) == set()


def test_commands_of_the_readme_are_understood() -> None:
    parsed = [cli.parser().parse_args(shlex.split(command)) for command in commands(ROOT / "README.md")]
    assert {options.run for options in parsed} == {
        *(command.run for command in (generate, chat, info, batch, serve)),
        *(bench.run_latency, bench.run_throughput, bench.run_load),
    }


def test_readme_names_only_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", README, re.MULTILINE)) <= targets


def test_setup_gives_an_environment_without_pip_what_it_lacks(tmp_path: Path) -> None:
    """As Python leaves one behind where a system keeps ensurepip in a package of its own"""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    venv.create(tmp_path / ".venv", with_pip=False)
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" > asked; test $1 = -c\n')
    (tmp_path / "python").chmod(0o755)
    subprocess.run(["make", ".venv/.runtime", "PYTHON=./python"], cwd=tmp_path, capture_output=True)
    assert (tmp_path / "asked").read_text() == "-m venv .venv\n"


@pytest.mark.parametrize("programs", [["python"], ["python", ".venv/bin/python", ".venv/bin/pip"]])
def test_setup_says_that_a_python_is_too_old_and_leaves_all_as_it_was(
    programs: list[str], tmp_path: Path
) -> None:
    """What it made, the next try with another Python would take for its own; what was there is the user's."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    for name in programs:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    before = sorted(tmp_path.rglob("*"))
    result = subprocess.run(
        ["make", ".venv/.runtime", "PYTHON=./python"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 2 and "Python 3.11 or later is needed" in result.stdout
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = [link for link in re.findall(r"\]\(([^)]+)\)", prose(page)) if "://" not in link]
    for target in targets:
        path, _, fragment = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not fragment or fragment in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:csrc|infinicore|infinilm|tests|examples|benchmarks|docs)/[\w/.]+)`", page.read_text()
    )
    assert [name for name in named if not (ROOT / name).exists()] == []
