"""The server keeps what /openapi.json promises: whatever is sent by it, no answer is a server's error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import engines
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis import GenerationMode
from servers import PATIENCE, Running, running

from infinilm.server.app import DOCUMENT, OPERATIONS

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_EXAMPLES = 20  # of each operation
SETTINGS = hypothesis.settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
MOST = {"max_tokens": 4, "max_completion_tokens": 4, "n": 3, "min_tokens": 2}
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(engines.write_model(tmp_path_factory.mktemp("tiny"))) as made:
        yield made
        made.check_idle()


def operations() -> list[Any]:
    return [found.ok() for found in SCHEMA.get_all_operations()]


def modes(operation: Any) -> list[GenerationMode]:
    """What fits the document, and, where there is something to get wrong, what does not"""
    return [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if operation.body else [])]


CASES = [(operation, mode) for operation in operations() for mode in modes(operation)]


def within_bounds(body: Any) -> Any:
    """The same body without a stream, and without work for minutes"""
    if not isinstance(body, dict):
        return body
    small = {name: min(body[name], most) for name, most in MOST.items() if is_count(body.get(name))}
    stream = {"stream": False} if body.get("stream") is True else {}
    return {**body, **small, **stream}


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@pytest.mark.parametrize(
    ("operation", "mode"), CASES, ids=[f"{one.label} {mode.value}" for one, mode in CASES]
)
def test_no_answer_is_a_servers_error(operation: Any, mode: GenerationMode, server: Running) -> None:
    @SETTINGS
    @hypothesis.given(operation.as_strategy(mode))
    def ask(case: schemathesis.Case) -> None:
        case.body = within_bounds(case.body)
        response = case.call(base_url=server.url, timeout=PATIENCE)
        assert response.status_code < 500, response.text
        if response.status_code != 200 and case.method != "HEAD":
            is_anthropics = operation.path.startswith("/v1/messages")
            wanted = {"message", "type"} if is_anthropics else {"message", "type", "param", "code"}
            assert set(response.json()["error"]) == wanted

    ask()


def test_every_route_is_in_the_document() -> None:
    described = {(method.upper(), path) for path, of in DOCUMENT["paths"].items() for method in of}
    assert described == {(one.method, one.path.replace(":path}", "}")) for one in OPERATIONS}
