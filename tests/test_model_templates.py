"""Chat templates in the ways of the families we run: they write or refuse as with transformers.

Those in data/templates are short, and made of what the published ones are: macros, filters, slices, dates.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from infinilm.tokenizer import TokenizerError
from infinilm.tokenizer.chat import Renderer, with_thoughts

FILES = sorted((Path(__file__).parent / "data" / "templates").glob("*.jinja"))
TEMPLATES = {path.stem: path.read_text() for path in FILES}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 1.5}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": " Hi <b>&'\"\n"}],
    "a system": [
        {"role": "system", "content": " Be brief. /no_think "},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "\nHello 你好"},
        {"role": "user", "content": "Bye"},
    ],
    "a user twice": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "a tool": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": '{"t": 3}'},
    ],
    "a tool nobody called": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}],
    "thoughts": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA"},
        {"role": "user", "content": "z"},
        {"role": "assistant", "content": "B", "reasoning_content": "so"},
    ],
    "thoughts before a call": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "A", "thinking": "hm"},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": '{"t": 3}'},
        {"role": "assistant", "content": "", "reasoning": "again", "tool_calls": [CALL]},
    ],
}
PROPERTIES = {"city": {"type": "string"}, "days": {"type": ["number", "null"]}, "unit": {"enum": ["C", "F"]}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "é", "parameters": PARAMETERS}}
VARIABLES: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "enable_thinking": False, "thinking": True, "reasoning_effort": "high"},
    {"add_generation_prompt": True, "tools": [TOOL], "controls": {"length": "short"}},
]
ROLES = {"bos_token": "<s>", "eos_token": "</s>"}


def as_transformers(template: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    try:
        (text,), _ = render_jinja_template([messages], chat_template=template, **{**ROLES, **variables})
    except Exception as error:
        return f"refused: {error}"
    return str(text)


def as_here(renderer: Renderer, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    given = {"tools": None, "documents": None, **ROLES, **variables, "messages": with_thoughts(messages)}
    try:
        return renderer.render(given)
    except TokenizerError as error:
        reason = str(error).removeprefix("chat template: ").removeprefix("refuses this conversation: ")
        return f"refused: {reason.partition('; put its text')[0]}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_a_family_render_as_with_transformers(name):
    renderer = Renderer(TEMPLATES[name])
    for messages in CONVERSATIONS.values():
        for variables in VARIABLES:
            expected = as_transformers(TEMPLATES[name], messages, variables)
            assert as_here(renderer, messages, variables) == expected


def test_these_conversations_are_rendered_and_refused():
    """Which ends each family has, so that none of the templates above proves its point by refusing all."""
    refused = {
        name: [
            title
            for title, messages in CONVERSATIONS.items()
            if as_transformers(template, messages, VARIABLES[0]).startswith("refused")
        ]
        for name, template in TEMPLATES.items()
    }
    assert {name: titles for name, titles in refused.items() if titles} == {
        "gemma2": ["a system", "a user twice", "a tool", "thoughts before a call"],
        "gemma3": ["a user twice", "a tool", "thoughts before a call"],
        "gpt_oss": ["a tool nobody called"],
        "mixtral": ["a user twice", "thoughts before a call"],
    }
