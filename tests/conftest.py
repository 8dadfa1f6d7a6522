"""What several test files share: the levels of the native core, its threads, models and their servers."""

from __future__ import annotations

import gc
import logging
import os
import platform
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from infinilm import hub

if TYPE_CHECKING:  # with torch, which not every test needs
    import torch
    from engines import Tiny
    from servers import Running
    from warm import RunPython, StartPython

    from infinilm import LLM
    from infinilm.tokenizer import Tokenizer

# Where several processes share out the tests, each has one thread, and so have the programs it starts; and
# those hear an interrupt, which the processes themselves are made to ignore.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("INFINICORE_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Programs that tests start buffer what they write, as those of users do.
os.environ.pop("PYTHONUNBUFFERED", None)

# What CMakeLists.txt compiles, from the plainest to the fastest; a CPU may lack the last ones.
LEVELS = {
    "x86_64": ("portable", "avx2", "avx512", "amx"),
    "aarch64": ("portable", "neon", "i8mm"),
    "arm64": ("portable", "neon", "i8mm"),
}.get(platform.machine(), ("portable",))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the engine's tests run: cpu, cuda, cuda:1 ...")


def pytest_configure(config: pytest.Config) -> None:
    """What is said of a CPU is tried on one where there is a GPU too; tests that need a GPU are asked for."""
    device = os.environ["INFINILM_TEST_DEVICE"] = config.getoption("--device")  # engines.py reads it
    if device == "cpu" and "not gpu" in config.getoption("-m"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


# Begun first where several processes share out the files, the longest before all, so that none is left alone
# with one at the end
LONG = """
    benchmarks cli page invariance default_model grammar ops tools server engine process abuse hostile_files
    models lora serve_command chat_templates experts threads matmul adding_a_model engine_models sentencepiece
    operation openapi load anthropic quantize_at_load batch_files tokenizer readme responses llama attention
    adding_an_op async_llm
"""
PLACE = {f"test_{name}": place for place, name in enumerate(LONG.split())}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing of what tests import is garbage, which it would take seconds to find out."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: PLACE.get(item.path.stem, len(PLACE)))


@contextmanager
def at_level(name: str) -> Iterator[None]:
    from infinicore import _native

    if name not in _native.isa_levels():
        pytest.skip(f"this CPU has no {name}")
    before = _native.isa()
    _native.set_isa(name)
    try:
        yield
    finally:
        _native.set_isa(before)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once at each level of the build."""
    with at_level(request.param):
        yield request.param


@pytest.fixture
def is_best(level: str) -> bool:
    """Whether this is the level that callers get here; what is costly need not run at the others too."""
    from infinicore import _native

    return level == _native.isa_levels()[-1]


@contextmanager
def same_threads() -> Iterator[None]:
    """As many as before in the end, of ours and of torch's"""
    import torch

    import infinicore

    before = infinicore.get_num_threads(), torch.get_num_threads()
    yield
    infinicore.set_num_threads(before[0])
    torch.set_num_threads(before[1])


@pytest.fixture
def keep_threads() -> Iterator[None]:
    """The test may change the number of threads."""
    with same_threads():
        yield


@pytest.fixture(scope="module", autouse=True)
def leave_threads() -> Iterator[None]:
    """Threads of torch spin while they wait: those that a file left behind would slow down all after it."""
    with same_threads() if "torch" in sys.modules else nullcontext():
        yield


@pytest.fixture(scope="session")
def start_python() -> Iterator[StartPython]:
    """A program of its own, which may fork and bound itself: one that has run parallel torch code may not."""
    from warm import warm_python

    with warm_python() as start:
        yield start


@pytest.fixture(scope="session")
def run_python(start_python: StartPython) -> RunPython:
    """The same, to its end"""
    from warm import run_to_the_end

    return partial(run_to_the_end, start_python)


@pytest.fixture
def logs_as_before() -> Iterator[None]:
    """A process sets up its logs, which outlive it here."""
    loggers = {logger: logger.level for logger in (logging.getLogger(), logging.getLogger("uvicorn"))}
    handlers = list(logging.getLogger().handlers)
    yield
    for logger, level in loggers.items():
        logger.setLevel(level)
    logging.getLogger().handlers[:] = handlers


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """What is tiny runs on one thread: several would wait for each other longer than they work."""
    import torch

    import infinicore

    with same_threads():
        infinicore.set_num_threads(1)
        torch.set_num_threads(1)
        yield


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    return hub.resolve(None)


@pytest.fixture(scope="session")
def default_model_metadata(default_model_path: Path) -> dict[str, Any]:
    from infinilm.checkpoint import open_checkpoint

    return open_checkpoint(default_model_path).metadata


@pytest.fixture(scope="session")
def smollm(default_model_metadata: dict[str, Any]) -> Tokenizer:
    """The built-in model's tokenizer"""
    from infinilm.tokenizer import Tokenizer

    return Tokenizer.from_gguf(default_model_metadata)


# ---- a tiny model and its server, which a test file may have of its own ------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that takes long prompts"""
    from engines import LONG_LENGTH, write_model

    return write_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=LONG_LENGTH)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Tiny:
    """The parts of an engine over a tiny model"""
    from engines import Tiny

    return Tiny.at(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def record_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps of a test come often enough to be recorded, but most shall be."""
    from infinilm import runner

    monkeypatch.setattr(runner, "RECORDED_AT", 1)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    from engines import DEVICE

    from infinilm import LLM

    return LLM(folder, kv_cache_memory="32MB", device=DEVICE)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    from servers import running

    with running(folder) as made:
        yield made


@pytest.fixture
def idle(server: Running) -> Iterator[Running]:
    """The server, on which the test must leave nothing"""
    yield server
    server.check_idle()


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose template knows of thoughts"""
    from engines import write_model
    from servers import THINKING_TEMPLATE, running

    with running(write_model(tmp_path_factory.mktemp("thinker"), chat_template=THINKING_TEMPLATE)) as made:
        yield made


# ---- tiny models of transformers ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Path]]:
    """(transformers' model, the folder it was saved to)"""
    from parity import write_theirs

    def made(kind: str, *dtype: torch.dtype, **options: Any) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(kind)
        return write_theirs(folder, kind, *dtype, **options), folder

    return made


@pytest.fixture(scope="module")
def known(make: Callable[..., tuple[Any, Path]]) -> Callable[..., tuple[Any, Path]]:
    """The same, made once for all tests of a file, which leave it as it is"""
    made: dict[tuple[str, str], tuple[Any, Path]] = {}

    def find(kind: str, **options: Any) -> tuple[Any, Path]:
        key = kind, repr(options)
        if key not in made:
            made[key] = make(kind, **options)
        return made[key]

    return find
