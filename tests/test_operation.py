"""The server as those see it who run it: its metrics and its page, how it begins, drains, ends and dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from engines import write_model
from patience import PATIENCE, is_gone, wait_until
from prometheus_client.parser import text_string_to_metric_families
from servers import ENDLESS, GREEDY, NAME, Running, read_until, running
from warm import COMMAND, StartPython, start_afresh

from infinilm import AsyncLLM, cli
from infinilm.engine.stats import Histogram
from infinilm.server import serve, service
from infinilm.server.exchange import Settings
from infinilm.server.pages import CONTENT_SECURITY_POLICY, page_files
from infinilm.server.sockets import inet_socket
from infinilm.server.tally import counts_up_to

pytestmark = pytest.mark.usefixtures("one_thread", "logs_as_before")

PROMPT = "a prompt that fills some blocks of sixteen tokens, so that it will be found a second time"
OWN = {"model_name": NAME, "engine": "0"}


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    with running(folder) as made:
        yield made
        made.check_idle()


# ---- metrics -----------------------------------------------------------------------------------------------


def scrape(server: Running) -> dict[str, float]:
    """Name and labels, but for those that all have, to value"""
    text = server.http.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in OWN}
            assert not sample.name.startswith("vllm:") or OWN.items() <= sample.labels.items(), sample
            found[sample.name.removeprefix("vllm:") + (json.dumps(labels) if labels else "")] = sample.value
    return found


def test_a_scrape_before_any_request_has_every_metric_at_zero(server: Running) -> None:
    found = scrape(server)
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"),
        *("prompt_tokens_cached_total", "generation_tokens_total", "num_preemptions_total"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total", "time_to_first_token_seconds_count"),
        *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
        *("spec_decode_num_accepted_tokens_total", "inter_token_latency_seconds_count"),
        *("e2e_request_latency_seconds_count", "request_queue_time_seconds_count"),
        *("request_prefill_time_seconds_count", "request_decode_time_seconds_count"),
        *("request_inference_time_seconds_count", "request_prompt_tokens_count"),
        *("request_generation_tokens_count", "request_params_n_count", "request_params_max_tokens_count"),
        "iteration_tokens_total_count",
        *(f'request_success_total{{"finished_reason": "{one}"}}' for one in ("stop", "length", "abort")),
    ):
        assert found[name] == 0, name
    assert found["process_resident_memory_bytes"] > 0
    (info,) = (name for name in found if name.startswith("cache_config_info"))
    assert found[info] == 1 and '"block_size": "16"' in info and "num_gpu_blocks" in info


def test_metrics_count_what_was_asked_and_answered(server: Running) -> None:
    usages = [
        server.post("/v1/completions", prompt=PROMPT, max_tokens=7, **GREEDY).json()["usage"] for _ in "ab"
    ]
    found = scrape(server)
    num_prompt = usages[0]["prompt_tokens"]
    num_cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert num_cached >= 64
    assert found["prompt_tokens_total"] == 2 * num_prompt  # cached ones too
    assert found["prompt_tokens_cached_total"] == found["prefix_cache_hits_total"] == num_cached
    assert found["prefix_cache_queries_total"] == 2 * num_prompt
    assert found["generation_tokens_total"] == found["request_generation_tokens_sum"] == 14
    assert found["request_prompt_tokens_sum"] == 2 * num_prompt
    assert found['request_success_total{"finished_reason": "length"}'] == 2
    assert found['request_success_total{"finished_reason": "abort"}'] == 0
    assert found["time_to_first_token_seconds_count"] == found["e2e_request_latency_seconds_count"] == 2
    assert found["inter_token_latency_seconds_count"] == 12  # between 7 tokens of each
    assert found["request_params_max_tokens_sum"] == 14 and found["request_params_n_sum"] == 2
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0


def test_metrics_count_the_tokens_of_each_step(folder: Path) -> None:
    with running(folder, engine={"max_num_batched_tokens": 32}) as server:
        server.post("/v1/completions", prompt=[66] * 70, max_tokens=5, **GREEDY)
        found = scrape(server)
    steps = {bound: found[f'iteration_tokens_total_bucket{{"le": "{bound}.0"}}'] for bound in (1, 8, 16, 32)}
    assert steps == {1: 4, 8: 5, 16: 5, 32: 7}  # 32, 32 and 6 tokens of the prompt, then 4 of the answer
    assert found["iteration_tokens_total_count"] == 7 and found["iteration_tokens_total_sum"] == 70 + 4


def test_the_parts_of_a_requests_time_add_up(server: Running) -> None:
    server.chat("hello", max_tokens=20, **GREEDY)
    found = scrape(server)
    prefill, decode = found["request_prefill_time_seconds_sum"], found["request_decode_time_seconds_sum"]
    inference, queue = found["request_inference_time_seconds_sum"], found["request_queue_time_seconds_sum"]
    assert min(prefill, decode, queue) > 0
    assert prefill + decode == pytest.approx(inference)
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(queue + prefill)
    assert queue + inference <= found["e2e_request_latency_seconds_sum"]
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(decode)


def test_metrics_show_what_runs_and_who_left(server: Running) -> None:
    with server.ask(stream=True, **ENDLESS) as caller:
        read_until(caller, b'{"content":"')
        found = scrape(server)
        assert found["num_requests_running"] == 1 and 0 < found["kv_cache_usage_perc"] <= 1
        assert found["time_to_first_token_seconds_count"] == 1  # not when it ends only
    server.check_idle()
    found = scrape(server)
    assert found['request_success_total{"finished_reason": "abort"}'] == 1
    assert found["kv_cache_usage_perc"] == 0


def test_who_is_refused_is_no_request_of_the_metrics(server: Running) -> None:
    assert server.chat("hello", max_tokens=0).status_code == 400
    found = scrape(server)
    assert sum(value for name, value in found.items() if name.startswith("request_success")) == 0


def test_answers_are_counted_by_route_and_status_whatever_callers_make_up(server: Running) -> None:
    server.chat("hello", max_tokens=1)
    server.chat("hello", max_tokens=0)
    for path in ("/nothing", "/v1/nothing", "/v1/models/nothing"):
        server.http.get(path)
    server.http.request("BREW", "/v1/chat/completions")
    found = {name: value for name, value in scrape(server).items() if name.startswith("http_requests_total")}
    labels = [tuple(json.loads(name.removeprefix("http_requests_total")).values()) for name in found]
    assert dict(zip(labels, found.values(), strict=True)) == {
        ("/v1/chat/completions", "POST", "200"): 1,
        ("/v1/chat/completions", "POST", "400"): 1,
        ("/v1/chat/completions", "other", "405"): 1,
        ("/v1/models/{name:path}", "GET", "404"): 1,
        ("other", "GET", "404"): 2,
    }


def test_metrics_need_the_key_and_a_model(folder: Path) -> None:
    with running(folder, Settings(keys=("secret",))) as server:
        assert server.http.get("/metrics").status_code == 401
        response = server.http.get("/metrics", headers={"authorization": "Bearer secret"})
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")


def test_a_histogram_counts_a_value_on_a_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1] and histogram.sum == 8.0
    assert counts_up_to(300) == [1, 2, 5, 10, 20, 50, 100, 200]


# ---- the page ----------------------------------------------------------------------------------------------


def test_the_page_is_public_and_sent_with_its_headers(folder: Path) -> None:
    with running(folder, Settings(keys=("secret",))) as server:
        for path, (content, content_type) in page_files().items():
            response = server.http.get(path)
            assert (response.status_code, response.content) == (200, content)
            assert response.headers["content-type"] == content_type
            assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
            head = server.http.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(content))
        assert server.http.get("/v1/models").status_code == 401
        assert server.http.post("/").status_code == 405


# ---- the end -----------------------------------------------------------------------------------------------


def stop(server: Running) -> None:
    """As a signal does"""
    server.process.loop.call_soon_threadsafe(server.process.stop)


def wait_for_calls(server: Running, count: int) -> None:
    wait_until(lambda: len(server.process.server.calls) == count)


def read_all(caller: socket.socket) -> bytes:
    """All that a connection says until it is closed"""
    with caller:
        return read_until(caller, b"never said")


@contextmanager
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) <= before)


def error_in(event: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(event.removeprefix("data: "))["error"]
    return found


def test_a_server_that_is_told_to_end_finishes_answers_and_refuses_new_ones(folder: Path) -> None:
    with no_thread_left(), running(folder, shutdown_seconds=PATIENCE) as server:
        with server.paused():
            streams = [server.ask(stream=True, max_tokens=5, **GREEDY) for _ in range(10)]
            whole = server.ask(max_tokens=5, **GREEDY)
            wait_for_calls(server, 11)
            stop(server)
            wait_until(lambda: server.process.server.refusal)
            for response in (server.chat(), server.http.get("/health"), server.http.get("/v1/models")):
                assert response.status_code == 503 and response.headers["connection"] == "close"
                assert response.json()["error"]["code"] == "shutting_down"
                assert int(response.headers["retry-after"]) >= 1
        assert all(read_all(one).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for one in streams)
        assert b'"completion_tokens":5' in read_all(whole)
        server.thread.join(PATIENCE)
        assert server.failure is None and not server.thread.is_alive()


@pytest.mark.parametrize("is_told_twice", [False, True])
def test_answers_that_take_too_long_end_with_an_error(folder: Path, is_told_twice: bool) -> None:
    with no_thread_left(), running(folder, shutdown_seconds=1e6 if is_told_twice else 0.2) as server:
        stream, whole = server.ask(stream=True, **ENDLESS), server.ask(**ENDLESS)
        read_until(stream, b'{"content":"')
        wait_for_calls(server, 2)
        for _ in range(1 + is_told_twice):
            stop(server)
        *_, error, done, end = read_all(stream).decode().split("\n\n")
        assert error_in(error.split("\n")[-1])["code"] == "shutting_down"
        assert (done, end.split()) == ("data: [DONE]", ["0"])
        head, _, body = read_all(whole).decode().partition("\r\n\r\n")
        assert " 503 " in head and "connection: close" in head
        assert json.loads(body)["error"]["code"] == "shutting_down"
        server.thread.join(PATIENCE)
        assert server.failure is None and not server.thread.is_alive()


def test_a_request_that_comes_after_the_end_began_is_refused(folder: Path) -> None:
    with running(folder, shutdown_seconds=PATIENCE) as server, server.paused():
        late = server.open(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\n")
        other = server.ask(max_tokens=1)
        wait_for_calls(server, 1)
        stop(server)
        wait_until(lambda: server.process.server.refusal)
        late.sendall(b"content-length: 2\r\n\r\n{}")
        assert late.recv(12) == b"HTTP/1.1 503"
        late.close()
        other.close()


def test_a_body_that_is_not_complete_when_the_end_begins_is_refused(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(folder) as server:
        slow = server.open(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n{")
        wait_until(lambda: server.process.server.num_held == 1)
        stop(server)
        assert read_until(slow, b"\r\n").startswith(b"HTTP/1.1 503")
        server.thread.join(PATIENCE)
        slow.close()
    assert not [one.getMessage() for one in caplog.records if one.name == "uvicorn.error"]


def test_an_engine_that_hangs_is_told_by_its_health_and_does_not_keep_requests_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PULSE_SECONDS", 0.05)
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 0.2)
    with running(folder, Settings(request_seconds=0.3)) as server:
        with server.paused():
            response = server.http.get("/health")
            assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"
            assert server.chat(max_tokens=1).json()["error"]["code"] == "request_timeout"
            events = server.chat(max_tokens=1, stream=True).text.split("\n\n")
            assert error_in(events[-3])["code"] == "request_timeout" and events[-2:] == ["data: [DONE]", ""]
        wait_until(lambda: server.http.get("/health").status_code == 200)
        server.check_idle()


# ---- NaN ---------------------------------------------------------------------------------------------------


def spoil(server: Running) -> None:
    """What the cache holds of the longest prompt there is becomes NaN."""
    engine = server.llm.engine
    longest = max(engine.scheduler.running, key=lambda stream: len(stream.request.prompt_token_ids))
    for keys, values in engine.cache.layers:
        keys[longest.block_ids] = values[longest.block_ids] = torch.nan


def test_nan_fails_the_request_that_has_it_and_no_other(server: Running) -> None:
    alone = server.chat("neighbour", max_tokens=300, **GREEDY).json()["choices"]
    body = {"prompt": PROMPT, "max_tokens": 6, "logprobs": 5, **GREEDY}
    before = server.post("/v1/completions", **body, cache_salt="before").json()["choices"]
    with ThreadPoolExecutor(2) as threads:
        neighbour = threads.submit(server.chat, "neighbour", max_tokens=300, **GREEDY)
        with server.ask("/v1/completions", prompt=PROMPT, stream=True, **ENDLESS) as caller:
            read_until(caller, b'"text":')
            spoilt = server.llm.run(lambda: spoil(server))
            asyncio.run_coroutine_threadsafe(spoilt, server.process.loop).result()
            *_, error, done, _ = read_until(caller, b"\r\n0\r\n").decode().split("\n\n")
        assert error_in(error.split("\n")[-1])["type"] == "server_error" and "[DONE]" in done
        assert neighbour.result().json()["choices"] == alone
    answer = server.post("/v1/completions", **body).json()
    assert answer["choices"] == before and answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


class Death(Exception):
    """What the engine dies of"""


def kill_engine(llm: AsyncLLM) -> None:
    def die() -> None:
        raise Death("no more memory\nin the world")

    llm._worker.inbox.put(die)


def serve_until_dead(folder: Path, ask: Callable[[httpx.Client, AsyncLLM], None]) -> int:
    """The status of a process, one of whose callers does this"""
    made: list[AsyncLLM] = []

    def load() -> AsyncLLM:
        made.append(AsyncLLM(folder, kv_cache_memory="32MB"))
        return made[0]

    def call() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http:
            wait_until(lambda: made and http.get("/health").status_code == 200)
            ask(http, made[0])

    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    caller = threading.Thread(target=call)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        with no_thread_left():
            caller.start()
            return serve.run(serve.Options(port=port, names=(NAME,)), load)
    finally:
        caller.join()
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)  # which a process that was told to end ignores


def fail_in_a_step(llm: AsyncLLM) -> None:
    def run(work: Any) -> Any:
        raise Death("no more memory\nin the world")

    llm.engine.runner.launch = run  # type: ignore[method-assign]


@pytest.mark.parametrize("kill", [kill_engine, fail_in_a_step])
def test_when_the_engine_dies_all_are_told_and_the_process_fails(
    kill: Callable[[AsyncLLM], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}

    def ask(http: httpx.Client, llm: AsyncLLM) -> None:
        body = {"prompt": "a", "stream": True, **ENDLESS}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            kill(llm)
            found["stream"] = [line for line in lines if line][-2:]
        found["gets"] = {http.get(path).status_code for path in ("/health", "/v1/models", "/version")}
        found["new"] = http.post("/v1/completions", json={"prompt": "a"})
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)  # nobody need wait any longer

    monkeypatch.setattr(serve, "DEAD_SECONDS", PATIENCE)
    assert serve_until_dead(folder, ask) == 1
    error, done = found["stream"]
    assert error_in(error) == found["new"].json()["error"] and done == "data: [DONE]"
    assert found["gets"] == {503} and found["new"].status_code == 503
    assert "memory" not in found["new"].text  # what it died of is the log's


def test_what_the_engine_died_of_is_the_last_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "DEAD_SECONDS", 0.0)
    assert serve_until_dead(folder, lambda http, llm: kill_engine(llm)) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("the engine died: no more memory in the world")


def test_a_death_without_a_word_is_told_by_its_kind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def die() -> None:
        raise MemoryError

    monkeypatch.setattr(serve, "DEAD_SECONDS", 0.0)
    assert serve_until_dead(folder, lambda http, llm: llm._worker.inbox.put(die)) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("the engine died: MemoryError")


# ---- the beginning -----------------------------------------------------------------------------------------


def no_model(folder: Path, port: int) -> list[str]:
    return [str(folder / "nothing"), "--port", "0"]


def port_in_use(folder: Path, port: int) -> list[str]:
    return [str(folder), "--port", str(port)]


def no_key_file(folder: Path, port: int) -> list[str]:
    return [str(folder), "--api-key-file", str(folder / "nothing")]


def empty_key_file(folder: Path, port: int) -> list[str]:
    (folder / "keys").write_text("\n\n")
    return [str(folder), "--api-key-file", str(folder / "keys")]


def no_folder_for_prefixes(folder: Path, port: int) -> list[str]:
    return [str(folder), "--port", "0", "--prefix-cache-file", str(folder / "nowhere" / "file")]


def folder_for_prefixes(folder: Path, port: int) -> list[str]:
    return [str(folder), "--port", "0", "--prefix-cache-file", str(folder)]


def no_time_to_end(folder: Path, port: int) -> list[str]:
    return [str(folder), "--port", "0", "--shutdown-timeout", "-1"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (no_model, "nothing"),
        (port_in_use, "Address already in use"),
        (no_key_file, "No such file"),
        (empty_key_file, "has no key"),
        (no_folder_for_prefixes, "nowhere is no folder"),
        (folder_for_prefixes, "m is there, and is no file"),
        (no_time_to_end, "--shutdown-timeout must be"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_keeps_it_from_starting_is_told_in_one_last_line(
    arguments: Callable[[Path, int], list[str]],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        status = cli.main(["serve", *arguments(write_model(tmp_path / "m"), sock.getsockname()[1])])
    lines = capsys.readouterr().err.splitlines()
    assert status == 1 and lines[-1].startswith("infinilm: error: ") and told in lines[-1]
    assert not any(line.startswith(("Traceback", "  File")) for line in lines)


# ---- prefixes ----------------------------------------------------------------------------------------------


def logprobs(http: httpx.Client) -> tuple[int, Any]:
    body = {"prompt": PROMPT, "max_tokens": 6, "logprobs": 5, **GREEDY}
    answer = http.post("/v1/completions", json=body).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["logprobs"]


@pytest.mark.parametrize("content", [b"", b"no prefixes", b"\x08\0\0\0\0\0\0\0{}      "], ids=repr)
def test_a_file_without_prefixes_is_a_warning_and_replaced_at_the_end(
    content: bytes, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prefixes"
    path.write_bytes(content)
    with running(folder, prefix_file=path) as server:
        assert logprobs(server.http)[0] == 0
    assert "warning: no prefixes are known" in capsys.readouterr().err
    with running(folder, prefix_file=path) as server:
        assert logprobs(server.http)[0] >= 64
    assert os.listdir(tmp_path) == ["prefixes"]


def test_prefixes_of_another_model_are_a_warning(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prefixes"
    for seed, expected in ((1, 0), (2, 0)):
        other = write_model(tmp_path / str(seed), max_position_embeddings=1000, seed=seed)
        with running(other, prefix_file=path) as server:
            assert logprobs(server.http)[0] == expected
    assert "weights is" in capsys.readouterr().err


# ---- the process -------------------------------------------------------------------------------------------


class Child:
    """`infinilm serve` in a process of its own"""

    def __init__(self, start: StartPython, folder: Path, *arguments: str) -> None:
        options = ["--port", "0", "--threads", "1", "--kv-cache-memory", "32MB"]
        reader, writer = os.pipe()
        command = [COMMAND, "serve", str(folder), *options, *arguments]
        self.process = start(*command, files=(None, None, writer))
        os.close(writer)
        self.stderr = os.fdopen(reader)
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self.read)
        self.reader.start()
        wait_until(lambda: self.process.poll() is not None or any("ready:" in one for one in self.lines))
        url = next(found[0] for one in self.lines if (found := re.search(r"http://\S+\d", one)))
        self.http = httpx.Client(base_url=url, timeout=PATIENCE)

    def read(self) -> None:
        for line in self.stderr:
            self.lines.append(line.rstrip())

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        self.http.close()
        with self.process:
            self.process.kill()
        self.reader.join()
        self.stderr.close()


@contextmanager
def child(start: StartPython, folder: Path, *arguments: str) -> Iterator[Child]:
    made = Child(start, folder, *arguments)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def lone(folder: Path, start_python: StartPython) -> Iterator[Child]:
    """For tests of which the last kills it"""
    with child(start_python, folder) as made:
        yield made


def test_sigterm_ends_a_process_well_and_the_next_one_knows_its_prefixes_bit_for_bit(
    folder: Path, tmp_path: Path, start_python: StartPython
) -> None:
    path = tmp_path / "prefixes"
    with child(start_python, folder, "--prefix-cache-file", str(path)) as first:
        computed = logprobs(first.http)
        first.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
        children = first.children()
        assert children  # it renders templates
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(PATIENCE) == 0, first.lines
        wait_until(lambda: all(map(is_gone, children)))
    with running(folder, prefix_file=path) as second:
        found = logprobs(second.http)
    assert (computed[0], found[0] >= 64) == (0, True)
    assert found[1] == computed[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_however_often_it_is_told_to_end_its_status_is_0(number: signal.Signals, folder: Path) -> None:
    with child(start_afresh, folder) as server:
        while server.process.poll() is None:  # up to the last moment of Python itself
            server.process.send_signal(number)
            time.sleep(0.01)
        assert server.process.returncode == 0, server.lines


def test_where_no_file_is_left_callers_wait_and_one_line_says_so(lone: Child) -> None:
    process, place = psutil.Process(lone.process.pid), (lone.http.base_url.host, lone.http.base_url.port)
    most, also_most = process.rlimit(psutil.RLIMIT_NOFILE)
    assert most == also_most  # all that there may be
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 2, most))
    callers = [socket.create_connection(place) for _ in range(8)]
    wait_until(lambda: any("too many files" in line for line in lone.lines))
    for caller in callers:
        caller.close()
    assert lone.http.get("/health").status_code == 200
    process.rlimit(psutil.RLIMIT_NOFILE, (most, most))
    assert len([line for line in lone.lines if "too many files" in line or "Error" in line]) == 1


def test_nothing_outlives_a_process_that_is_killed(lone: Child) -> None:
    lone.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    children, port = lone.children(), lone.http.base_url.port
    assert children and port is not None
    lone.process.kill()
    lone.process.wait()
    wait_until(lambda: all(map(is_gone, children)))
    inet_socket("127.0.0.1", port).close()  # which can be listened on at once
