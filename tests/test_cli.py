"""The infinilm command as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def infinilm(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "import sys; from infinilm.cli import main; sys.exit(main())",
        *arguments,
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, env=environment)


def test_help_and_version_answer_without_torch() -> None:
    code = "import sys; from infinilm.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    check = code + "sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True).returncode == 0
    assert infinilm("--version").stdout.startswith("infinilm 0.")


def test_generate_prints_an_answer_and_its_speed(default_model_path: Path) -> None:
    question = "What is the capital of France?"
    result = infinilm("generate", question, "--max-tokens", "12", "--stats")
    assert result.returncode == 0
    assert "Paris" in result.stdout
    assert "tokens/s" in result.stderr


def test_generate_reads_a_raw_prompt_from_standard_input(default_model_path: Path) -> None:
    result = infinilm("generate", "-", "--raw", "--max-tokens", "4", stdin="One, two, three,")
    assert result.returncode == 0 and "four" in result.stdout


def test_the_same_seed_gives_the_same_text(default_model_path: Path) -> None:
    command = ("generate", "Tell a story.", "--temperature", "1.5", "--seed", "7", "--max-tokens", "12")
    assert infinilm(*command).stdout == infinilm(*command).stdout


def test_chat_keeps_the_conversation_and_obeys_commands(default_model_path: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = ["/system You are terse.", "Hello", f"/save {saved}", "/reset", "/unknown", "/exit", "never read"]
    result = infinilm("chat", "--max-tokens", "5", stdin="\n".join(lines))
    assert result.returncode == 0
    messages = json.loads(saved.read_text())
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == "You are terse." and messages[2]["content"]


def test_chat_ends_at_the_end_of_its_input(default_model_path: Path) -> None:
    assert infinilm("chat", stdin="").returncode == 0


def test_info_tells_architecture_sizes_and_memory(default_model_path: Path) -> None:
    out = infinilm("info").stdout
    for expected in ("llama", "134,515,008", "49,152, tied", "8,192 tokens", "Q4_1 79%", "MB of weights"):
        assert expected in out


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("generate", "x", "--model", "./no/such/model.gguf"), "no/such/model.gguf"),
        (("info", "/nonexistent"), "/nonexistent"),
        (("generate", "x", "--temperature", "-1"), "temperature"),
        (("generate", "x", "--top-p", "2"), "top_p"),
        (("generate", "x", "--max-tokens", "0"), "max_tokens"),
        (("generate", "x", "--dtype", "int3"), "dtype"),
        (("generate", "x", "--dtype", "bfloat16", "--activations", "int8"), "int8"),
        (("generate", "", "--raw"), "prompt"),
    ],
)
def test_a_users_error_is_one_line_and_a_failing_exit(
    arguments: tuple[str, ...], expected: str, default_model_path: Path
) -> None:
    result = infinilm(*arguments)
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("infinilm: error:") and expected in line


def test_bench_latency_prints_every_quantity_with_its_spread(default_model_path: Path) -> None:
    sizes = ("--prompt-length", "16", "--output-length", "4", "--batch-size", "2", "--rounds", "2")
    result = json.loads(infinilm("bench", "latency", *sizes, "--json").stdout)
    for name in (
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "python_microseconds_per_step",
        "load_seconds",
        "peak_memory_bytes",
        "read_bandwidth_bytes_per_second",
    ):
        assert result[name] > 0 and result[f"{name}_spread"] >= 0


def test_unknown_commands_are_a_usage_error() -> None:
    assert infinilm("fly").returncode == 2
