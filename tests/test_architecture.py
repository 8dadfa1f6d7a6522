"""The rules of docs/architecture.md that a parser can check."""

import ast
import re
import subprocess
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for package in ("infinicore", "infinilm") for path in (ROOT / package).rglob("*.py"))

# The parts of infinilm, from the top down; a part imports only parts of later rows.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("__init__",),
    ("batch_files", "bench"),
    ("load",),
    ("server",),
    ("async_llm",),
    ("llm",),
    ("arguments", "startup"),
    ("engine",),
    ("models",),
    ("generation",),
    ("runner",),
    ("recording",),
    ("adapters", "cache", "latest", "tables", "work"),
    ("draw",),
    ("batch",),
    ("checkpoint", "hub", "sampling", "tokenizer"),
    ("config", "folder", "parcels"),
    ("progress", "rope", "whole_file"),
    ("values", "elsewhere"),
)
ROW = {part: row for row, parts in enumerate(LAYERS) for part in parts}

# Where a library may be imported; nowhere means that it serves tests and benchmarks alone.
HOMES = {
    "safetensors": "infinilm/checkpoint/huggingface.py",
    "tokenizers": "infinilm/tokenizer/",
    "jinja2": "infinilm/tokenizer/",
    "huggingface_hub": "infinilm/hub.py",
    "llguidance": "infinilm/engine/grammar",
    "starlette": "infinilm/server/",
    "uvicorn": "infinilm/server/",
    "pydantic": "infinilm/server/",
    "prometheus_client": "infinilm/server/",
    "matplotlib": "infinilm/load/",
    "triton": ("infinicore/ops/triton/", "infinicore/ops/hopper/"),
    "cuda": "infinicore/ops/hopper/",
    "transformers": "nowhere",
    "peft": "nowhere",
    "gguf": "nowhere",
    "llama_cpp": "nowhere",
}
# What makes tensors on torch's default device unless it is told of another
MAKERS = re.compile(
    r"torch\.(arange|as_tensor|asarray|empty|empty_permuted|empty_strided|eye|full|linspace|logspace|ones|rand"
    r"|randint|randn|randperm|scalar_tensor|tensor|zeros)"
)
UNSAFE_LOADS = {"torch.load", "torch.jit.load", "torch.serialization.load"}
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> set[str]:
    """Every dotted name the file imports, also inside functions: `from a import b` gives a.b."""
    package = name_of(path.parent).replace("/", ".")
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def libraries(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def part_of(name: str) -> str:
    """The part of infinilm that a dotted name belongs to; a name of the package itself is at the top."""
    part = name.removeprefix("infinilm").lstrip(".").partition(".")[0]
    return part if part in ROW else "__init__"


def parts_of_infinilm() -> set[str]:
    return {
        path.relative_to(ROOT / "infinilm").parts[0].removesuffix(".py") for path in sources_of("infinilm")
    }


def sources_of(package: str) -> list[Path]:
    return [path for path in SOURCES if name_of(path).startswith(package + "/")]


def test_infinicore_does_not_know_infinilm() -> None:
    assert [name_of(path) for path in sources_of("infinicore") if "infinilm" in libraries(path)] == []


def test_every_part_of_infinilm_has_its_layer() -> None:
    assert parts_of_infinilm() <= ROW.keys()


def test_imports_of_infinilm_go_down_only() -> None:
    assert {name_of(path): found for path in sources_of("infinilm") if (found := parts_above(path))} == {}


def parts_above(path: Path) -> list[str]:
    """Those that the file imports though they stand above it, or beside"""
    own = path.relative_to(ROOT / "infinilm").parts[0].removesuffix(".py")
    used = {part_of(name) for name in imports(path) if name.partition(".")[0] == "infinilm"} - {own}
    return [part for part in used if ROW[part] <= ROW[own]]


@pytest.mark.parametrize("library", HOMES)
def test_library_is_imported_at_its_home_only(library: str) -> None:
    users = [name_of(path) for path in SOURCES if library in libraries(path)]
    assert [user for user in users if not user.startswith(HOMES[library])] == []


def test_only_the_bindings_know_python_and_nothing_native_knows_torch() -> None:
    includes = re.compile(r'^\s*#\s*include\s*[<"](Python\.h|nanobind|pybind11|torch|ATen|c10)', re.MULTILINE)
    users = {
        (path.name, header)
        for path in (ROOT / "csrc").iterdir()
        for header in includes.findall(path.read_text())
    }
    assert users == {("bindings.cpp", "nanobind"), ("binding_tensors.h", "nanobind")}


def test_no_check_is_an_assert_which_python_would_drop_under_its_o_flag() -> None:
    asserts = [
        (name_of(path), node) for path in SOURCES for node in nodes(path) if isinstance(node, ast.Assert)
    ]
    assert [f"{name}:{node.lineno}" for name, node in asserts] == []


def test_nothing_is_unpickled() -> None:
    assert {name_of(path): found for path in SOURCES if (found := unsafe_names(path))} == {}


def unsafe_names(path: Path) -> set[str]:
    """What the file uses of all that unpickles"""
    loads = [node for node in nodes(path) if isinstance(node, ast.Attribute) and node.attr == "load"]
    used = {ast.unparse(node) for node in loads} | imports(path)
    arguments = {node.arg for node in nodes(path) if isinstance(node, ast.keyword) and node.arg}
    return used & UNSAFE_LOADS | libraries(path) & UNSAFE_MODULES | arguments & {"allow_pickle"}


def test_the_engine_says_of_every_tensor_where_it_is_made() -> None:
    """Callers may have set a default device, which is for their own tensors and for layers"""
    assert {name_of(path): found for path in sources_of("infinilm") if (found := unplaced(path))} == {}


def unplaced(path: Path) -> list[int]:
    """The lines that leave to torch where a tensor lies that is no parameter of a layer"""
    calls = [node for node in nodes(path) if isinstance(node, ast.Call)]
    held = [call.args[0] for call in calls if ast.unparse(call.func) == "nn.Parameter"]
    made = [call for call in calls if MAKERS.fullmatch(ast.unparse(call.func)) and call not in held]
    return [call.lineno for call in made if "device" not in {word.arg for word in call.keywords}]


def shared_symbols(objects: Path, level: str) -> list[str]:
    """What the linker may take from this level for another: of weak definitions it keeps one for all."""
    files = sorted(objects.rglob("*.o"))
    listing = subprocess.run(["nm", "-C", *files], capture_output=True, text=True, check=True).stdout
    weak = [line.split(maxsplit=2)[2] for line in listing.splitlines() if re.match(r"\w+ [WVu] ", line)]
    return [name for name in weak if f"infini::{level}::" not in name and "__gxx_personality" not in name]


def test_no_code_compiled_for_one_instruction_set_is_linked_into_another() -> None:
    folders = [path for path in (ROOT / "build").rglob("kernels_*.dir") if any(path.rglob("*.o"))]
    assert folders, "no compiled kernels under build/: run make setup"
    for folder in folders:
        level = folder.name.removeprefix("kernels_").removesuffix(".dir")
        assert not shared_symbols(folder, level), folder
