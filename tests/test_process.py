"""The process around a model: how it begins, is forked and hears Ctrl-C, and that at rest it uses no CPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from infinicore import _native
from infinicore.ops import native
from infinilm import LLM, SamplingParams
from infinilm.config import LlamaConfig
from infinilm.generation import chunk_length

LONG_PROMPT = "word " * 7000

# Prints how long after the signal the interrupt was felt.
INTERRUPTED = """
import signal, sys, threading, time
from infinilm import LLM, SamplingParams

llm = LLM(sys.argv[1])
sent = []

def interrupt():
    sent.append(time.perf_counter())
    signal.raise_signal(signal.SIGINT)

threading.Timer(float(sys.argv[2]), interrupt).start()
try:
    next(llm.stream([1000] * 8000, SamplingParams(max_tokens=1)))
except KeyboardInterrupt:
    print(time.perf_counter() - sent[0])
"""


def test_an_interrupt_is_heard_in_the_midst_of_a_long_prompt(default_model_path: Path) -> None:
    for delay in ("0.5", "3.3"):
        command = [sys.executable, "-c", INTERRUPTED, str(default_model_path), delay]
        child = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert child.returncode == 0, child.stderr
        assert float(child.stdout) < 0.2


@contextmanager
def reading_a_long_prompt(model: Path) -> Iterator[subprocess.Popen[str]]:
    """`infinilm generate`, once it computes: what takes it this much CPU time can only be the prompt."""
    code = "import sys; from infinilm.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "generate", "-", "--raw", "--model", str(model)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as child:  # type: ignore[call-overload]
        child.stdin.write(LONG_PROMPT)
        child.stdin.close()
        process, deadline = psutil.Process(child.pid), time.monotonic() + 100
        while sum(process.cpu_times()[:2]) < 9 and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        yield child
        child.kill()


def test_ctrl_c_ends_the_command_with_130_and_no_traceback(default_model_path: Path) -> None:
    with reading_a_long_prompt(default_model_path) as child:
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=5) == 130
        assert child.stderr is not None and child.stderr.read() == ""


def test_large_models_and_batches_are_fed_fewer_tokens_at_once() -> None:
    small, large = (
        LlamaConfig(
            vocab_size=8, num_hidden_layers=1, num_attention_heads=8, hidden_size=h, intermediate_size=i
        )
        for h, i in ((576, 1536), (2048, 8192))
    )
    assert chunk_length(small, 1, torch.device("cpu")) == chunk_length(large, 1, torch.device("meta")) == 512
    assert (
        chunk_length(large, 1, torch.device("cpu")) == 128 == 8 * chunk_length(large, 8, torch.device("cpu"))
    )


def test_at_rest_the_process_uses_no_cpu(default_model_path: Path) -> None:
    llm = LLM(default_model_path)
    llm.generate("One, two,", SamplingParams(temperature=0.0, max_tokens=4))
    time.sleep(0.05)  # workers spin for less than a millisecond, then park
    before = time.process_time()  # of all threads
    time.sleep(0.5)
    assert time.process_time() - before < 0.02


# Forks while torch's threads are there and another thread is inside a region of our own; each child prints.
FORKING = """
import os, sys, threading, torch
from infinilm import LLM, SamplingParams

llm, params = LLM(sys.argv[1]), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

def tokens():
    return llm.generate("One, two,", params)[0].outputs[0].token_ids

def large_products():
    return float((torch.ones(700, 700) @ torch.ones(700, 700)).sin().sum())

wanted, stop = (tokens(), large_products()), threading.Event()
def keep_busy():
    while not stop.is_set():
        tokens()

other = threading.Thread(target=keep_busy)
other.start()
for _ in range(4):
    if os.fork() == 0:
        print((tokens(), large_products()) == wanted, flush=True)
        os._exit(0)
    os.wait()
stop.set()
other.join()
"""


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process group of its own, so that what it forked goes with it if it hangs."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def test_forked_processes_compute_what_their_parent_does(default_model_path: Path) -> None:
    assert run_python(FORKING, str(default_model_path)).stdout.split() == ["True"] * 4


@pytest.mark.parametrize("count", ["abc", "0", "-1", "1e3", "99999999", "9" * 5000, " 2", "²"])
def test_a_number_of_threads_that_is_none_is_refused(count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINICORE_NUM_THREADS", count)
    wanted = f"INFINICORE_NUM_THREADS must be a whole number from 1 to 1024, but is {count!r}"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        native.use_environment()


def test_a_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINICORE_ISA", "abc")
    with pytest.raises(ValueError, match="INFINICORE_ISA.*'portable'.*'abc'"):
        native.use_environment()


def test_empty_variables_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.get_num_threads(), _native.isa()
    monkeypatch.setenv("INFINICORE_NUM_THREADS", "")
    monkeypatch.setenv("INFINICORE_ISA", "")
    native.use_environment()
    assert (native.get_num_threads(), _native.isa()) == before


def test_the_environment_is_read_when_the_core_is_imported() -> None:
    code = "import infinicore; print(infinicore.get_num_threads(), infinicore._native.isa())"
    assert run_python(code, INFINICORE_NUM_THREADS="3", INFINICORE_ISA="portable").stdout == "3 portable\n"
    assert "INFINICORE_NUM_THREADS must" in run_python(code, INFINICORE_NUM_THREADS="abc").stderr


@pytest.mark.parametrize("count", [0, 1025, 2**70, "2", 1.5])
def test_set_num_threads_says_what_it_takes(count: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="set_num_threads: count must"):
        native.set_num_threads(count)


# The core as it would be without a name, or (given none) not there at all.
OTHER_CORE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("infinicore._native", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
for name in sys.argv[2:]:
    delattr(core, name)
sys.modules["infinicore._native"] = core if sys.argv[2:] else None
import infinicore
"""


@pytest.mark.parametrize("names", [["bind_silu"], []])
def test_a_native_core_that_is_missing_or_of_other_sources_is_refused_with_advice(names: list[str]) -> None:
    error = run_python(OTHER_CORE, _native.__file__, *names).stderr.splitlines()[-1]
    assert error.startswith("ImportError: the native core") and "make setup" in error
    assert all(repr(name) in error for name in names)


def test_a_name_that_the_native_core_lacks_is_told_with_advice() -> None:
    with pytest.raises(ImportError, match="'matmul_of_tomorrow'.*make setup"):
        _native.matmul_of_tomorrow()
