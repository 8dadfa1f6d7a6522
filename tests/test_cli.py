"""The infinilm command as a user meets it."""

from __future__ import annotations

import argparse
import errno
import io
import json
import logging
import os
import pty
import select
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from engines import HIDDEN, write_model
from safetensors.torch import load_file, save_file
from warm import COMMAND, RunPython, StartPython, start_afresh

from infinilm.cli import main, parser
from infinilm.cli.generate import read_prompt


def infinilm(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "infinilm", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    )


Completed = subprocess.CompletedProcess[str]
Here = Callable[..., Completed]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """The same in this process, which need not import torch again: how `python -m infinilm` ends is proved
    by the tests that start one."""

    def run(*arguments: str, stdin: str = "") -> Completed:
        monkeypatch.setattr(sys, "stdin", text_stream(stdin.encode()))
        return subprocess.CompletedProcess(arguments, main(arguments), *capfd.readouterr())

    return run


def text_stream(content: bytes = b"", **options: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(content), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


def test_help_and_version_answer_without_torch() -> None:
    code = "import sys; from infinilm.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    check = code + "sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True).returncode == 0
    assert infinilm("--version").stdout.startswith("infinilm 0.")


def test_every_option_says_what_it_is() -> None:
    assert list(options_without_help(parser())) == []


def options_without_help(command: argparse.ArgumentParser) -> Iterator[str]:
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options_without_help(inner)
        elif not action.help:
            yield f"{command.prog} {action.dest}"


def test_generate_prints_an_answer_and_its_speed(default_model_path: Path) -> None:
    question = "What is the capital of France?"
    result = infinilm("generate", question, "--max-tokens", "12", "--stats")
    assert result.returncode == 0
    assert "Paris" in result.stdout
    assert "tokens/s" in result.stderr


def test_generate_reads_a_raw_prompt_from_standard_input(here: Here, default_model_path: Path) -> None:
    result = here("generate", "-", "--raw", "--max-tokens", "4", stdin="One, two, three,")
    assert result.returncode == 0 and "four" in result.stdout


def test_the_newline_after_a_message_is_none_of_it_but_a_raw_prompt_is_continued_with_it(
    here: Here, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    read = []
    monkeypatch.setattr("infinilm.cli.generate.answer", lambda llm, token_ids, _: read.append(token_ids))
    for prompt, *options in (["hello"], ["-"], ["hello", "--raw"], ["-", "--raw"]):
        here("generate", prompt, *options, "--model", str(tiny_folder), stdin="hello\n")
    message, piped, raw, raw_piped = read
    assert message == piped and raw_piped[: len(raw)] == raw and len(raw_piped) > len(raw)


def test_the_mark_of_utf_8_before_a_prompt_is_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", text_stream(b"\xef\xbb\xbfhello\n", encoding="utf-8"))
    assert read_prompt(raw=True) == "hello\n"


def test_the_same_seed_gives_the_same_text(here: Here, tiny_folder: Path) -> None:
    command = ("generate", "Tell a story.", "--model", str(tiny_folder), "--temperature", "1.5")
    first, again, other = (here(*command, "--max-tokens", "12", "--seed", seed).stdout for seed in "778")
    assert first == again != other


def test_chat_keeps_the_conversation_and_obeys_commands(
    here: Here, default_model_path: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "chat.json"
    lines = ["/system You are terse.", "Hello", f"/save {saved}", "/reset", "/unknown", "/exit", "never read"]
    result = here("chat", "--max-tokens", "5", stdin="\n".join(lines))
    assert result.returncode == 0
    messages = json.loads(saved.read_text())
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == "You are terse." and messages[2]["content"]


def test_chat_ends_at_the_end_of_its_input(here: Here, tiny_folder: Path) -> None:
    result = here("chat", "--model", str(tiny_folder), stdin="")
    assert (result.returncode, result.stdout) == (0, "")


def test_a_chat_through_pipes_prints_answers_alone(here: Here, tiny_folder: Path) -> None:
    options = ("--model", str(tiny_folder), "--max-tokens", "4")
    alone = here("generate", "Hello", *options).stdout
    assert here("chat", *options, stdin="Hello\n/reset\nHello\n").stdout == 2 * alone


def test_a_model_without_a_chat_template_completes_and_does_not_chat(here: Here, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    command = ("generate", "Hello", "--max-tokens", "4", "--model", str(folder))
    assert here(*command).stdout == here(*command, "--raw").stdout
    for refused in ((*command, "--system", "Be brief."), ("chat", "--model", str(folder))):
        result = here(*refused)
        assert result.returncode == 1 and "chat template" in result.stderr.splitlines()[-1]


def test_info_tells_architecture_sizes_and_memory(here: Here, default_model_path: Path) -> None:
    out = here("info").stdout
    for expected in ("llama", "134,515,008", "49,152, tied", "8,192 tokens", "Q4_1 79%", "MB of weights"):
        assert expected in out


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("generate", "x", "--model", "./no/such/model.gguf"), "no/such/model.gguf"),
        (("info", "/nonexistent"), "/nonexistent"),
        (("generate", "x", "--model", "~no.such.user/model"), "~no.such.user/model"),
        (("generate", "x", "--packed-cache", "~no.such.user"), "~no.such.user"),
        (("generate", "x", "--temperature", "-1"), "temperature"),
        (("generate", "x", "--top-p", "2"), "top_p"),
        (("generate", "x", "--max-tokens", "0"), "max_tokens"),
        (("generate", "x", "--dtype", "int3"), "dtype"),
        (("generate", "x", "--dtype", "bfloat16", "--activations", "int8"), "int8"),
        (("generate", "", "--raw"), "prompt"),
        (("generate", "x", "--device", "gpu"), "device 'gpu' cannot be used here"),
        (("bench", "latency", "--device", "meta"), "device 'meta' cannot be used here"),
        (("generate", "x", "--kv-cache-dtype", "int3"), "kv_cache_dtype must be one of auto, float32"),
        (("generate", "x", "--kv-cache-memory", "much"), "kv_cache_memory"),
        (("generate", "x", "--max-model-len", "1"), "max_model_len"),
        (("bench", "throughput", "--output-len", "1"), "output-len must be at least 2, but is 1"),
        (("bench", "latency", "--rounds", "0"), "error: rounds must be at least 1, but is 0"),
        (("bench", "latency", "--input-len", "8192"), "8256 tokens, but the model's context is 8192"),
        (("generate", "x", "--model", ""), "the model's name is empty"),
        (("generate", "x", "--raw", "--system", "y"), "--system needs a chat template"),
    ],
)
def test_a_users_error_is_one_line_and_a_failing_exit(
    arguments: tuple[str, ...], expected: str, here: Here, default_model_path: Path
) -> None:
    result = here(*arguments)
    assert result.returncode == 1
    (line,) = (line for line in result.stderr.splitlines() if "keys and values" not in line)
    assert line.startswith("infinilm: error:") and expected in line


def test_a_warning_is_one_line_without_a_place_in_the_sources(here: Here, tiny_folder: Path) -> None:
    command = ("generate", "x", "--model", str(tiny_folder), "--quantize", "q8_0", "--max-tokens", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # which are errors in tests
        first, second = here(*command).stderr.splitlines()
    assert first.startswith(f"infinilm: warning: {tiny_folder}: 2 of 16 matrices stay dense: ")
    assert "keys and values" in second


def test_what_is_logged_is_told_as_warnings_are(
    here: Here, default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as at the start of a process
    result = here("generate", "x", "--packed-cache", "/proc/none", "--max-tokens", "1")
    assert result.returncode == 0
    assert result.stderr.startswith("infinilm: warning: /proc/none/")


def test_what_the_hub_logs_is_told_once() -> None:
    start = "import logging; from infinilm.cli import main; main(['info', '']); "
    log = "import huggingface_hub.utils.logging; logging.getLogger('huggingface_hub.utils').warning('again')"
    result = subprocess.run([sys.executable, "-c", start + log], capture_output=True, text=True, timeout=60)
    assert result.stderr.count("again") == 1


# Prints the status of a command that wants more memory than it may have, and of one that chooses for itself.
WITHIN_2_GIB = """
import resource
import infinilm.llm
from infinilm.cli import main
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (2 << 30),) * 2)
for options in (["--kv-cache-memory", "8GiB"], []):
    print("status", main(["generate", "x", "--max-tokens", "2", *options]), flush=True)
"""


@pytest.fixture(scope="module")
def within_2_gib(default_model_path: Path, run_python: RunPython) -> Completed:
    return run_python(WITHIN_2_GIB)


def test_memory_that_cannot_be_had_is_one_line(within_2_gib: Completed) -> None:
    assert within_2_gib.stdout.startswith("status 1\n") and "Traceback" not in within_2_gib.stderr
    (line,) = (line for line in within_2_gib.stderr.splitlines() if line.startswith("infinilm: error:"))
    assert "8,590 MB of keys and values do not fit in memory, of" in line


def test_keys_and_values_take_a_share_of_a_processs_own_limit(within_2_gib: Completed) -> None:
    assert within_2_gib.stdout.endswith("status 0\n"), within_2_gib.stderr


def test_logits_that_are_no_numbers_are_one_line_and_a_chat_goes_on(here: Here, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.full((HIDDEN,), 3e38)}, folder / "model.safetensors")
    result = here("generate", "Hello", "--model", str(folder))
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "the model's logits are NaN or infinite" in result.stderr.splitlines()[-1]
    result = here("chat", "--model", str(folder), stdin="Hello\nAgain")
    assert result.returncode == 0 and result.stderr.count("logits are NaN or infinite") == 2


def test_bench_latency_prints_every_quantity_with_its_spread(here: Here, tiny_folder: Path) -> None:
    sizes = ("--input-len", "16", "--output-len", "4", "--batch-size", "2", "--rounds", "2")
    result = json.loads(here("bench", "latency", "--model", str(tiny_folder), *sizes, "--json").stdout)
    for name in (
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "load_seconds",
        "peak_memory_bytes",
        "read_bandwidth_bytes_per_second",
        "byte_products_per_second",
    ):
        assert result[name] > 0 and result[f"{name}_spread"] >= 0


def test_bench_throughput_prints_rates_and_latencies(here: Here, tiny_folder: Path) -> None:
    sizes = ("--num-prompts", "5", "--input-len", "9", "--output-len", "3", "--concurrency", "2")
    command = ("bench", "throughput", "--model", str(tiny_folder), *sizes)
    result = json.loads(here(*command, "--json").stdout)
    seconds = result["elapsed_seconds"]
    assert result["requests_per_second"] == pytest.approx(5 / seconds)
    assert result["output_tokens_per_second"] == pytest.approx(15 / seconds)
    assert result["total_tokens_per_second"] == pytest.approx(60 / seconds)
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        assert 0 < result[name]["p50"] <= result[name]["p99"] <= seconds
    assert (result["num_prompts"], result["concurrency"]) == (5, 2)
    assert "total tokens per second" in here(*command).stdout


def test_a_benchmark_that_would_be_cut_short_is_refused(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--input-len", "12", "--output-len", "5", "--max-model-len", "16"]
    assert main(["bench", "throughput", "--model", str(tiny_folder), *sizes]) == 1
    assert "are 17 tokens, but the model and its cache take 16 at most" in capsys.readouterr().err


def test_a_length_bounds_the_prompt(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--raw", "--model", str(tiny_folder), "--max-model-len", "8", "--kv-cache-memory", "1MB"]
    assert main(["generate", "far too long", *options]) == 1
    assert "the prompt has 12 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("generate", "-"), ("generate", "-", "--raw"), ("chat",)])
def test_a_hopeless_prompt_is_refused_before_it_is_encoded(
    command: tuple[str, ...], here: Here, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, chat_template="{{ messages[0].content }}")
    child = here(*command, "--model", str(folder), "--kv-cache-memory", "1MB", stdin="x" * (1 << 20))
    assert "the prompt has at least" in child.stderr


def test_guesses_change_no_text(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "ab ab ab", "--raw", "--model", str(tiny_folder), "--kv-cache-memory", "1MB"]
    assert main(command) == 0
    plain = capsys.readouterr().out
    guess = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}']
    assert main([*command, *guess]) == 0
    assert capsys.readouterr().out == plain
    assert main([*command, *guess[:1], '{"method": "ngrams"}']) == 1
    assert "num_speculative_tokens" in capsys.readouterr().err


def test_unknown_commands_are_a_usage_error() -> None:
    assert infinilm("fly").returncode == 2


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("chat", "--speculative-config", "ngram"), "must be a JSON object, but is 'ngram'"),
        (("bench", "serve", "--extra-body", "[]"), "must be a JSON object, but is '[]'"),
        (
            ("bench", "serve", "--goodput", "p99:3"),
            "must be ttft:SECONDS or itl:SECONDS, above 0, but is 'p99:3'",
        ),
        (("bench", "serve", "--goodput", "ttft:nan"), "but is 'ttft:nan'"),
        (("generate", os.fsdecode(b"sch\xf6n")), "must be text in utf-8, but has the byte 0xf6 at 3"),
        (("chat", "--system", os.fsdecode(b"\xff")), "must be text in utf-8, but has the byte 0xff at 0"),
        (("generate", "x", "y"), "unrecognized arguments: y; a prompt of several words is quoted"),
        (("chat", "llama.gguf"), "unrecognized arguments: llama.gguf; a model is named by --model"),
        (("chat", "-p", "x"), "infinilm chat: error: unrecognized arguments: -p x"),
        (("chat", "-hf", "org/name"), "unrecognized arguments: -hf org/name; -hf is --model here"),
        (("serve", "--model", "x", "-np", "2"), "unrecognized arguments: -np; -np is --max-num-seqs here"),
        (("serve", "--dashboard", "x"), "infinilm serve: error: unrecognized arguments: --dashboard"),
        (
            ("serve", "--load-format", "gguf"),
            "arguments: --load-format; --load-format: files say what they are",
        ),
        (("serve", "--torch_dtype", "float16"), "--torch_dtype; --torch_dtype is --dtype here"),
        (("batch", "x", "y", "--enforce-eager"), "--enforce-eager; --enforce-eager: it is not needed here"),
        (("bench", "latency", "--swap-space", "4"), "unrecognized arguments: --swap-space 4"),
        (("generate", "x", "--stream"), "--stream is not needed here"),
        (
            ("chat", "--stop", "x"),
            "--stop: SamplingParams has it, and so have the bodies of infinilm batch and infinilm serve",
        ),
        (
            ("generate", "-f", "x"),
            "-f: a prompt of - is read from standard input, as by infinilm generate - < FILE",
        ),
        (
            ("batch", "-", "out.jsonl"),
            "argument IN.jsonl: must be a file, where a run that was stopped can go on, but is '-'",
        ),
        (
            ("batch", "in.jsonl", "-"),
            "argument OUT.jsonl: must be a file, where a run that was stopped can go on, but is '-'",
        ),
        (("bench", "serve", "--port", "1"), "unrecognized arguments: --port 1; --port is --base-url here"),
        (("bench", "latency", "-p", "5"), "unrecognized arguments: -p 5; -p is --input-len here"),
        (("run", "llama"), "infinilm: error: argument COMMAND: 'run' is 'chat --model' here"),
        (("generate", "x", "--max_tokens=5"), "--max_tokens=5; did you mean --max-tokens?"),
        (("bench", "serve", "--request_rate", "3"), "--request_rate 3; did you mean --request-rate?"),
        (("generate", "-p", "x"), "unrecognized arguments: -p; -p is a prompt that stands by itself here"),
        (("chat", "-n", "5", "-c", "9"), "-n is --max-tokens here; -c is --max-model-len here"),
        (("serve", "x", "--trust-remote-code"), "--trust-remote-code is not needed here"),
        (("info", "--model", "x"), "--model is a model that stands by itself here"),
        (("info", "-m", "x"), "-m is a model that stands by itself here"),
        (("generate", "x", "-t", "4"), "-t is INFINICORE_NUM_THREADS in the environment here"),
        (("serve", "x", "-t", "4"), "-t is --threads here"),
        (("serve", "x", "--ctx_size=4"), "--ctx_size is --max-model-len here"),
    ],
)
def test_a_wrong_argument_is_told_with_what_is_wanted(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr().err.endswith(f"{expected}\n")


def test_nonsense_in_the_environment_is_one_line(run_python: RunPython) -> None:
    result = run_python(COMMAND, "info", INFINICORE_NUM_THREADS="many")
    assert result.returncode == 1
    assert result.stderr.startswith("infinilm: error: INFINICORE_NUM_THREADS must be a whole number")


@pytest.mark.parametrize(
    "arguments, closed, expected",
    [
        (("chat",), "<&-", "standard input is closed"),
        (("info",), ">&-", "standard output is closed"),
    ],
)
def test_a_closed_stream_is_one_line(arguments: tuple[str, ...], closed: str, expected: str) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "infinilm", *arguments]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 1 and line.startswith(f"infinilm: error: {expected}")


def test_a_reader_that_went_away_ends_the_command_quietly(default_model_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run(
        [sys.executable, "-m", "infinilm", "info"], stdout=write_end, stderr=subprocess.PIPE, timeout=120
    )
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, b"")


# ---- in this process, with streams of ours ----


class FullStream(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_output_that_is_full_is_one_line(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", FullStream())
    assert main(["info"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("infinilm: error:") and "No space left" in line


def test_what_a_terminal_cannot_show_is_written_with_backslashes(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {}
    for encoding in ("utf-8", "ascii"):
        monkeypatch.setattr(sys, "stdout", out := text_stream(encoding=encoding))
        assert main(["generate", "é", "--raw", "--max-tokens", "8", "--model", str(tiny_folder)]) == 0
        shown[encoding] = out.buffer.getvalue()  # type: ignore[attr-defined]
    assert not shown["utf-8"].isascii()
    assert shown["ascii"] == shown["utf-8"].decode().encode("ascii", "backslashreplace")


@pytest.mark.parametrize("command", [["generate", "-"], ["chat"]])
def test_input_that_is_not_text_is_one_line(
    command: list[str],
    default_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", text_stream(b"a\xff\n", encoding="utf-8", errors="surrogateescape"))
    assert main(command) == 1
    assert "infinilm: error: standard input is not utf-8" in capsys.readouterr().err.splitlines()[-1]


def test_a_closed_standard_input_has_no_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "-"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("infinilm: error: standard input is closed")


def test_a_closed_standard_error_changes_nothing(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["generate", "Hello", "--max-tokens", "3", "--stats"]) == 0
    sys.stderr.close()
    assert capsys.readouterr().out.strip()


def test_a_model_that_may_not_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert main(["info", str(path)]) == 1
    assert "secret.gguf" in capsys.readouterr().err


def test_what_cannot_be_saved_is_told_and_the_chat_goes_on(
    default_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [f"/save {tmp_path}", "/save ~no.such.user/x", f"/save {tmp_path / 'chat.json'}"]
    monkeypatch.setattr(sys, "stdin", text_stream("\n".join(lines).encode()))
    assert main(["chat"]) == 0
    told = capsys.readouterr().err
    assert f"cannot write {tmp_path}: Is a directory" in told and "cannot write ~no.such.user/x" in told
    assert (tmp_path / "chat.json").read_text() == "[]\n"


# ---- on a terminal ----


class Terminal:
    """`infinilm chat` on a terminal of its own: `type` presses keys, `read_to` waits for what it shows."""

    CODE = (
        "import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a background job has it ignored
        "from infinilm.cli import main; sys.exit(main())"
    )

    def __init__(self, start: StartPython, kind: str, *arguments: str, **environment: str) -> None:
        self.screen, end = pty.openpty()
        environment |= {"TERM": kind, "INPUTRC": os.devnull}
        self.process = start(self.CODE, "chat", *arguments, files=(end, end, end), **environment)
        os.close(end)
        self.shown = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()
        os.close(self.screen)

    def read_to(self, text: str) -> str:
        deadline = time.monotonic() + 120
        while text.encode() not in self.shown:
            assert select.select([self.screen], [], [], deadline - time.monotonic())[0], self.shown
            self.shown += os.read(self.screen, 4096)
        before, _, self.shown = self.shown.partition(text.encode())
        return before.decode()

    def type(self, keys: str) -> None:
        os.write(self.screen, keys.encode())

    def leave(self, keys: str) -> int:
        """Keys that come between a prompt and its reader are not heard: pressed until they are."""
        self.type(keys)
        with suppress(OSError):  # how the end of a terminal reads on Linux
            while True:
                if not select.select([self.screen], [], [], 2)[0]:
                    self.type(keys)
                elif shown := os.read(self.screen, 4096):
                    self.shown += shown
                else:
                    break
        return self.process.wait(timeout=120)


@pytest.mark.parametrize("kind, paste", [("xterm", "\x1b[200~{}\x1b[201~"), ("dumb", "{}")])
def test_pasted_lines_are_one_message_and_control_d_leaves(
    kind: str, paste: str, tiny_folder: Path, tmp_path: Path, start_python: StartPython
) -> None:
    options = "--model", str(tiny_folder), "--max-tokens", "3"
    with Terminal(start_python, kind, *options, HOME=str(tmp_path)) as terminal:
        terminal.read_to("> ")
        terminal.type(paste.format("One,\rtwo,\r/three") + "\r")
        terminal.read_to("/three")
        terminal.read_to("> ")
        terminal.type("//four\r")
        terminal.read_to("//four")
        terminal.read_to("> ")
        terminal.type("/save ~/saved.json\r")
        terminal.read_to("saved.json")
        terminal.read_to("> ")
        asked = json.loads((tmp_path / "saved.json").read_text())[::2]
        assert [message["content"] for message in asked] == ["One,\ntwo,\n/three", "/four"]
        assert terminal.leave("\x04") == 0


def test_a_dumb_terminal_is_sent_no_codes(tiny_folder: Path, start_python: StartPython) -> None:
    with Terminal(start_python, "dumb", "--model", str(tiny_folder), "--max-tokens", "3") as terminal:
        assert "\x1b" not in terminal.read_to("> ") + terminal.shown.decode()
        terminal.type("Hello\r")
        assert "\x1b" not in terminal.read_to("> ")
        assert terminal.leave("\x04") == 0


def test_control_c_while_libraries_are_imported_is_not_lost(tmp_path: Path) -> None:
    once = "import pathlib; pathlib.Path(__file__).unlink(); raise KeyboardInterrupt"
    (tmp_path / "numpy.py").write_text(once)  # the real one is imported by those who try again
    result = infinilm("info", PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stderr) == (130, "")


def test_control_c_while_arguments_are_parsed_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("infinilm.cli.parser", interrupted)
    assert main(["info"]) == 130


def test_control_c_stops_an_answer_and_at_the_prompt_the_chat(default_model_path: Path) -> None:
    with Terminal(start_afresh, "dumb", "--max-tokens", "4000") as terminal:
        terminal.read_to("> ")
        terminal.type("List one hundred animals.\r")
        terminal.read_to("animals.")
        terminal.read_to("e")  # the answer has begun
        terminal.type("\x03")
        terminal.read_to("stopped; the turn is forgotten")
        terminal.read_to("> ")
        assert terminal.leave("\x03") == 130
        assert terminal.shown.endswith(b"\n")  # where the shell goes on
