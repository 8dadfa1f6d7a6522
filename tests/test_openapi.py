"""The server keeps what /openapi.json promises: whatever is sent by it, no answer is a server's error.

schemathesis, which takes seconds to import, is left to the one process that runs these tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engines
import hypothesis
import pytest
from hypothesis import HealthCheck
from patience import PATIENCE
from servers import Running, running

from infinilm.server.app import DOCUMENT, OPERATIONS

if TYPE_CHECKING:
    import schemathesis

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_EXAMPLES = [5, pytest.param(100, marks=pytest.mark.slow)]  # of each operation
SETTINGS = hypothesis.settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
MOST = {"max_tokens": 4, "max_completion_tokens": 4, "n": 3, "min_tokens": 2}
DESCRIBED = [(method, path) for path, of in DOCUMENT["paths"].items() for method in of]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(engines.write_model(tmp_path_factory.mktemp("tiny"))) as made:
        yield made
        made.check_idle()


@pytest.fixture(scope="module")
def schema() -> Any:
    import schemathesis

    return schemathesis.openapi.from_dict(DOCUMENT)


def modes(method: str, path: str) -> list[str]:
    """What fits the document, and, where there is something to get wrong, what does not"""
    return ["positive", *(["negative"] if "requestBody" in DOCUMENT["paths"][path][method] else [])]


CASES = [(method, path, mode) for method, path in DESCRIBED for mode in modes(method, path)]


def within_bounds(body: Any) -> Any:
    """The same body without a stream, and without work for minutes"""
    if not isinstance(body, dict):
        return body
    small = {name: min(body[name], most) for name, most in MOST.items() if is_count(body.get(name))}
    stream = {"stream": False} if body.get("stream") is True else {}
    return {**body, **small, **stream}


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_no_answer_is_a_servers_error(
    method: str, path: str, mode: str, num_examples: int, schema: Any, server: Running
) -> None:
    from schemathesis import GenerationMode

    @hypothesis.settings(SETTINGS, max_examples=num_examples)
    @hypothesis.given(schema[path][method].as_strategy(GenerationMode(mode)))
    def ask(case: schemathesis.Case) -> None:
        case.body = within_bounds(case.body)
        response = case.call(base_url=server.url, timeout=PATIENCE)
        assert response.status_code < 500, response.text
        if response.status_code != 200 and case.method != "HEAD":
            is_anthropics = path.startswith("/v1/messages")
            wanted = {"message", "type"} if is_anthropics else {"message", "type", "param", "code"}
            assert set(response.json()["error"]) == wanted

    ask()


def test_every_route_is_in_the_document() -> None:
    described = {(method.upper(), path) for method, path in DESCRIBED}
    assert described == {(one.method, one.path.replace(":path}", "}")) for one in OPERATIONS}


def test_every_route_is_told_of_in_docs() -> None:
    told = (Path(__file__).parent.parent / "docs" / "server.md").read_text()
    assert [path for _, path in DESCRIBED if f"`{path}`" not in told] == []
