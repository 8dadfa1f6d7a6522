"""The process around a model: it hears Ctrl-C at once, and at rest it uses no CPU."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

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
