"""`infinilm batch`: every line is answered once, whatever it says and however often the run is stopped."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from codecs import BOM_UTF8
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from engines import write_model
from gguf_files import LETTERS, VOCAB_SIZE, llama_weights, write_folder
from tokenizers import decoders, models
from warm import COMMAND, StartPython

from infinilm import LLM, SamplingParams
from infinilm.batch_files import MAX_LINE, Answers, BatchRun, Counts, Line, Lines
from infinilm.cli import main

CACHE = "4MB"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that speaks in letters, and has a chat template."""
    path = write_folder(tmp_path_factory.mktemp("tiny"), llama_weights(), eos_token_id=VOCAB_SIZE - 1)
    library = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(LETTERS)}, []))
    library.decoder = decoders.ByteLevel()
    library.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, kv_cache_memory=CACHE)


def chat(custom_id: str = "a", content: Any = "hello", **body: Any) -> dict[str, Any]:
    asked = {"model": "any", "messages": [{"role": "user", "content": content}], "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": asked}


def completion(custom_id: str = "a", prompt: Any = "hello", **body: Any) -> dict[str, Any]:
    asked = {"model": "any", "prompt": prompt, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": asked}


class Files:
    """An input and an output, and runs from one to the other."""

    def __init__(self, path: Path) -> None:
        self.input, self.output = path / "in.jsonl", path / "out.jsonl"

    def write(self, *lines: dict[str, Any] | bytes) -> None:
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.input.write_bytes(b"\n".join(raw) + b"\n")

    def run(self, llm: LLM) -> Counts:
        lines = Lines(self.input)
        with Answers(self.output, lines.num_lines) as answers:
            return BatchRun(llm, "tiny", lines, answers, lambda count: None).run()

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def ask(self, llm: LLM, *lines: dict[str, Any] | bytes) -> list[dict[str, Any]]:
        """The answers in the order of the lines"""
        self.write(*lines)
        self.run(llm)
        return sorted(self.answers(), key=lambda answer: int(answer["id"].removeprefix("batch_req_")))

    def body(self, llm: LLM, line: dict[str, Any]) -> dict[str, Any]:
        (answer,) = self.ask(llm, line)
        assert answer["response"]["status_code"] == 200, answer
        found: dict[str, Any] = answer["response"]["body"]
        return found


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


# ---- answers -----------------------------------------------------------------------------------------------


def test_a_chat_is_answered_as_openai_does(files: Files, llm: LLM) -> None:
    (answer,) = files.ask(llm, chat("mine", temperature=0, ignore_eos=True))
    response = answer.pop("response")
    assert answer == {"id": "batch_req_1", "custom_id": "mine", "error": None}
    assert response["status_code"] == 200 and response["request_id"]
    body = response["body"]
    assert body.pop("id").startswith("chatcmpl-") and abs(body.pop("created") - time.time()) < 3600
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (expected,) = llm.chat([{"role": "user", "content": "hello"}], params)
    assert body == {
        "object": "chat.completion",
        "model": "any",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": expected.outputs[0].text, "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 4,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_completion_is_answered_as_openai_does_and_has_16_tokens(files: Files, llm: LLM) -> None:
    body = files.body(llm, completion(ignore_eos=True))
    (expected,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": expected.outputs[0].text, "logprobs": None, "finish_reason": "length"}
    ]


@pytest.mark.parametrize(
    "prompt",
    ["hello", ["hello"], [7, 4, 11, 11, 14], [[7, 4, 11, 11, 14]]],
    ids=["text", "texts", "ids", "lists"],
)
def test_a_prompt_is_a_text_or_token_ids(prompt: Any, files: Files, llm: LLM) -> None:
    body = files.body(llm, completion(prompt=prompt))
    (expected,) = llm.generate("hello", SamplingParams(temperature=0))
    assert body["choices"][0]["text"] == expected.outputs[0].text


def test_each_of_several_prompts_has_its_n_choices_in_order(files: Files, llm: LLM) -> None:
    body = files.body(llm, completion(prompt=["ab", "cd"], n=2, temperature=0.5, seed=1, ignore_eos=True))
    params = SamplingParams(n=2, temperature=0.5, seed=1, ignore_eos=True)
    expected = [out.text for answer in llm.generate(["ab", "cd"], params) for out in answer.outputs]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 4 and body["usage"]["completion_tokens"] == 64


def test_parts_of_a_message_are_one_text(files: Files, llm: LLM) -> None:
    parts = [{"type": "text", "text": "hello"}]
    assert files.body(llm, chat(content=parts))["usage"]["prompt_tokens"] == 5


def test_a_chat_has_logprobs_of_each_token_and_the_likeliest_ones(files: Files, llm: LLM) -> None:
    body = files.body(llm, chat(temperature=0, logprobs=True, top_logprobs=2, ignore_eos=True))
    (choice,) = body["choices"]
    assert len(choice["logprobs"]["content"]) == 4 and choice["logprobs"]["refusal"] is None
    for found, letter in zip(choice["logprobs"]["content"], choice["message"]["content"], strict=True):
        assert set(found) == {"token", "logprob", "bytes", "top_logprobs"}
        assert found["token"] == letter and found["bytes"] == [ord(letter)]
        first, second = found["top_logprobs"]
        assert first["logprob"] == found["logprob"] >= second["logprob"]
        assert set(first) == {"token", "logprob", "bytes"} and first["token"] == letter


def test_logprobs_without_top_logprobs_have_none(files: Files, llm: LLM) -> None:
    content = files.body(llm, chat(logprobs=True))["choices"][0]["logprobs"]["content"]
    assert content and all(found["top_logprobs"] == [] for found in content)


def test_a_completion_has_logprobs_in_four_lists(files: Files, llm: LLM) -> None:
    body = files.body(llm, completion(logprobs=2, max_tokens=3, ignore_eos=True))
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert logprobs["tokens"] == list(choice["text"]) and logprobs["text_offset"] == [0, 1, 2]
    for token, logprob, top in zip(*list(logprobs.values())[:3], strict=True):
        assert len(top) == 2 and top[token] == logprob == max(top.values())


def test_fields_reach_sampling_under_their_names(files: Files, llm: LLM) -> None:
    only_b = {"logit_bias": {"1": 100}, "min_tokens": 2, "stop": ["bbbb"], "max_completion_tokens": 9}
    line = chat(max_tokens=None, repetition_penalty=1.0, top_k=1, **only_b)
    (choice,) = files.body(llm, line)["choices"]
    assert choice["message"]["content"] == "" and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "wanted, content",
    [
        ({"structured_outputs": {"choice": ["cab"]}}, "cab"),
        ({"structured_outputs": {"regex": "[xyz]{3}7"}}, "???7"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"const": 42}},
                }
            },
            "42",
        ),
    ],
)
def test_a_structure_is_kept(wanted: dict[str, Any], content: str, files: Files, llm: LLM) -> None:
    (choice,) = files.body(llm, chat(max_tokens=9, **wanted))["choices"]
    assert fnmatch(choice["message"]["content"], content) and choice["finish_reason"] == "stop"


def test_a_tool_that_must_be_called_is_called(files: Files, tmp_path: Path) -> None:
    (folder := tmp_path / "bytes").mkdir()
    speaker = LLM(write_model(folder, max_position_embeddings=4096), kv_cache_memory=CACHE)
    digits = {"type": "object", "properties": {"digits": {"enum": ["911"]}}, "required": ["digits"]}
    tool = {"type": "function", "function": {"name": "dial", "parameters": digits}}
    line = chat(tools=[tool], tool_choice="required", max_tokens=200, temperature=0)
    (choice,) = files.body(speaker, line)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "dial"
    assert json.loads(call["function"]["arguments"]) == {"digits": "911"}


def test_fields_that_change_nothing_are_taken(files: Files, llm: LLM) -> None:
    idle = {"stream": False, "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"}
    body = files.body(
        llm, chat(tools=[], tool_choice="none", seed=None, response_format={"type": "text"}, **idle)
    )
    assert body["choices"]


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, param, told",
    [
        (chat(messages=[]), "messages", "at least one message"),
        (chat(messages="hi"), "messages", "'hi'"),
        (chat(messages=None), "messages", "None"),
        (chat(content=[{"type": "image_url"}]), "messages", "image_url"),
        (chat(content="%"), "messages", "no tokens"),
        (completion(prompt=None), "prompt", "None"),
        (completion(prompt=[]), "prompt", "[]"),
        (completion(prompt=["a", 1]), "prompt", "['a', 1]"),
        (completion(prompt=[True]), "prompt", "[True]"),
        (completion(prompt=[99]), "prompt", "token id 99"),
        (completion(prompt="a" * 500), "prompt", "500 tokens"),
        (completion(prompt=["a"] * 600, n=2), "n", "1200 choices"),
        (chat(temperature=-1), "temperature", "from 0"),
        (chat(temperature="hot"), "temperature", "'hot'"),
        (chat(max_tokens=0), "max_tokens", "0"),
        (chat(max_completion_tokens=5), "max_tokens", "differ"),
        (chat(model=5), "model", "5"),
        (chat(top_logprobs=2), "top_logprobs", "needs logprobs"),
        (chat(logprobs=True, top_logprobs=-1), "top_logprobs", "-1"),
        (chat(logprobs=2), "logprobs", "true or false"),
        (completion(logprobs=True), "logprobs", "True"),
        (chat(logit_bias={"x": 1}), "logit_bias", "'x'"),
        (chat(logit_bias={"999": 1}), "logit_bias", "999"),
        (chat(response_format={"type": "xml"}), "response_format", "xml"),
        (chat(response_format="json_object"), "response_format", "json_object"),
        (chat(response_format={"type": "json_schema", "json_schema": {}}), "response_format", "no schema"),
        (chat(structured_outputs={"regex": "(a"}), "structured_outputs", "regex"),
        (chat(structured_outputs={"regexp": "a"}), "structured_outputs", "regexp"),
        (chat(structured_outputs={"regex": "a", "choice": ["b"]}), "structured_outputs", "regex"),
        (chat(tools=[{"type": "function"}]), "tools", "function must be given"),
        (chat(echo=True), "echo", "not supported"),
        (completion(suffix="end"), "suffix", "not supported"),
        (chat(wings=2), "wings", "not supported"),
        (chat(stream=True), "stream", "line 1"),
        (chat() | {"method": "GET"}, "method", "line 1: method must be POST, but is 'GET'"),
        (chat() | {"url": "/v1/embeddings"}, "url", "/v1/embeddings"),
        (chat() | {"body": [1]}, "body", "[1]"),
        (chat() | {"extra": 1}, "extra", "'extra'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_wrong_request_is_told_its_field(
    line: dict[str, Any], param: str | None, told: str, files: Files, llm: LLM
) -> None:
    (wrong, right) = files.ask(llm, line, chat("right"))
    assert wrong["custom_id"] == "a" and wrong["error"] is None
    assert wrong["response"]["status_code"] == 400
    error = wrong["response"]["body"]["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param and told in error["message"]
    assert right["response"]["status_code"] == 200


@pytest.mark.parametrize(
    "line, told",
    [
        (b"not json", "not valid JSON"),
        (b'{"custom_id": "a", "custom_id": "b"}', "appears twice"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "not an object"),
        (json.dumps({"method": "POST"}).encode(), "custom_id must be a string, but is None"),
        (json.dumps({"custom_id": 5}).encode(), "custom_id must be a string, but is 5"),
        (b'{"a": "' + b"x" * MAX_LINE + b'"}', "more than"),
    ],
    ids=["text", "twice", "deep", "bytes", "list", "none", "number", "long"],
)
def test_a_line_that_cannot_be_read_is_answered_with_its_number(
    line: bytes, told: str, files: Files, llm: LLM
) -> None:
    _, wrong, right = files.ask(llm, chat("first"), line, chat("last"))
    assert wrong["custom_id"] is None and wrong["response"]["status_code"] == 400
    message = wrong["response"]["body"]["error"]["message"]
    assert "line 2" in message and told in message
    assert right["custom_id"] == "last" and right["response"]["status_code"] == 200


def test_a_mark_of_utf_8_before_the_first_line_is_none_of_it(files: Files, llm: LLM) -> None:
    marked = [b"\xef\xbb\xbf" + json.dumps(chat(name)).encode() for name in ("first", "second")]
    first, second = files.ask(llm, *marked)
    assert first["custom_id"] == "first" and first["response"]["status_code"] == 200
    assert second["response"]["status_code"] == 400


def test_logits_that_are_no_numbers_are_the_servers_error(files: Files, folder: Path) -> None:
    broken = LLM(folder, kv_cache_memory=CACHE)
    broken.model.model.norm.weight.data.fill_(float("nan"))
    (answer,) = files.ask(broken, chat())
    assert answer["response"]["status_code"] == 500
    assert answer["response"]["body"]["error"]["type"] == "server_error"


def test_halves_of_surrogate_pairs_come_back_as_they_were(files: Files, llm: LLM) -> None:
    (answer,) = files.ask(llm, chat("\ud800é"))
    assert answer["custom_id"] == "\ud800é"


# ---- once, and only once -----------------------------------------------------------------------------------


def test_lines_that_have_an_answer_are_not_asked_again(files: Files, llm: LLM) -> None:
    lines = [chat("same"), chat("same"), b"", b"broken", chat("other", temperature=-1)]
    first = files.ask(llm, *lines)
    assert [answer["id"] for answer in first] == [f"batch_req_{number}" for number in (1, 2, 4, 5)]
    kept = files.output.read_bytes()
    assert files.run(llm) == Counts(answered=0, refused=0, known=4)
    assert files.output.read_bytes() == kept
    files.output.write_bytes(b"".join(kept.splitlines(keepends=True)[:-1]))
    assert files.run(llm).known == 3


def test_no_model_is_loaded_where_every_line_has_its_answer(
    files: Files, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    files.ask(llm, chat("a"), b"", b"broken")
    assert main(["batch", str(files.input), str(files.output), "--model", "no/such/model"]) == 0
    assert capsys.readouterr().err == "0 answered, 0 refused, 2 were there already\n"


@pytest.mark.parametrize("length", [1, 5, 12, 60, -1])
def test_half_an_answer_at_the_end_is_cut_off_and_asked_for_anew(length: int, files: Files, llm: LLM) -> None:
    files.ask(llm, chat("a"), chat("b"))
    whole, last = files.output.read_bytes().splitlines(keepends=True)
    files.output.write_bytes(whole + last[:length])
    assert files.run(llm) == Counts(answered=1, refused=0, known=1)
    assert files.output.read_bytes().startswith(whole)
    assert sorted(answer["custom_id"] for answer in files.answers()) == ["a", "b"]


@pytest.mark.parametrize(
    "content",
    [
        b"notes",
        b"notes\n",
        b'{"id": "x"}\n',
        b'{"id": "batch_req_0", "custom_id": "a"}\n',
        b'{"id": "batch_req_9", "custom_id": "a"}\n',
    ],
)
def test_a_file_of_something_else_is_left_as_it_is(content: bytes, files: Files, llm: LLM) -> None:
    files.write(chat())
    files.output.write_bytes(content)
    with pytest.raises(ValueError, match="its line 1 answers no line of this input; name another output"):
        files.run(llm)
    assert files.output.read_bytes() == content


def test_answers_to_another_input_are_not_mixed_with_these(files: Files, llm: LLM) -> None:
    files.ask(llm, chat("a"))
    files.write(chat("b"))
    with pytest.raises(ValueError, match="is not to custom_id 'b', so it belongs to another input"):
        files.run(llm)


def test_two_runs_do_not_write_one_file(files: Files) -> None:
    with Answers(files.output, 1), pytest.raises(ValueError, match="another run is writing it"):
        Answers(files.output, 1)


def test_answers_that_cannot_be_written_are_told_with_the_name_of_their_file(
    files: Files, folder: Path
) -> None:
    llm = LLM(folder, kv_cache_memory=CACHE)
    files.write(chat())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
        with pytest.raises(OSError, match=f"File too large: '{files.output}'"):
            files.run(llm)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_same_file_for_both_is_refused_before_it_is_changed(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(chat())
    before = files.input.read_bytes()
    assert main(["batch", str(files.input), str(files.input)]) == 1
    assert "answers need a file of their own" in capsys.readouterr().err
    assert files.input.read_bytes() == before


def test_answers_call_the_model_as_the_server_does(
    files: Files, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.gguf").touch()
    monkeypatch.setattr("infinilm.cli.batch.load", lambda options: llm)
    files.write(chat(model=None))
    assert main(["batch", str(files.input), str(files.output), "--model", str(tmp_path / "tiny.gguf")]) == 0
    (answer,) = files.answers()
    assert answer["response"]["body"]["model"] == "tiny"


@pytest.mark.parametrize("name", ["no/such.jsonl", "."])
def test_an_input_that_is_no_file_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", str(tmp_path / name), str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("infinilm: error:") and not (tmp_path / "out").exists()


def test_an_input_that_is_cut_short_meanwhile_is_not_taken_for_done(files: Files) -> None:
    files.write(*(chat(str(i)) for i in range(3)))
    lines = Lines(files.input)
    files.write(chat("0"))
    with pytest.raises(ValueError, match="had 3 lines, and ends before line 2 now"):
        list(lines)


def test_an_input_of_a_mark_alone_has_no_lines(files: Files) -> None:
    files.input.write_bytes(BOM_UTF8)
    assert list(Lines(files.input)) == []


def test_lines_are_read_as_they_are_needed(files: Files, folder: Path) -> None:
    llm = LLM(folder, kv_cache_memory=CACHE, max_num_seqs=2)
    files.write(*(chat(str(i), ignore_eos=True) for i in range(50)))
    lines, read = Lines(files.input), []

    class Counted(Lines):
        def __init__(self) -> None: ...

        def __iter__(self) -> Iterator[Line | None]:
            for line in lines:
                read.append(line)
                yield line

    with Answers(files.output, lines.num_lines) as answers:
        run, num_done = BatchRun(llm, "tiny", Counted(), answers, lambda count: None), 0
        while run.fill():
            assert len(read) - num_done <= 2 * 2
            for request in run.engine.step():
                if request.is_finished:
                    run.finish(run.jobs.pop(request.request_id))
            num_done = run.counts.answered
    assert len(files.answers()) == 50


def test_a_killed_run_goes_on_where_it_was(
    files: Files, folder: Path, capsys: pytest.CaptureFixture[str], start_python: StartPython
) -> None:
    lines = [chat(f"id {i % 7}", max_tokens=5 + i % 90, ignore_eos=True) for i in range(100)]
    files.write(*lines)
    command = [
        "batch",
        str(files.input),
        str(files.output),
        "--model",
        str(folder),
        "--kv-cache-memory",
        CACHE,
    ]
    with start_python(COMMAND, *command) as process:
        while process.poll() is None and (not files.output.exists() or files.output.stat().st_size == 0):
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
    num_kept = files.output.read_bytes().count(b"\n")
    assert 0 < num_kept < 100
    assert main(command) == 0
    told = f"{100 - num_kept} answered, 0 refused, {num_kept} were there already"
    assert told in capsys.readouterr().err
    answers = {int(answer["id"].removeprefix("batch_req_")): answer for answer in files.answers()}
    assert len(files.answers()) == 100 and sorted(answers) == list(range(1, 101))
    for number, line in enumerate(lines, 1):
        assert answers[number]["custom_id"] == line["custom_id"]
        usage = answers[number]["response"]["body"]["usage"]
        assert usage["completion_tokens"] == line["body"]["max_tokens"]
