"""The load generator: what it asks, when, and what it makes of answers good and bad."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import engines
import pytest
import servers

from infinilm import cli, load
from infinilm.load import Answer, Arrivals, Failure, Load, Query, Target
from infinilm.load.client import headers_of, note
from infinilm.load.traffic import MAX_RATES
from infinilm.load.wire import Address, head_of

CHUNK = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}\n\n'
DONE = b"data: [DONE]\n\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
UNBOUNDED = OK + b"\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[servers.Running]:
    with servers.running(engines.write_model(tmp_path_factory.mktemp("tiny"))) as running:
        yield running
        running.check_idle()


# ---- what is asked ----


def test_lengths_are_drawn_around_their_means_and_are_the_same_in_every_run() -> None:
    asked = [load.queries(Load(2000, 100, 40), run) for run in range(2)]
    prompts, answers = ([len(one.prompt.split()) for one in asked[0]], [one.num_tokens for one in asked[0]])  # type: ignore[union-attr]
    assert statistics.fmean(prompts) == pytest.approx(100, rel=0.05) and max(prompts) <= 400
    assert statistics.fmean(answers) == pytest.approx(40, rel=0.05) and min(answers) >= 1
    assert len(set(prompts)) > 50
    assert [len(one.prompt.split()) for one in asked[1]] == prompts  # type: ignore[union-attr]
    assert not {one.prompt for one in asked[0]} & {one.prompt for one in asked[1]}


def test_fixed_lengths_and_token_ids_are_as_said() -> None:
    asked = load.queries(Load(5, 7, 3, "fixed", token_ids=10), 0)
    assert {len(one.prompt) for one in asked} == {7} and {one.num_tokens for one in asked} == {3}
    assert all(0 <= token < 10 for one in asked for token in one.prompt)


def test_a_seed_repeats_the_load() -> None:
    assert load.queries(Load(5, seed=3), 0) == load.queries(Load(5, seed=3), 0)
    assert load.queries(Load(5, seed=3), 0) != load.queries(Load(5, seed=4), 0)


def test_arrivals_are_those_of_a_poisson_process() -> None:
    moments = Arrivals(5.0).moments(4000, seed=1)
    gaps = [b - a for a, b in zip(moments, moments[1:], strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)  # as the mean: exponential
    assert Arrivals().moments(3, seed=1) == [0.0, 0.0, 0.0]


# ---- answers that are no good, and odd ones that are ----


def answered(reply: bytes, timeout: float = 30.0, **options: Any) -> Answer:
    """What is made of a server that says this and closes the connection, or is silent for ever after it"""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for i in range(0, len(reply), 7):  # in small pieces
            writer.write(reply[i : i + 7])
            await writer.drain()
        if options.get("is_silent"):
            await reader.read()
        writer.close()

    async def ask() -> Answer:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            target = Target(Address.of(f"http://127.0.0.1:{port}"), "m", timeout=timeout)
            (answer,) = await load.run(target, [Query("hello", 5)], Arrivals())
        return answer

    return asyncio.run(ask())


def chunked(*parts: bytes) -> bytes:
    head = OK + b"transfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x;x=y\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])


GOOD = {
    "chunked": chunked(CHUNK[:9], CHUNK[9:] + CHUNK, LAST, USAGE + DONE),
    "with a length": OK
    + b"content-length: %d\r\n\r\n" % len(CHUNK + CHUNK + LAST + USAGE)
    + CHUNK
    + CHUNK
    + LAST
    + USAGE,
    "up to the end": UNBOUNDED + CHUNK + b": a comment\n\n" + CHUNK + USAGE + DONE,
    "with other ends of lines": UNBOUNDED + (CHUNK + CHUNK + USAGE + DONE).replace(b"\n", b"\r\n"),
    "without spaces": UNBOUNDED + (CHUNK + CHUNK + USAGE + DONE).replace(b"data: ", b"data:"),
}


@pytest.mark.parametrize("reply", GOOD.values(), ids=GOOD.keys())
def test_an_answer_is_read_however_it_is_framed(reply: bytes) -> None:
    answer = answered(reply)
    assert answer.error is None, answer.told
    assert (len(answer.moments), answer.num_tokens, answer.num_prompt) == (2, 5, 3)


def test_without_usage_tokens_are_counted_by_chunks() -> None:
    found = load.measured([answered(UNBOUNDED + CHUNK * 3 + LAST + DONE)], Arrivals(), {})
    assert (found["total_output_tokens"], found["tokens_counted_by"]) == (3, "chunks")
    assert found["tokens_per_chunk"] is None


REFUSED = b'HTTP/1.1 429 Too Many\r\ncontent-length: 36\r\n\r\n{"error": {"message": "try later..."}}'
BAD = {
    "HTTP 429": REFUSED,
    "error event full": UNBOUNDED + CHUNK + b'data: {"error": {"message": "x", "type": "full"}}\n\n',
    "error event": UNBOUNDED + b'data: {"error": "x"}\n\n',
    "cut off": UNBOUNDED + CHUNK,
    "EOFError": chunked(CHUNK, LAST + DONE)[:-40],
    "no text": UNBOUNDED + LAST + DONE,
    "not JSON": UNBOUNDED + b"data: {oh\n\n",
    "not a chunk": UNBOUNDED + b'data: {"choices": [3]}\n\n',
    "WireError": b"SSH-2.0-nothing\r\n",
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_request_that_fails_is_counted_by_what_went_wrong(kind: str) -> None:
    found = load.measured([answered(BAD[kind])], Arrivals(), {})
    assert (found["completed"], found["failed"], found["errors"]) == (0, 1, {kind: 1})
    assert found["error_messages"][kind] and "1 failed" in load.complaints(found)[0]
    assert found["total_output_tokens"] == 0 and load.row(found)


@pytest.mark.parametrize("size", [b"zz\r\n", b"-5\r\n", b"fffffffff\r\n", b" " * 2000 + b"0\r\n\r\n"])
def test_a_size_of_a_chunk_that_is_none_is_told(size: bytes) -> None:
    assert answered(OK + b"transfer-encoding: chunked\r\n\r\n" + size).error == "WireError"


def test_a_length_that_is_none_is_told() -> None:
    assert answered(OK + b"content-length: -5\r\n\r\n").error == "WireError"


def test_headers_without_end_are_told() -> None:
    assert answered(OK + b"a: b\r\n" * 1000).error == "WireError"
    assert answered(OK + b"a" * 200_000).error == "WireError"


def test_a_server_that_falls_silent_is_waited_for_up_to_the_limit() -> None:
    answer = answered(UNBOUNDED + CHUNK, timeout=0.2, is_silent=True)
    assert answer.error == "timeout" and "0.2 s" in answer.told


def test_nobody_there_is_an_error_like_others() -> None:
    target = Target(Address.of("http://127.0.0.1:1"), "m")
    (answer,) = asyncio.run(load.run(target, [Query("hello", 5)], Arrivals()))
    assert answer.error == "ConnectionRefusedError"


def test_an_error_of_our_own_is_not_swallowed() -> None:
    with pytest.raises(Failure, match="not JSON"):
        note(Answer(0.0), b"[1, 2]")


def test_a_key_goes_as_the_bytes_that_a_server_was_given() -> None:
    head = head_of(Address("localhost"), "GET", "/models", headers_of("clé-ключ"), 0)
    assert "authorization: Bearer clé-ключ\r\n".encode() in head


@pytest.mark.parametrize(
    ("url", "authority", "prefix"),
    [
        ("http://here:8000", "here:8000", "/v1"),
        ("http://here:8000/v1/", "here:8000", "/v1"),
        ("https://here/api", "here:443", "/api/v1"),
        ("http://[::1]:80", "[::1]:80", "/v1"),
        ("unix:/run/a.sock", "localhost", "/v1"),
    ],
)
def test_urls_are_read_with_and_without_v1(url: str, authority: str, prefix: str) -> None:
    address = Address.of(url)
    assert (address.authority, address.prefix) == (authority, prefix)


@pytest.mark.parametrize(
    "url",
    [
        *("here:8000", "ftp://here", "http://", "", "http://here:99999", "http://here:0"),
        *("http://a/?b=c", "http://a/#b", "http://me:secret@here:8000"),
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="the base URL must be"):
        Address.of(url)


# ---- what came of them ----


def answer(first: float, gap: float, num_chunks: int = 5, **options: Any) -> Answer:
    moments = [first + gap * i for i in range(num_chunks)]
    return Answer(0.0, 0.0, moments[-1], moments, 10, **{"num_usage": num_chunks, **options})


def test_percentiles_rates_and_goodput_are_those_of_whole_answers() -> None:
    failed = Answer(0.0, 0.0, 2.0, [0.1], error="HTTP 500")
    found = load.measured(
        [answer(0.1, 0.01), answer(0.4, 0.1), failed], Arrivals(3.0), {"ttft": 0.2, "itl": 0.05}
    )
    assert found["requests_per_second"] == 1.0 and found["good_requests_per_second"] == 0.5
    assert found["output_tokens_per_second"] == 5.0 and found["total_tokens_per_second"] == 15.0
    assert found["time_to_first_token_seconds"] == {"mean": 0.25, "p50": 0.1, "p90": 0.4, "p99": 0.4}
    assert found["p99_itl_ms"] == pytest.approx(100) and found["request_goodput"] == 0.5


def test_several_tokens_in_a_chunk_are_told() -> None:
    found = load.measured([answer(0.1, 0.1, num_usage=9)], Arrivals(), {})
    assert found["tokens_per_chunk"] == 1.8
    assert found["mean_itl_ms"] == pytest.approx(100) and found["mean_tpot_ms"] == pytest.approx(50)


# ---- a real server ----


def test_every_request_is_answered_in_full(server: servers.Running) -> None:
    target = Target(Address.of(server.url), servers.NAME, extra={"ignore_eos": True})
    asked = load.queries(Load(12, 20, 6), 0)
    answers = asyncio.run(load.run(target, asked, Arrivals(rate=200.0)))
    assert [one.error for one in answers] == [None] * 12
    assert [one.num_tokens for one in answers] == [one.num_tokens for one in asked]
    assert all(one.due <= one.sent <= one.moments[0] <= one.moments[-1] <= one.end for one in answers)


def test_no_more_requests_are_under_way_than_there_may_be(server: servers.Running) -> None:
    target = Target(Address.of(server.url), servers.NAME, endpoint="chat")
    answers = asyncio.run(load.run(target, load.queries(Load(9, 4, 4), 0), Arrivals(concurrency=3)))
    moments = sorted([(one.sent, 1) for one in answers] + [(one.end, -1) for one in answers])
    at_once = [sum(change for _, change in moments[: i + 1]) for i in range(len(moments))]
    assert max(at_once) == 3 and not any(one.error for one in answers)


def test_a_sweep_ends_when_a_doubled_rate_brings_no_more(server: servers.Running) -> None:
    target = Target(Address.of(server.url), servers.NAME)

    async def rates() -> list[dict[str, Any]]:
        return [one async for one in load.sweep(target, Load(8, 8, 4), [], {})]

    found = asyncio.run(rates())
    assert 2 <= len(found) <= MAX_RATES
    assert [one["request_rate"] for one in found] == [
        found[0]["request_rate"] * 2**i for i in range(len(found))
    ]
    assert found[-1]["requests_per_second"] < 1.1 * max(one["requests_per_second"] for one in found[:-1])


def test_the_command_prints_a_json_object_a_rate_and_draws_a_chart(
    server: servers.Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = ["--chart", str(tmp_path / "load.png")] if find_spec("matplotlib") else []
    sizes = ["--num-prompts", "4", "--input-len", "8", "--output-len", "3", "--token-ids", "200"]
    command = ["bench", "serve", "--base-url", server.url, "--request-rate", "50", "100", "--json"]
    assert cli.main([*command, *sizes, *chart, "--goodput", "ttft:60", "itl:60"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["request_rate"] for one in lines] == [50.0, 100.0]
    for one in lines:
        assert (one["completed"], one["failed"], one["model_id"]) == (4, 0, servers.NAME)
        assert one["request_goodput"] == one["request_throughput"] > 0
    assert not chart or (tmp_path / "load.png").stat().st_size > 0


def test_the_command_prints_a_table_of_clients(
    server: servers.Running, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--num-prompts", "4", "--input-len", "8", "--output-len", "3"]
    assert cli.main(["bench", "serve", "--base-url", server.url, "--max-concurrency", "2", *sizes]) == 0
    assert "2 at once" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--base-url", "http://127.0.0.1:1"], "no server at http://127.0.0.1:1: "),
        (["--base-url", "unix:/no/such.sock"], "no server at unix:/no/such.sock: "),
        (["--timeout", "-1"], "--timeout must be a number of seconds above 0"),
        (["--base-url", "nonsense"], "the base URL must be"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--num-prompts", "0"], "num-prompts must be at least 1"),
        (["--token-ids", "5", "--endpoint", "chat"], "--token-ids needs --endpoint completions"),
        (["--chart", "/nowhere/at/all.png"], "--chart"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", *arguments]) == 1
    assert told in capsys.readouterr().err.strip()


def test_a_chart_that_could_not_be_drawn_is_refused_before_any_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["bench", "serve", "--chart", str(tmp_path / "load.table")]) == 1
    assert "--chart: 'load.table' must end in one of" in capsys.readouterr().err


def test_a_model_that_is_not_there_ends_it_at_the_first_request(
    server: servers.Running, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", "--base-url", server.url, "--model", "other"]) == 1
    assert "a first request failed, HTTP 404" in capsys.readouterr().err


def test_the_load_generator_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, infinilm.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
