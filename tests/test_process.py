"""The process around a model: how it begins, is forked and hears Ctrl-C, and that at rest it uses no CPU.

What is soon is said in CPU time, beside that of other work in the same process.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from warm import RunPython

import infinicore
from infinicore import _native, control_groups, ops
from infinicore.ops import native
from infinilm import cache
from infinilm.config import LlamaConfig
from infinilm.generation import step_tokens

LONG_PROMPT = "word " * 7000

# Prints the CPU time of a chunk of a prompt, then what passed between each signal and its interrupt.
INTERRUPTED = """
import signal, sys, threading, time
from infinilm import LLM, SamplingParams

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
llm, params = LLM(sys.argv[1], max_num_batched_tokens=128), SamplingParams(max_tokens=1)
next(llm.stream([1000], params))
start = time.process_time()
next(llm.stream([1000] * 128, params))
chunk = time.process_time() - start
print(chunk)

def interrupt_after(seconds):
    due = time.process_time() + seconds
    while time.process_time() < due:
        time.sleep(0.005)
    global sent
    sent = time.process_time()
    signal.raise_signal(signal.SIGINT)

for num_chunks in (0.1, 0.7, 1.4):
    timer = threading.Thread(target=interrupt_after, args=(num_chunks * chunk,))
    timer.start()
    try:
        next(llm.stream([1000] * 8000, params))
    except KeyboardInterrupt:
        print(time.process_time() - sent)
    timer.join()
"""


def test_an_interrupt_is_heard_in_the_midst_of_a_chunk_of_a_long_prompt(
    default_model_path: Path, run_python: RunPython
) -> None:
    child = run_python(INTERRUPTED, str(default_model_path))
    assert child.returncode == 0, child.stderr
    chunk, *heard = map(float, child.stdout.split())
    assert len(heard) == 3 and max(heard) < chunk / 4


def test_no_call_of_attention_does_more_than_its_share_of_a_long_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interrupts are heard between two calls, which could be long in the last chunk of a long prompt."""
    done, num_keys = [], 8000

    def attention(q: torch.Tensor, *rest: object, out: torch.Tensor) -> torch.Tensor:
        done.append(q.numel() * num_keys)
        return out.zero_()

    monkeypatch.setattr(cache.ops, "attention", attention)
    held = cache.DynamicCache()
    batch = replace(held.place([512]), lengths=[num_keys])
    q = torch.zeros(512, 9, 64)
    pools = cache.BlockShape(3, 64, held.block_size, torch.float32).pools(8)
    cache.attend(pools, q, batch, 1.0, None)
    assert sum(done) == q.numel() * num_keys and max(done) <= cache.CALL_WORK


# Says when it begins to read the prompt.
ANNOUNCED = """
import signal, sys
from infinilm.cli import main
from infinilm.runner import Runner

launch = Runner.launch

def announced_launch(*args):
    print("reading", flush=True)
    return launch(*args)

Runner.launch = announced_launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
sys.exit(main())
"""


def test_ctrl_c_ends_the_command_with_130_and_no_traceback_before_the_prompt_is_read(
    default_model_path: Path,
) -> None:
    """The prompt takes several times as long as to start and load the model, which is the measure here."""
    command = [sys.executable, "-c", ANNOUNCED, "generate", "-", "--raw", "--model", str(default_model_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as child:  # type: ignore[call-overload]
        child.stdin.write(LONG_PROMPT)
        child.stdin.close()
        assert child.stdout.readline() == "reading\n"
        process = psutil.Process(child.pid)
        before = sum(process.cpu_times()[:2])
        child.send_signal(signal.SIGINT)
        printed, told = child.stdout.read().replace("reading\n", ""), child.stderr.read()  # until it ends
        assert printed == "" and told.count("\n") == 1 and told.startswith("infinilm: keys and values")
        assert sum(process.cpu_times()[:2]) < 2 * before
    assert child.returncode == 130


def test_large_models_are_fed_fewer_tokens_at_once_by_few_threads(keep_threads: None) -> None:
    small, large = (
        LlamaConfig(
            vocab_size=8, num_hidden_layers=1, num_attention_heads=8, hidden_size=h, intermediate_size=i
        )
        for h, i in ((576, 1536), (2048, 8192))
    )
    cpu = torch.device("cpu")
    for num_threads, wanted in ((1, 128), (2, 128), (4, 256), (16, 512)):
        infinicore.set_num_threads(num_threads)
        assert step_tokens(small, cpu) == step_tokens(large, torch.device("meta")) == 512
        assert step_tokens(large, cpu) == wanted


def test_at_rest_the_process_uses_no_cpu(keep_threads: None) -> None:
    infinicore.set_num_threads(2)
    ops.silu(torch.randn(512, 4096))
    time.sleep(0.05)  # workers spin for less than a millisecond, then park
    before = time.process_time()  # of all threads
    time.sleep(0.5)
    assert time.process_time() - before < 0.02


# Forks while torch's threads are there and another thread is inside a region of our own; each child prints,
# then the parent.
FORKING = """
import os, sys, threading, torch
from infinilm import LLM, SamplingParams

llm, params = LLM(sys.argv[1]), SamplingParams(seed=1, max_tokens=6, ignore_eos=True)

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
for _ in range(2):
    if os.fork() == 0:
        print((tokens(), large_products()) == wanted, flush=True)
        os._exit(0)
    os.wait()
stop.set()
other.join()
print((tokens(), large_products()) == wanted)
"""


def test_forked_processes_compute_what_their_parent_does_and_it_goes_on(
    default_model_path: Path, run_python: RunPython
) -> None:
    assert run_python(FORKING, str(default_model_path)).stdout.split() == ["True"] * 3


# Draws from rows so long that no thread finds the memory it needs for one; then does something smaller.
WITHOUT_MEMORY = """
import resource, torch
import infinicore
from infinicore import ops

def drawn(length):
    logits = torch.zeros(1, length, dtype=torch.bfloat16).expand(8, -1)
    uniforms, top_k = torch.full((8,), 0.5, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)
    return ops.sample(logits, uniforms, torch.tensor([1.0, 1.0, 0.0]).repeat(8, 1), top_k).tolist()

infinicore.set_num_threads(3)
print(drawn(4096))  # all threads are there
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (48 << 20),) * 2)
try:
    drawn(1 << 23)  # 16 MB of logits, 64 MB for each thread
except MemoryError:
    print(drawn(4096))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bounds memory as Linux does")
def test_memory_that_a_thread_does_not_get_is_an_error_of_the_call_alone(run_python: RunPython) -> None:
    child = run_python(WITHOUT_MEMORY)
    assert child.stdout == f"{[2048] * 8}\n" * 2, child.stderr


# Asks for more threads than there are addresses for.
WITHOUT_THREADS = """
import resource, torch, infinicore
from infinicore.nn import functional as F
x, weight = torch.ones(4096, 256), torch.ones(256)
wanted = F.rms_norm(x, [256], weight)
infinicore.set_num_threads(1000)
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (48 << 20),) * 2)
try:
    F.rms_norm(x, [256], weight)
except RuntimeError as error:
    print(error)
infinicore.set_num_threads(1)
print(torch.equal(F.rms_norm(x, [256], weight), wanted))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bounds memory as Linux does")
def test_threads_that_cannot_be_started_are_counted_and_fewer_may_be_asked_for(run_python: RunPython) -> None:
    child = run_python(WITHOUT_THREADS)
    told, is_same = child.stdout.splitlines()
    assert re.search("it has [0-9]+ of 1000: .*; INFINICORE_NUM_THREADS takes a smaller number", told), child
    assert is_same == "True"


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


def test_the_environment_is_read_when_the_core_is_imported(run_python: RunPython) -> None:
    code = "import infinicore; print(infinicore.get_num_threads(), infinicore._native.isa())"
    assert run_python(code, INFINICORE_NUM_THREADS="3", INFINICORE_ISA="portable").stdout == "3 portable\n"


@pytest.mark.parametrize(
    ("line", "files", "quotas"),
    [
        ("0::/pod/own", {"cpu.max": "max 100000", "pod/cpu.max": "250000 100000"}, [3]),
        ("0::/pod/own", {"pod/own/cpu.max": "50000 100000", "pod/cpu.max": "400000 100000"}, [1, 4]),
        ("0::/host/path", {"cpu.max": "200000 100000", "elsewhere/cpu.max": "1000 100000"}, [2]),
        (
            "3:cpuacct,cpu:/own",
            {"cpu/own/cpu.cfs_quota_us": "300000", "cpu/own/cpu.cfs_period_us": "100000"},
            [3],
        ),
        ("3:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
        ("3:cpuset:/", {"cpu.max": "100000 100000"}, []),
        ("", {}, []),
    ],
)
def test_no_more_threads_are_started_than_control_groups_give_cpu_time_for(
    line: str, files: dict[str, str], quotas: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {**files, "lines": line}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "lines")
    monkeypatch.setattr(_native, "num_threads", lambda: 64)
    assert control_groups.cpu_quotas() == quotas
    assert native.default_num_threads() == min([64, *quotas])


@pytest.mark.parametrize(("asked", "given"), [("", 1), ("5", 5)])
def test_a_quota_of_cpu_time_bounds_the_threads_that_nobody_asked_for(
    asked: str, given: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_threads: None
) -> None:
    (tmp_path / "lines").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "lines")
    monkeypatch.setenv("INFINICORE_NUM_THREADS", asked)
    infinicore.set_num_threads(8)
    native.use_environment()
    assert infinicore.get_num_threads() == given


@pytest.mark.parametrize("count", [0, 1025, 2**70, "2", 1.5])
def test_set_num_threads_says_what_it_takes(count: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="set_num_threads: count must"):
        native.set_num_threads(count)


# Prints what is said of the core as it would be without a name, and where there is none at all.
OTHER_CORES = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("infinicore._native", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
del core.bind_silu
for found in (core, None):
    sys.modules["infinicore._native"] = found
    try:
        import infinicore
    except ImportError as error:
        print(error)
    for name in [name for name in sys.modules if name.startswith("infinicore")]:
        del sys.modules[name]
"""


def test_a_native_core_that_is_missing_or_of_other_sources_is_refused_with_advice(
    run_python: RunPython,
) -> None:
    of_other_sources, missing = run_python(OTHER_CORES, _native.__file__).stdout.splitlines()
    for error in (of_other_sources, missing):
        assert error.startswith("the native core") and "make setup" in error
    assert "'bind_silu'" in of_other_sources


def test_a_name_that_the_native_core_lacks_is_told_with_advice() -> None:
    with pytest.raises(ImportError, match="'matmul_of_tomorrow'.*make setup"):
        _native.matmul_of_tomorrow()
