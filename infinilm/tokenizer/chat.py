"""Chat templates in jinja2's immutable sandbox, rendered as transformers renders them."""

import json
import re
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from infinilm.tokenizer.error import TokenizerError


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here only what stands in it counts."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line_number)


def chat_environment() -> jinja2.Environment:
    """The one place a template environment is made: templates come with the model and are not trusted."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja's own filter escapes <, >, & and ' for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def check_messages(messages: object) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise TokenizerError(
            f"messages must be a list of at least one message, but got {str(messages)[:60]!r}"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise TokenizerError(f"messages[{index}] must be a dict, but is a {type(message).__name__}")
        for key in ("role", "content"):
            found = type(message.get(key)).__name__
            if not isinstance(message.get(key), str):
                raise TokenizerError(f"messages[{index}][{key!r}] must be a string, but is a {found}")


def unused_character(text: str) -> str:
    used = set(text)
    return next(chr(code) for code in range(0xE000, 0x110000) if chr(code) not in used)


def break_up(value: Any, pattern: re.Pattern[str], marker: str) -> Any:
    """The same data with a marker inside every match of pattern, so that nothing matches any more."""
    match value:
        case str():
            return pattern.sub(lambda match: match[0][0] + marker + match[0][1:], value)
        case dict():
            return {key: break_up(item, pattern, marker) for key, item in value.items()}
        case list() | tuple():
            return [break_up(item, pattern, marker) for item in value]
    return value
