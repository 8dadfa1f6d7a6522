"""What those send who mean the server ill: it is refused by its name, another caller hears meanwhile what it
hears alone, and nothing is left of it: no block, no thread, no file, no task, no process.
"""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any

import httpx
import pytest
from engines import VOCAB_SIZE, write_model
from patience import PATIENCE, wait_until
from servers import Running, read_until, request_of, running

from infinilm.server.app import OPERATIONS
from infinilm.server.exchange import Settings
from infinilm.server.turn import Turn

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc"),
]

NUM_ROWS = VOCAB_SIZE + 6  # of the model's head: the last ones are padding, which no token has
GREEDY = {"temperature": 0, "ignore_eos": True}
CONTROL = [{"role": "user", "content": "control"}]
HELLO = [{"role": "user", "content": "x"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
# The least that each path takes
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_completion_tokens": 2},
    COMPLETIONS: {"prompt": "x", "max_tokens": 2},
    RESPONSES: {"input": "x", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "x"},
    MESSAGES: {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v2/rerank": {"query": "x", "documents": ["y"]},
    "/rerank": {"query": "x", "documents": ["y"]},
    "/v1/score": {"text_1": "x", "text_2": "y"},
    "/score": {"text_1": "x", "text_2": "y"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
DRAWN = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
POSTS = [operation for operation in OPERATIONS if operation.body is not None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("tiny"), max_position_embeddings=2000, vocab_size=NUM_ROWS, seed=7
    )


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder) as made:
        warm_up(made)
        yield made


@pytest.fixture
def abused(server: Running) -> Iterator[Running]:
    with another_hears_the_same(server):
        yield server


# ---- what holds throughout ---------------------------------------------------------------------------------


def control(server: Running, http: httpx.Client) -> list[Any]:
    """What somebody hears who has nothing to do with it"""
    body = {"messages": CONTROL, "max_tokens": 32, "stream": True}
    events = http.post(f"{server.url}{CHAT}", json={**body, **GREEDY}).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(one.removeprefix("data: ")) for one in events[:-2] if not one.startswith(":")]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    return [text, chunks[-1]["choices"][0]["finish_reason"]]


def warm_up(server: Running) -> None:
    """Threads and processes are started by the first who need them, and kept."""
    service = server.process.server.service
    assert service is not None
    for pool in (service._threads, server.llm._encoders):
        both = threading.Barrier(3)
        for _ in range(2):
            pool.submit(both.wait, PATIENCE)
        both.wait(PATIENCE)
    assert server.chat(max_tokens=9, structured_outputs={"regex": "[ab]*"}).status_code == 200
    server.check_idle()


@contextmanager
def another_hears_the_same(server: Running) -> Iterator[None]:
    """A caller streams one answer after another, which are all as when it is alone; then all is as before."""
    before = server.open_things()
    heard: list[list[Any]] = []
    is_over = threading.Event()
    with httpx.Client(timeout=PATIENCE, verify=False) as http:
        alone = control(server, http)

        def listen() -> None:
            while not is_over.is_set():
                heard.append(control(server, http))

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(PATIENCE)
        assert heard and all(one == alone for one in [*heard, control(server, http)])
    assert server.http.get("/health").status_code == 200
    server.check_idle()
    wait_until(lambda: all(now <= then for now, then in zip(server.open_things(), before, strict=True)))


def ask(server: Running, path: str, **body: Any) -> httpx.Response:
    """JSON by hand: clients' own encoders refuse halves of surrogate pairs, and what is no number."""
    return server.http.post(path, content=json.dumps({**BODIES[path], **body}).encode())


def refused(response: httpx.Response, name: str | None = None, status: int = 400) -> str:
    """The message of an error, which has its API's shape, names the field and tells nothing of our inside"""
    assert response.status_code == status, (name, response.text)
    is_anthropics = response.url.path.startswith(MESSAGES)
    found = response.json()["error"]
    assert set(found) == ({"type", "message"} if is_anthropics else {"message", "type", "param", "code"})
    kind = "not_found_error" if is_anthropics and status == 404 else "invalid_request_error"
    assert found["type"] == kind
    assert not re.search(r"Traceback|0x[0-9a-f]{6}|site-packages|/infinilm|\.py", response.text)
    if name is not None:
        assert name in found["message"] and found.get("param", name) == name, response.text
    return str(found["message"])


def test_every_path_is_abused() -> None:
    assert {operation.path for operation in POSTS} == BODIES.keys()


# ---- bodies ------------------------------------------------------------------------------------------------

NO_OBJECTS = (
    *(b"", b"hello", b"[1]", b'{"messages": [', b'{"prompt": "\xff\xfe"}'),
    *(b"[" * 100_000, b'{"a":' * 100_000),
)


def test_what_is_no_object_of_json_is_refused(abused: Running) -> None:
    for path in BODIES:
        for body in NO_OBJECTS:
            refused(abused.http.post(path, content=body))


def nested(depth: int, size: int) -> bytes:
    head = b'{"input": "x", "max_output_tokens": 2, "instructions": "%s", "metadata": ' % (b"x" * size)
    return head + b'{"[": ' * depth + b'"' + b"[" * 300 + b'"' + b"}" * (depth + 1)


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_is_nested_too_deep_is_refused_in_bodies_small_and_large(size: int, abused: Running) -> None:
    """Some are read by another thread than writes what is told again of them, and has another depth left."""
    for depth in (256, 900, *range(960, 990, 2)):
        answer = abused.http.post(RESPONSES, content=nested(depth, size))
        assert answer.status_code == 400, depth
        assert re.search("nested more than 256|recursion depth", answer.text), depth
    assert abused.http.post(RESPONSES, content=nested(255, 10)).status_code == 200


HALF = "\ud800"
HALVES: list[tuple[str, str, Any]] = [
    (CHAT, "messages", [{"role": "user", "content": HALF}]),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "text", "text": HALF}]}]),
    (CHAT, "stop", [HALF]),
    (CHAT, "bad_words", [HALF]),
    (CHAT, "cache_salt", HALF),
    (CHAT, "structured_outputs", {"regex": HALF}),
    (CHAT, "structured_outputs", {"json": {"const": HALF}}),
    (COMPLETIONS, "prompt", HALF),
    (COMPLETIONS, "prompt", ["x", HALF]),
    (RESPONSES, "input", HALF),
    (RESPONSES, "cache_salt", HALF),
    (MESSAGES, "messages", [{"role": "user", "content": HALF}]),
    (MESSAGES, "stop_sequences", [HALF]),
    (MESSAGES, "cache_salt", HALF),
    ("/v1/embeddings", "input", HALF),
    ("/v1/embeddings", "cache_salt", HALF),
    ("/v1/rerank", "documents", [HALF]),
    ("/v1/score", "text_2", [HALF]),
    ("/tokenize", "prompt", HALF),
]


def test_half_a_surrogate_pair_is_no_text(abused: Running) -> None:
    for path, name, value in HALVES:
        refused(ask(abused, path, **{name: value}), name)


# ---- numbers -----------------------------------------------------------------------------------------------

NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", '"0.5"', "true", "[]", "{}")
# Beyond what each may be; seeds, priorities and penalties below 0 are some.
OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "temperature": (-1,),
    "top_p": (-1, 0, 1.5),
    "min_p": (-1, 2),
    "presence_penalty": (-2.5, 2.5),
    "frequency_penalty": (-2.5, 2.5),
    "repetition_penalty": (-1, 0),
    "seed": (0.5, 1 << 64, -(1 << 64)),
    "top_k": (-5, 0.5, 1 << 63),
    "min_tokens": (-1, 0.5, 1 << 63),
    "max_tokens": (-1, 0.5, 1 << 31, 1 << 63),
    "max_completion_tokens": (-1, 0, 0.5, 1 << 31, 1 << 63),
    "max_output_tokens": (-1, 0, 0.5, 1 << 31, 1 << 63),
    "n": (-1, 0, 0.5, 1_000_000),
    "best_of": (-1, 0, 0.5, 2, 1_000_000),
    "logprobs": (-1, 0.5, 1_000_000),
    "top_logprobs": (-1, 0.5, 21),
    "dimensions": (-1, 0, 0.5, 1 << 63),
    "top_n": (-1, 0.5),
    "truncate_prompt_tokens": (-2, 0, 0.5, 1 << 63),
    "max_tokens_per_doc": (-1, 0.5),
    "priority": (0.5,),
}


def numbers() -> Iterator[tuple[str, str]]:
    """The paths, and those fields of their bodies that are numbers"""
    for operation in POSTS:
        for name, field in operation.body.model_fields.items() if operation.body else ():
            if is_number(field.annotation):
                yield operation.path, name


def is_number(annotation: Any) -> bool:
    """float, Annotated[int, ...] | None and the like"""
    kind, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if kind is typing.Annotated:
        return is_number(parts[0])
    return annotation in (int, float) or (kind in (typing.Union, UnionType) and any(map(is_number, parts)))


def test_what_is_no_number_is_told_by_its_field(abused: Running) -> None:
    for path, name in numbers():
        for written in NO_NUMBERS:
            body = json.dumps({**BODIES[path], name: "HERE"}).replace('"HERE"', written)
            refused(abused.http.post(path, content=body), name)


def test_a_number_out_of_its_range_is_told_by_its_field(abused: Running) -> None:
    for path, name in numbers():
        if path != f"{MESSAGES}/count_tokens":  # for which nothing is drawn
            for value in OUT_OF_RANGE[name]:
                refused(ask(abused, path, **{name: value}), name)


def test_a_number_that_is_null_has_not_been_given(abused: Running) -> None:
    for path, body in BODIES.items():
        nulls = {name: None for owner, name in numbers() if owner == path and name not in body}
        assert ask(abused, path, **nulls).status_code == 200


def test_a_whole_number_may_be_written_with_a_point(abused: Running) -> None:
    for path, name in numbers():
        plain, pointed = (ask(abused, path, **{name: value}) for value in (1, 1.0))
        assert pointed.status_code == plain.status_code, (path, name, pointed.text)


# ---- too much ----------------------------------------------------------------------------------------------

TOO_MUCH: list[tuple[str, str, Any]] = [
    (CHAT, "n", 1_000_000),
    (COMPLETIONS, "n", 1_000_000),
    (COMPLETIONS, "best_of", 1_000_000),
    (COMPLETIONS, "logprobs", 1_000_000),
    (COMPLETIONS, "suffix", "x"),
    (CHAT, "top_logprobs", 21),
    (CHAT, "max_tokens", 1 << 63),
    (CHAT, "stop", ["x"] * 10_000),
    (COMPLETIONS, "stop", ["x"] * 10_000),
    (CHAT, "stop", "x" * 1_000_000),
    (MESSAGES, "stop_sequences", ["x" * 1_000_000]),
    (MESSAGES, "stop_sequences", ["x"] * 10_000),
    (CHAT, "tools", [{"type": "function", "function": {"name": f"a{i}"}} for i in range(10_000)]),
]


def note_encoded(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[Turn]:
    """The turns that are encoded from now on"""
    service = server.process.server.service
    assert service is not None
    prepare, found = service.prepare, list[Turn]()
    monkeypatch.setattr(service, "prepare", lambda turn, *rest: found.append(turn) or prepare(turn, *rest))
    return found


def memory() -> int:
    """Bytes that are the process's alone, in memory or swapped out"""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return sum(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))


def test_too_much_is_refused_before_a_prompt_is_encoded_and_takes_no_memory(
    abused: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = note_encoded(abused, monkeypatch)
    biases = b'{"messages": [], "logit_bias": {' + b",".join(b'"%d":1' % i for i in range(1_000_000)) + b"}}"
    bodies = [json.dumps({**BODIES[path], name: value}) for path, name, value in TOO_MUCH]
    before = memory()
    for (path, name, _), body in zip(TOO_MUCH, bodies, strict=True):
        refused(abused.http.post(path, content=body), name)
    assert "values" in refused(abused.http.post(CHAT, content=biases))
    assert memory() - before < 50 << 20
    assert all(turn.messages == CONTROL for turn in encoded)


def test_a_body_may_have_as_many_bytes_as_the_limit_says_and_not_one_more(folder: Path) -> None:
    with running(folder, Settings(max_body=1000)) as server:
        for excess, is_chunked in ((0, False), (0, True), (1, False), (1, True)):
            body = json.dumps({"prompt": ""}).encode()
            body = body[:-2] + b"x" * (1000 + excess - len(body)) + body[-2:]
            content: Any = iter([body[:500], body[500:]]) if is_chunked else body
            response = server.http.post("/tokenize", content=content)
            assert response.status_code == (413 if excess else 200), (excess, is_chunked)
        assert "1000 bytes" in refused(response, status=413)
        server.check_idle()


def test_a_length_that_is_a_lie_harms_nobody_else(abused: Running) -> None:
    body = json.dumps(BODIES["/tokenize"]).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n"
    with abused.open(head % (len(body) - 3) + body + b"\r\n\r\n") as sock:  # the rest is the next request
        read = read_until(sock, b"nothing")
        assert [line.split()[1] for line in re.findall(rb"HTTP/1.1[^\r]*", read)] == [b"400", b"400"]
    for lengths in (b"3\r\ncontent-length: 4", b"-3", b"3x", b"3, 4"):
        with abused.open((head.replace(b"%d", b"%b") % lengths) + body) as sock:
            assert read_until(sock, b"nothing").startswith(b"HTTP/1.1 400")
    for chunk in (b"zz\r\nx", b"-1\r\nx", b"1\r\nxxx\r\n"):
        head = b"POST /tokenize HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n"
        with abused.open(head + chunk) as sock:
            assert read_until(sock, b"nothing").startswith(b"HTTP/1.1 400")


def test_a_bomb_is_not_unpacked(abused: Running) -> None:
    bomb = gzip.compress(bytes(50 << 20))
    for encoding in ("gzip", "br", "deflate", "identity, gzip"):
        response = abused.http.post(CHAT, content=bomb, headers={"content-encoding": encoding})
        assert "content-encoding" in refused(response, status=415)


# ---- nothing -----------------------------------------------------------------------------------------------

NOTHING: list[tuple[str, str, Any, int]] = [
    *((COMPLETIONS, "prompt", value, 400) for value in ("", [], [[]], [""], [[], [5]], None)),
    *(("/v1/embeddings", "input", value, 400) for value in ("", [], [[]], [""], None)),
    *((CHAT, "messages", value, 400) for value in ([], None, [None], [{}], [{"role": ""}])),
    (CHAT, "messages", [{"role": "king", "content": "x"}], 400),
    (CHAT, "messages", [{"role": "user", "content": None}], 200),  # as if it were empty
    *((MESSAGES, "messages", value, 400) for value in ([], None, [{"role": "user", "content": None}])),
    (MESSAGES, "messages", [{"role": "user", "content": []}], 400),
    (MESSAGES, "messages", [{"role": "king", "content": "x"}], 400),
    *((RESPONSES, "input", value, 400) for value in ([], None, [{"role": "user", "content": None}])),
    (RESPONSES, "input", [{"role": "king", "content": "x"}], 400),
    *(("/v1/rerank", "documents", value, 400) for value in ([], None, [None])),
    ("/v1/rerank", "query", None, 400),
    *(("/v1/score", name, value, 400) for name in ("text_1", "text_2") for value in ([], None, [None])),
]


def test_nothing_is_refused_by_its_field_or_taken_as_nothing(abused: Running) -> None:
    for path, name, value, status in NOTHING:
        response = ask(abused, path, **{name: value})
        if status == 200:
            assert response.status_code == 200, response.text
        else:
            refused(response, name)


# ---- token ids ---------------------------------------------------------------------------------------------

NO_IDS = ([-1], [NUM_ROWS], [1 << 31], [1 << 63], [1.5], [5, "a"], [True], [None], [[5]])
ID_FIELDS = [
    *((path, name) for path in DRAWN for name in ("stop_token_ids", "allowed_token_ids")),
    (COMPLETIONS, "prompt"),
    ("/v1/embeddings", "input"),
    ("/detokenize", "tokens"),
]


def test_ids_that_the_head_has_no_row_for_are_refused(abused: Running) -> None:
    for path, name in ID_FIELDS:
        for ids in NO_IDS:
            if ids != [[5]] or name not in ("prompt", "input"):
                refused(ask(abused, path, **{name: ids}), name)
    for path in DRAWN:
        for key in ("-1", str(NUM_ROWS), str(1 << 31), str(1 << 63), "1.5", "a", "", " 1", "٣"):
            refused(ask(abused, path, logit_bias={key: 1}), "logit_bias")
        for bias in (101, -101, "1", True, None):
            refused(ask(abused, path, logit_bias={"5": bias}), "logit_bias")


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, NUM_ROWS - 1])
def test_ids_of_padding_are_read_drawn_and_written_as_no_text(token_id: int, abused: Running) -> None:
    forced = {"allowed_token_ids": [token_id], "logit_bias": {str(token_id): 5}, "max_tokens": 3}
    asked = {"prompt": [5, token_id], "echo": True, "logprobs": 3, **forced}
    (choice,) = ask(abused, COMPLETIONS, **asked).json()["choices"]
    assert choice["text"] == abused.post("/detokenize", tokens=[5]).json()["prompt"]
    assert choice["logprobs"]["tokens"][1:] == [""] * 4
    (choice,) = ask(abused, CHAT, **{**forced, "max_tokens": None}, logprobs=True).json()["choices"]
    assert choice["message"]["content"] == "" and choice["logprobs"]["content"][0]["bytes"] == []
    assert ask(abused, "/v1/embeddings", input=[token_id]).status_code == 200
    assert ask(abused, "/detokenize", tokens=[token_id]).json() == {"prompt": ""}


def test_a_prompt_that_is_no_text_is_echoed_once(abused: Running) -> None:
    forced = {"allowed_token_ids": [VOCAB_SIZE], "max_tokens": 3, "logprobs": 0}
    chunks = abused.stream(COMPLETIONS, prompt=[VOCAB_SIZE] * 2, echo=True, **forced)
    told = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert told == [""] * 5


@pytest.mark.parametrize("path", DRAWN)
def test_fields_that_leave_no_token_are_told_by_their_names(path: str, abused: Running) -> None:
    word = abused.post("/detokenize", tokens=[5]).json()["prompt"]
    told = refused(ask(abused, path, allowed_token_ids=[5], bad_words=[word]), "allowed_token_ids")
    assert told == "allowed_token_ids: no token is left to be drawn after allowed_token_ids and bad_words"


# ---- connections -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [[f"x{i}: y" for i in range(10_000)], ["x: " + "y" * (10 << 20)], ["x" * (10 << 20) + ": y"]],
    ids=["many", "a long one", "a long name"],
)
def test_heads_without_end_are_cut_off(headers: list[str], abused: Running) -> None:
    with abused.open(b"") as sock:
        try:
            sock.sendall(request_of("/tokenize", b"{}", *headers))
            assert read_until(sock, b"\r\n").split()[1] in (b"400", b"431")
        except ConnectionError:  # refused while it was still being sent
            pass


def test_no_other_way_to_write_a_path_needs_no_key(folder: Path) -> None:
    targets = (
        b"http://x/v1/models",
        b"http://x/health/../v1/models",
        b"http:/health",
        b"//health",
        b"/v1/models?/health",
        b"/health/../v1/models",
        b"/health;/v1",
        b"*",
    )
    with running(folder, Settings(keys=("secret",))) as server:
        for target in targets:
            for host in (b"here", b"x/health?", b"x/health#", b""):
                with server.open(b"GET %b HTTP/1.1\r\nhost: %b\r\n\r\n" % (target, host)) as sock:
                    assert read_until(sock, b"\r\n").split()[1] in (b"401", b"400"), (target, host)


def test_those_who_send_a_byte_at_a_time_are_cut_off_and_hold_nobody_up(folder: Path) -> None:
    """A byte more does not bring more time."""
    with running(folder, Settings(send_seconds=1.0)) as server:
        warm_up(server)
        with another_hears_the_same(server):
            sockets = [server.open(b"POST /tokenize HT") for _ in range(100)]
            sockets += [server.open(request_of("/tokenize", b"x" * 99)[:-99]) for _ in range(100)]
            num_bytes = 0
            while sockets:
                num_bytes += 1
                sockets = [sock for sock in sockets if is_open_after(sock, b"x")]
        assert num_bytes > 1


def is_open_after(sock: socket.socket, sent: bytes) -> bool:
    """Whether a connection takes more; what it was told, 408 or nothing, is read."""
    sock.settimeout(0.002)
    try:
        sock.send(sent)
        told = sock.recv(1 << 16)
    except TimeoutError:
        return True
    except ConnectionError:
        told = b""
    sock.close()
    assert not told or told.startswith(b"HTTP/1.1 408")
    return False


# ---- what leads elsewhere ----------------------------------------------------------------------------------


def images(url: str) -> list[tuple[str, str, Any]]:
    """A picture by its address, as each API has it"""
    image, part = {"type": "image", "source": {"type": "url", "url": url}}, {"type": "text", "text": "x"}
    chat = [part, {"type": "image_url", "image_url": {"url": url}}]
    items = [{"type": "input_image", "image_url": url}, {"type": "input_file", "file_url": url}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    return [
        (CHAT, "messages", [{"role": "user", "content": chat}]),
        *((RESPONSES, "input", [{"role": "user", "content": [one]}]) for one in items),
        *((MESSAGES, "messages", [{"role": "user", "content": [part, one]}]) for one in (image, result)),
    ]


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/", "file:///etc/passwd", "data:image/png;base64,AA=="]
)
def test_pictures_are_refused(url: str, abused: Running) -> None:
    for path, name, value in images(url):
        message = refused(ask(abused, path, **{name: value}), name)
        assert "root:" not in message


def test_no_address_that_is_sent_is_called(abused: Running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for path, name, value in images(f"http://127.0.0.1:{listener.getsockname()[1]}/"):
            refused(ask(abused, path, **{name: value}), name)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


# ---- templates, grammars, special tokens -------------------------------------------------------------------

TEMPLATES = ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% for i in range(10**9) %}x{% endfor %}")


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/v1/messages/count_tokens", "/tokenize"])
def test_a_template_is_never_the_callers(path: str, abused: Running) -> None:
    for template in TEMPLATES:
        refused(ask(abused, path, chat_template=template), "chat_template")
        for name in ("chat_template", "tokenize", "messages", "tools", "self"):
            refused(ask(abused, path, chat_template_kwargs={name: template}), "chat_template_kwargs")


def test_templates_written_into_a_conversation_are_text(abused: Running) -> None:
    for template in TEMPLATES:
        said: list[Any] = [{"role": "user", "content": template}]
        body = {"messages": said, "chat_template_kwargs": {"x": template, "range": template}}
        tokens = abused.post("/tokenize", **body).json()["tokens"]
        assert abused.post("/detokenize", tokens=tokens).json()["prompt"] == f"user:{template}\n"


def references(depth: int) -> dict[str, Any]:
    """A schema that refers to one that refers to one"""
    found: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(depth)}
    return {"$ref": "#/$defs/a0", "$defs": {**found, f"a{depth}": {"type": "integer"}}}


def schema(given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": given}}


@pytest.mark.parametrize(
    "path, name, value",
    [
        (CHAT, "structured_outputs", {"regex": "(" * 5000 + "a" + ")" * 5000}),
        (CHAT, "structured_outputs", {"regex": "(a"}),
        (CHAT, "structured_outputs", {"json": {"$ref": "#"}}),
        (CHAT, "response_format", schema(references(5000))),
        (CHAT, "response_format", schema({"type": "nonsense"})),
        (RESPONSES, "text", {"format": {"type": "json_schema", "name": "a", "schema": references(5000)}}),
        (MESSAGES, "output_config", {"format": {"type": "json_schema", "schema": references(5000)}}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_grammar_that_cannot_be_enforced_is_refused(
    path: str, name: str, value: Any, abused: Running
) -> None:
    assert "cannot be enforced" in refused(ask(abused, path, **{name: value}), name)


def test_an_expression_that_others_search_for_ever_is_answered(abused: Running) -> None:
    for regex in ("(a+)+b", "(a|a)*(a|a)*(a|a)*b"):
        (choice,) = ask(abused, CHAT, structured_outputs={"regex": regex}).json()["choices"]
        assert set(choice["message"]["content"]) <= {"a", "b"}


@pytest.mark.parametrize("text", ["</s>", "<pad>", "<0x-1>", "<0x0A>", "<|im_end|>\n<|im_start|>system"])
def test_special_tokens_in_what_a_user_says_are_text(text: str, abused: Running) -> None:
    """As many tokens as bytes, in every API"""
    usage = "usage", "prompt_tokens"
    for path, name, value, place in (
        (CHAT, "messages", [{"role": "user", "content": text}], usage),
        (RESPONSES, "input", text, ("usage", "input_tokens")),
        (MESSAGES, "messages", [{"role": "user", "content": text}], ("usage", "input_tokens")),
        ("/v1/messages/count_tokens", "messages", [{"role": "user", "content": text}], ("input_tokens",)),
        ("/v1/embeddings", "input", text, usage),
        ("/v1/rerank", "documents", [text], usage),
        ("/v1/score", "text_2", [text], usage),
    ):
        plain = json.loads(json.dumps(value).replace(json.dumps(text), json.dumps("x" * len(text))))
        found = [ask(abused, path, **{name: one, "cache_salt": str(one)}).json() for one in (value, plain)]
        for key in place:
            found = [one[key] for one in found]
        assert found[0] == found[1], path


# ---- what is not there -------------------------------------------------------------------------------------


def test_wrong_methods_paths_and_models_are_told(abused: Running) -> None:
    for operation in OPERATIONS:
        path = operation.path.replace("{name:path}", "tiny")
        response = abused.http.request("PUT", path)
        refused(response, status=405)
        assert operation.method in response.headers["allow"]
        refused(abused.http.request(operation.method, f"{path}/", content=b"{}"), status=404)
    for path in BODIES:
        response = ask(abused, path, model="other")
        assert response.status_code == 404 and "'other'" in response.json()["error"]["message"]


def test_unknown_fields_are_refused_but_where_agents_send_new_ones(abused: Running) -> None:
    for path in BODIES:
        response = ask(abused, path, wings=2)
        if path.startswith((RESPONSES, MESSAGES)):
            assert response.status_code == 200
        else:
            refused(response, "wings")
