"""`infinilm batch`: a file of requests in, a file of answers out, a line each, in OpenAI's batch format.

The answer to a line has the line's number in its id, so that a run that was stopped goes on with those that
have none. Few lines are in memory at once, however long the files are.
"""

from __future__ import annotations

import fcntl
import json
import uuid
import zlib
from array import array
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import BinaryIO, Self

from infinilm.engine.request import Request, RequestError
from infinilm.folder import parse_object
from infinilm.llm import LLM
from infinilm.server.answers import whole_answer
from infinilm.server.asks import BODIES, Asked, Json, turns_of
from infinilm.server.bodies import BodyError, read
from infinilm.server.errors import http_error, openai_error
from infinilm.server.service import Preparer, Served
from infinilm.server.turn import Prepared, pieces_of

MAX_LINE = 16 << 20  # bytes of a request
CHUNK = 1 << 20
ID = "batch_req_"
START = b'{"id": "' + ID.encode()  # of every answer
KEYS = ("custom_id", "method", "url", "body")

Report = Callable[[int], None]  # of lines that are done with


# ---- requests ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of the input, or what is wrong with it."""

    number: int
    custom_id: str | None = None
    url: str = ""
    body: Json = field(default_factory=dict)
    error: RequestError | None = None


class Lines:
    """The lines of a file, each read when it is asked for; blank ones are none."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: is no file, and the input is read twice")
        self.path = path
        with path.open("rb") as file:
            skip_mark(file)
            self.num_lines = count_lines(file)

    def __iter__(self) -> Iterator[Line | None]:
        """None is a blank line."""
        with self.path.open("rb") as file:
            skip_mark(file)
            for number in range(1, self.num_lines + 1):
                raw = file.readline(MAX_LINE + 1)
                if not raw:
                    had = f"{self.path}: had {self.num_lines} lines"
                    raise ValueError(f"{had}, and ends before line {number} now")
                if len(raw) > MAX_LINE:
                    skip_line(file, raw)
                    yield Line(number, error=BodyError(f"line {number}: has more than {MAX_LINE} bytes"))
                else:
                    yield line_of(number, raw) if raw.strip() else None


def count_lines(file: BinaryIO) -> int:
    """The last one too, if no newline ends it"""
    count, last = 0, b"\n"
    while chunk := file.read(CHUNK):
        count, last = count + chunk.count(b"\n"), chunk[-1:]
    return count + (last != b"\n")


def skip_mark(file: BinaryIO) -> None:
    """The mark of UTF-8 that Windows begins files with"""
    if file.read(len(BOM_UTF8)) != BOM_UTF8:
        file.seek(0)


def skip_line(file: BinaryIO, read: bytes) -> None:
    while read and not read.endswith(b"\n"):
        read = file.readline(CHUNK)


def line_of(number: int, raw: bytes) -> Line:
    custom_id = None
    try:
        given = parse_object(raw, f"line {number}", RequestError)
        custom_id = checked_id(number, given)
        check_line(number, given)
    except RequestError as error:
        return Line(number, custom_id, error=error)
    return Line(number, custom_id, given["url"], given["body"])


def checked_id(number: int, given: Json) -> str:
    found = given.get("custom_id")
    if not isinstance(found, str):
        raise BodyError(f"line {number}: custom_id must be a string, but is {short(found)}", "custom_id")
    return found


def check_line(number: int, given: Json) -> None:
    if unknown := [key for key in given if key not in KEYS]:
        raise BodyError(f"line {number}: {unknown[0][:64]!r} is none of {', '.join(KEYS)}", unknown[0])
    for key, allowed in (("method", ("POST",)), ("url", tuple(BODIES))):
        if given.get(key) not in allowed:
            found = short(given.get(key))
            raise BodyError(f"line {number}: {key} must be {' or '.join(allowed)}, but is {found}", key)
    body = given.get("body")
    if not isinstance(body, dict):
        raise BodyError(f"line {number}: body must be an object, but is {short(body)}", "body")
    if body.get("stream"):
        raise BodyError(f"line {number}: stream must be false: a file is not streamed to", "stream")


# ---- answers -----------------------------------------------------------------------------------------------


class Answers:
    """The file of answers: those that it has, and further ones, added as whole lines.

    Of each only a checksum of its custom_id is kept. A last line that was not completed is cut off.
    """

    def __init__(self, path: Path, num_lines: int) -> None:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: is no file, so that a run could not go on where it was stopped")
        self.path = path
        self._known = array("Q", [0]) * (num_lines + 1)
        self._file = path.open("a+b")
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._named():
            self._file.close()

    def has(self, line: Line) -> bool:
        known = self._known[line.number]
        if known not in (0, checksum(line.custom_id)):
            raise ValueError(
                f"{self.path}: its answer to line {line.number} is not to custom_id "
                f"{short(line.custom_id)}, so it belongs to another input; name another output"
            )
        return known != 0

    def add(self, line: Line, status: int, body: Json) -> None:
        response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
        told = {
            "id": f"{ID}{line.number}",
            "custom_id": line.custom_id,
            "response": response,
            "error": None,
        }
        # Halves of surrogate pairs, which UTF-8 cannot write, become the escapes of JSON.
        text = json.dumps(told, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
        with self._named():
            self._file.write(text + b"\n")
            self._file.flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What cannot be written is told with the file's name, as what cannot be opened is."""
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.path}: another run is writing it") from None

    def _read(self) -> None:
        self._file.seek(0)
        end = 0
        for count, raw in enumerate(self._file, 1):
            if not raw.endswith(b"\n") and (raw.startswith(START) or START.startswith(raw)):
                break
            number, custom_id = self._told(count, raw)
            self._known[number] = checksum(custom_id)
            end += len(raw)
        self._file.truncate(end)

    def _told(self, count: int, raw: bytes) -> tuple[int, str | None]:
        """The line that an answer is to, and its custom_id; a file that is not ours is left as it is."""
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            answer = json.loads(raw)
            number = int(answer["id"].removeprefix(ID))
            if raw.startswith(START) and raw.endswith(b"\n") and 1 <= number < len(self._known):
                return number, answer["custom_id"]
        raise ValueError(f"{self.path}: its line {count} answers no line of this input; name another output")


def checksum(custom_id: str | None) -> int:
    """Never 0, which stands for no answer"""
    return zlib.crc32(json.dumps(custom_id).encode()) + 1


# ---- from one to the other ---------------------------------------------------------------------------------


@dataclass
class Job:
    """A line in the engine, by a request for each of its turns."""

    line: Line
    asked: Asked
    prepared: list[Prepared]
    num_finished: int = 0

    def check(self) -> None:
        """Raise what one of its requests has ended with, if that is an error."""
        for one in self.prepared:
            with one.turn.as_body_errors():
                if one.request.error is not None:
                    raise one.request.error


@dataclass
class Counts:
    answered: int = 0
    refused: int = 0
    known: int = 0  # answered before


class BatchRun:
    """Keeps the engine busy with a window of lines, and writes the answers as they come."""

    def __init__(self, llm: LLM, name: str, lines: Lines, answers: Answers, report: Report) -> None:
        self.engine = llm.engine
        self.served = Served(name)
        self.preparer = Preparer(llm)
        self.lines = iter(lines)
        self.answers = answers
        self.report = report
        self.counts = Counts()
        self.window = 2 * llm.config.max_num_seqs  # requests: as many wait as run
        self.jobs: dict[str, Job] = {}  # by the id of each request
        self.waiting: deque[Request] = deque()  # for room in the engine

    def run(self) -> Counts:
        while self.fill():
            for request in self.engine.step():
                if request.is_finished:
                    self.finish(self.jobs.pop(request.request_id))
        return self.counts

    def fill(self) -> bool:
        """Give the engine what it has room for; False if nothing is left."""
        while len(self.jobs) < self.window and not self.waiting:
            try:
                self.begin(next(self.lines))
            except StopIteration:
                break
        while self.waiting and self.engine.has_room_for(self.waiting[0]):
            self.engine.enqueue(self.waiting.popleft())
        return bool(self.jobs)

    def begin(self, line: Line | None) -> None:
        if line is None:
            self.report(1)
        elif self.answers.has(line):
            self.counts.known += 1
            self.report(1)
        else:
            self.ask(line)

    def ask(self, line: Line) -> None:
        try:
            if line.error is not None:
                raise line.error
            job = self.job(line)
        except RequestError as error:
            self.refuse(line, error)
            return
        requests = [one.request for one in job.prepared]
        self.jobs |= {request.request_id: job for request in requests}
        self.waiting.extend(requests)

    def job(self, line: Line) -> Job:
        asked = read(BODIES[line.url], line.body)
        turns = turns_of(asked, self.preparer.defaults)
        named = [(turn, f"{line.number}-{i}") for i, turn in enumerate(turns)]
        return Job(line, asked, [self.preparer.prepare(turn, own, self.served) for turn, own in named])

    def finish(self, job: Job) -> None:
        """One more of a job's requests has ended; the last brings the answer."""
        job.num_finished += 1
        if job.num_finished < len(job.prepared):
            return
        try:
            job.check()
        except Exception as error:
            self.refuse(job.line, error)
        else:
            self.answer(job.line, 200, self.told(job))

    def told(self, job: Job) -> Json:
        outputs = [one.request.output() for one in job.prepared]
        pieces = list(map(pieces_of, self.preparer.readings(job.prepared), outputs))
        name = job.asked.model or self.served.name
        return whole_answer(job.asked, job.prepared, outputs, pieces, name, self.preparer.tokenizer)

    def refuse(self, line: Line, error: BaseException) -> None:
        told = http_error(error)
        self.answer(line, told.status, openai_error(told))

    def answer(self, line: Line, status: int, body: Json) -> None:
        self.answers.add(line, status, body)
        self.counts.answered += status == 200
        self.counts.refused += status != 200
        self.report(1)
