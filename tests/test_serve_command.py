"""`infinilm serve` as a process: its options, its start, its end."""

from __future__ import annotations

import errno
import gc
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import IO, Any, TextIO, cast

import httpx
import pytest
from engines import write_model
from patience import PATIENCE, wait_until
from warm import COMMAND, StartPython

from infinilm.cli import main, parser
from infinilm.cli.serve import api_keys, load_async, origins
from infinilm.hub import served_name
from infinilm.sampling import SamplingParams
from infinilm.server.log import MISSING, Log
from infinilm.server.sockets import inet_socket, unix_socket

pytestmark = pytest.mark.usefixtures("logs_as_before")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "infinilm", "serve", *arguments]
    given = os.environ | environment
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=given) as process:
        try:
            yield process
        finally:
            process.kill()


def line_with(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    raise AssertionError(f"{text!r} was never said")


def test_it_says_where_it_listens_answers_and_ends_with_status_0(folder: Path) -> None:
    with serving(
        str(folder), "--port", "0", "--kv-cache-memory", "8MB", INFINILM_API_KEY="secret"
    ) as process:
        url = line_with(process, "ready: ").split()[-1]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        with httpx.Client(base_url=url, timeout=PATIENCE) as http:
            assert http.get("/v1/models").status_code == 401
            (model,) = http.get("/v1/models", headers={"x-api-key": "secret"}).json()["data"]
            assert model["id"] == folder.name and model["max_model_len"] == 512
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def test_a_signal_while_the_model_is_loaded_ends_it_with_status_0(default_model_path: Path) -> None:
    with serving("--port", "0") as process:
        line_with(process, "listening on ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def test_what_is_loaded_is_not_searched_for_cycles_while_answers_are_made(folder: Path) -> None:
    llm = load_async(parser().parse_args(["serve", str(folder)]))
    try:
        assert gc.get_freeze_count() > 100_000  # torch's alone
    finally:
        gc.unfreeze()
        llm.shutdown()


def test_the_built_in_model_is_sampled_as_its_makers_recommend(default_model_path: Path) -> None:
    llm = load_async(parser().parse_args(["serve"]))
    try:
        assert llm.engine.model.recommended == SamplingParams(temperature=0.2, top_p=0.9)
    finally:
        gc.unfreeze()
        llm.shutdown()


@contextmanager
def unread_pipe() -> Iterator[IO[bytes]]:
    """One that has no room left"""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb"), os.fdopen(writer, "wb", 0) as log:
        os.set_blocking(writer, False)
        while log.write(bytes(select.PIPE_BUF)):
            pass
        os.set_blocking(writer, True)
        yield log


@pytest.mark.parametrize("open_log", [partial(open, "/dev/full", "wb"), unread_pipe], ids=["disk", "pipe"])
def test_a_log_that_takes_no_more_ends_nobodys_answer(
    open_log: Callable[[], AbstractContextManager[IO[bytes]]],
    folder: Path,
    tmp_path: Path,
    start_python: StartPython,
) -> None:
    path = str(tmp_path / "socket")
    command = COMMAND, "serve", str(folder), "--uds", path
    with open_log() as log, start_python(*command, files=(None, None, log.fileno())) as process:
        wait_until(lambda: os.path.exists(path) or process.poll() is not None)
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://here") as http:
            wait_until(lambda: http.get("/health").status_code == 200)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def test_a_log_that_is_read_again_says_that_lines_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinilm.server.log.READER_SECONDS", 0.01)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", 0) as pipe, os.fdopen(writer, "w") as stream:
        log = Log(stream)
        log.write("lost\n" * 100_000)
        log.write("lost too\n")
        pipe.read(1 << 20)
        log.write("here\n")
        assert pipe.read(1 << 20).decode() == MISSING + "here\n"


class Words(list[str]):
    """A stream that is no file"""

    write = list.append

    def flush(self) -> None:
        pass


def test_a_log_may_be_any_object_with_lines_to_write() -> None:
    words = Words()
    print("here", file=Log(cast(TextIO, words)))
    assert words == ["here", "\n"]


def test_what_is_freed_while_a_line_is_written_may_have_a_line_of_its_own() -> None:
    class Freeing(Words):
        def flush(self) -> None:
            if self == ["outer"]:
                log.write("inner")

    words = Freeing()
    log = Log(cast(TextIO, words))
    writer = Thread(target=log.write, args=("outer",), daemon=True)
    writer.start()
    writer.join(5)
    assert words == ["outer", "inner"] and not writer.is_alive()


def test_a_model_that_is_not_there_is_told_in_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path / "nothing"), "--port", "0"]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("infinilm: error:") and "nothing" in told


def test_a_unix_socket_is_taken_over_from_one_that_is_gone(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(path)  # its file stays, as after a process that was killed
    with unix_socket(path), socket.socket(socket.AF_UNIX) as caller:
        caller.connect(path)


def listen_without_room(path: str) -> list[socket.socket]:
    """A socket that listens to so many callers already that the next would wait"""
    sockets = [socket.socket(socket.AF_UNIX)]
    sockets[0].bind(path)
    sockets[0].listen(0)
    while sockets[-1].connect_ex(path) != errno.EAGAIN:
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].setblocking(False)
    return sockets


def take_datagrams(path: str) -> list[socket.socket]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(path)
    return [sock]


@pytest.mark.parametrize("use", [listen_without_room, take_datagrams])
def test_a_unix_socket_that_others_use_is_left_to_them(
    use: Callable[[str], list[socket.socket]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "socket"
    with ExitStack() as stack:
        for sock in use(str(path)):
            stack.enter_context(sock)
        assert main(["serve", "--uds", str(path)]) == 1
    assert "Address already in use; take another --uds" in capsys.readouterr().err
    assert path.exists()


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1
    assert "take another --port" in capsys.readouterr().err


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
def test_all_addresses_are_those_of_both_protocols() -> None:
    with inet_socket("::", 0) as sock:
        socket.create_connection(("127.0.0.1", sock.getsockname()[1]), timeout=PATIENCE).close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 64])
def test_a_host_that_is_not_here_is_told(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", host]) == 1
    told = capsys.readouterr().err
    assert f"cannot listen on {host!r}" in told and told.endswith("; take another --host\n")


def test_without_its_libraries_it_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "infinilm.server.serve")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve"]) == 1
    assert "pip install 'infinilm[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--log-level", "loud"], "--log-level must be"),
        (["--request-timeout", "-1"], "--request-timeout must be"),
        (["--max-queue", "-1"], "--max-queue must be at least 0, but is -1"),
        (["--threads", "0"], "--threads must be from 1 to 1024, but is 0"),
        (["--threads", "1025"], "--threads must be from 1 to 1024, but is 1025"),
        (["--api-key", ""], "the API key is empty"),
        (["--allowed-origins", "chat.example"], "--allowed-origins takes origins of web pages, as https"),
        (["--allowed-origins", "https://chat.example/page"], "but not 'https://chat.example/page'"),
        (["--allowed-origins", "[*]"], "--allowed-origins: '[*]' is no list in JSON"),
        (["--api-key", " ", "--host", "nowhere.invalid"], "the API key is empty"),
        (["--api-key-file", os.devnull], "has no key"),
        (["--host", "nowhere.invalid"], "cannot listen on"),
        (["--port", "65536"], "--port must be from 0 to 65535, but is 65536"),
        (["--port", "-1"], "--port must be from 0 to 65535, but is -1"),
    ],
)
def test_a_wrong_option_is_told_at_once(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 1
    assert told in capsys.readouterr().err


def test_options_have_twins_in_the_environment_which_they_win_over(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = {
        "PORT": "1",
        "MAX_QUEUE": "2",
        "SERVED_MODEL_NAME": "a b",
        "MODEL": "m",
        "REQUEST_TIMEOUT": "3.5",
    }
    for name, value in twins.items():
        monkeypatch.setenv(f"INFINILM_{name}", value)
    found = parser().parse_args(["serve", "--max-queue", "9"])
    assert (found.port, found.max_queue, found.served_model_name) == (1, 9, ["a", "b"])
    assert (found.model, found.request_timeout) == ("m", 3.5)


@pytest.mark.parametrize(
    "arguments", ["--lora a=1 b=2", "--lora a=1 --lora b=2", "--lora a=1 --lora-modules b=2"]
)
def test_adapters_stand_after_one_option_or_each_after_its_own(
    arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINILM_LORA", "c=3 d=4")
    assert parser().parse_args(["serve", *arguments.split()]).lora == ["a=1", "b=2"]
    assert parser().parse_args(["serve"]).lora == ["c=3", "d=4"]


def test_origins_of_pages_are_those_that_browsers_send() -> None:
    for arguments in (["https://a.b/", "tauri://localhost"], ['["https://a.b", "tauri://localhost"]']):
        given: Any = parser().parse_args(["serve", "--allowed-origins", *arguments])
        assert origins(given.allowed_origins) == ("https://a.b", "tauri://localhost")
    assert origins(["*"]) == ("*",) and origins([]) == ()


def test_a_model_is_named_in_its_place_or_by_an_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["a"], ["--model", "a"], ["a", "--model", "a"], ["--model=a", "--port", "1", "a"]):
        assert parser().parse_args(["serve", *arguments]).model == "a"
    assert main(["serve", "a", "--model", "b"]) == 1
    assert "MODEL is 'a' and 'b'; give one of them" in capsys.readouterr().err
    monkeypatch.setenv("INFINILM_MODEL", "c")
    assert parser().parse_args(["serve", "--model", "a"]).model == "a"
    assert parser().parse_args(["serve"]).model == "c"


def test_every_option_that_is_promised_is_there() -> None:
    promised = """host port uds api-key api-key-file max-model-len max-num-seqs max-queue max-queue-tokens
        served-model-name chat-template quantize threads kv-cache-memory request-timeout log-level"""
    found = vars(parser().parse_args(["serve"]))
    assert [name for name in promised.split() if name.replace("-", "_") not in found] == []


def test_keys_come_from_the_option_and_the_lines_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\n two \n")
    given: Any = parser().parse_args(["serve", "--api-key", "zero", "--api-key-file", str(tmp_path / "keys")])
    assert api_keys(given) == ("zero", "one", "two")


def test_a_file_of_keys_is_utf_8_in_any_locale(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("schlüssel", encoding="utf-8")
    code = (
        "import sys; from infinilm.cli import parser; from infinilm.cli.serve import api_keys\n"
        "print(ascii(api_keys(parser().parse_args(['serve', '--api-key-file', sys.argv[1]]))))"
    )
    result = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code, str(tmp_path / "keys")],
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "('schl\\xfcssel',)\n", result.stderr


def test_a_model_is_called_by_its_id_or_the_last_part_of_its_path(folder: Path) -> None:
    assert served_name(None) == "SmolLM2-135M-Instruct"
    assert served_name("org/name:Q4_K_M") == "org/name:Q4_K_M" and served_name(str(folder)) == folder.name


def test_a_split_model_is_called_by_what_its_parts_share(tmp_path: Path) -> None:
    first = tmp_path / "tiny-00001-of-00003.gguf"
    first.touch()
    assert served_name(str(first)) == "tiny"


def test_a_model_in_the_home_folder_is_called_by_the_last_part_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.gguf").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert served_name("~/tiny.gguf") == "tiny"
