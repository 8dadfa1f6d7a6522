"""Anthropic's bodies: messages of blocks, and the tools that are the caller's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, model_validator

from infinilm.sampling import MAX_STOP_LENGTH, MAX_STOPS
from infinilm.server.bodies import MAX_AGENT_TOOLS, Inner, Sampled, Variables, Whole, of_kinds


class TextBlock(Inner):
    type: Literal["text"]
    text: str


class ThinkingBlock(Inner):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Inner):
    """Thoughts that only the model that wrote them can read"""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Inner):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def as_blocks(content: Any) -> Any:
    if not isinstance(content, str | list):
        raise ValueError("must be a text or a list of blocks")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


MEDIA = {"image": "image", "document": "PDF or other document"}


def readable(block: Any) -> Any:
    """A block that is neither image nor document. Their refusal is in Anthropic's words, by which Claude Code
    takes them out of a conversation: it would be refused for ever."""
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and kind in MEDIA:
        raise ValueError(f"must be text, but is of type {kind!r}: could not process {MEDIA[kind]}")
    return block


TextBlocks = Annotated[
    list[Annotated[TextBlock, BeforeValidator(readable)]],
    FailFast(),
    BeforeValidator(as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(Inner):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks = []
    is_error: bool = False


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
Blocks = Annotated[
    list[Annotated[Block, BeforeValidator(readable)]],
    FailFast(),
    BeforeValidator(as_blocks, json_schema_input_type=str | list[Block]),
]
# The blocks that each role may say
SAID: dict[str, tuple[type[Inner], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class BlockMessage(Inner):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def is_said(self) -> BlockMessage:
        if self.role == "user" and not self.content:
            raise ValueError("content must not be empty where the role is 'user'")
        for block in self.content:
            if not isinstance(block, SAID[self.role]):
                raise ValueError(f"content must not have a {block.type!r} where the role is {self.role!r}")
        return self


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[list[Stop], FailFast(), Field(max_length=MAX_STOPS)]


class ClientTool(Inner):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool = False


# Without those that Anthropic's servers would run
ClientTools = Annotated[
    list[ClientTool],
    FailFast(),
    Field(max_length=MAX_AGENT_TOOLS),
    BeforeValidator(
        lambda given: of_kinds(given, (None, "custom")), json_schema_input_type=list[dict[str, Any]]
    ),
]


class ToolChoice(Inner):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Inner):
    type: str


class OutputFormat(Inner):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Inner):
    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(Sampled):
    """POST /v1/messages/count_tokens"""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    idle = {"mcp_servers": ([],), "n": (1,)}
    refused = {
        "chat_template": "the model's own is rendered",
        "compaction": "send what the model is to read",
        "container": "leave it out",
        "logprobs": "ask /v1/chat/completions for them",
        "max_completion_tokens": "use max_tokens",
        "mcp_servers": "offer their tools as tools of your own",
        "n": "ask several times",
        "response_format": "use output_config",
        "stop": "use stop_sequences",
        "structured_outputs": "use output_config",
        "thread": "send the whole conversation as messages",
    }

    messages: Annotated[list[BlockMessage], FailFast(), Field(min_length=1)]
    system: TextBlocks = []
    tools: ClientTools = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None  # as it was before output_config
    chat_template_kwargs: Variables = {}


class MessagesBody(CountBody):
    """POST /v1/messages"""

    max_tokens: Whole
    stop_sequences: Stops = []
