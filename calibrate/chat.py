"""Records of a data set: plain text, or a conversation that the model's own chat template turns into text.

Template tokens (turn marks, tool calls, thinking) carry the largest activations of an instruction model, and a text
without them would leave those unseen, so conversations go through the template and are never glued together by hand.
Fields that are read, the first that a record has: `messages`, `conversations`, `text`, `prompt` with `completion`.
The keys of a message are those of the Hugging Face templates (`role`, `content`, `tool_calls`, `reasoning_content`,
...) or those of ShareGPT (`from`, `value`); `tools` beside the messages is handed to the template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quantkit.kernels.errors import QuantkitError

FIELDS = ("messages", "conversations", "text", "prompt+completion")
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant"}


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    eos_token_id: int | None
    bos_token_id: int | None
    chat_template: Any

    def __call__(self, text: str, **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with `role` and `content`, and the tools offered to the model (None: no tools)."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] | None
    where: str


Record = str | Conversation


def field_of(names: Iterable[str], where: str) -> str:
    """Which of `FIELDS` a record with the keys `names` is read by; raises QuantkitError when none is there."""
    keys = set(names)
    for field in FIELDS:
        if keys.issuperset(field.split("+")):
            return field
    raise QuantkitError(
        f"{where}: no field to take text from", value=", ".join(sorted(keys)) or "no fields", allowed=", ".join(FIELDS)
    )


def to_record(row: Mapping[str, Any], field: str, where: str) -> Record:
    """The text or the conversation of a row, read by `field`; raises QuantkitError for values of another kind."""
    if field == "text":
        return _string(row["text"], "text", where)
    if field == "prompt+completion":
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str):
            return prompt + _string(completion, "completion", where)
        return _conversation([*_list(prompt, "prompt", where), *_list(completion, "completion", where)], row, where)
    return _conversation(_list(row[field], field, where), row, where)


def render(conversation: Conversation, tokenizer: Tokenizer) -> str:
    """The conversation as the model's chat template writes it, special tokens included, without a generation prompt.

    Raises QuantkitError when the tokenizer has no template, or when the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise QuantkitError(
            f"{conversation.where}: conversations, and the tokenizer has no chat template",
            hint="give plain text, or put the model's chat_template.jinja beside its tokenizer",
        )
    tools = None if conversation.tools is None else list(conversation.tools)
    messages = [dict(m) for m in conversation.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=False)
    except Exception as e:  # templates are programs: jinja2's errors, but TypeError and KeyError as well
        raise QuantkitError(
            f"{conversation.where}: the chat template refuses the conversation",
            value=f"{type(e).__name__}: {e}",
            hint="some templates want turns that alternate, or know no system or tool role",
        ) from e
    return str(text)


def _conversation(messages: list[Any], row: Mapping[str, Any], where: str) -> Conversation:
    if not messages:
        raise QuantkitError(f"{where}: a conversation without messages")
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise QuantkitError(f"{where}: `tools` is not a list", value=type(tools).__name__)
    turns = tuple(_message(m, f"{where}, message {i}") for i, m in enumerate(messages, 1))
    return Conversation(turns, tuple(tools) if tools else None, where)


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message with `role` and `content` whichever names it came with; keys without a value are left out."""
    if not isinstance(message, Mapping):
        raise QuantkitError(f"{where}: not an object", value=type(message).__name__)
    keys = ("role", "content") if "role" in message else ("from", "value")
    role = message.get(keys[0])
    if not isinstance(role, str):
        found = ", ".join(map(str, message)) or "no keys"
        raise QuantkitError(f"{where}: no role", value=found, allowed="role and content, or from and value")
    # data sets fill the keys of other messages in with null, which templates would take for a tool call
    rest = {k: v for k, v in message.items() if k not in keys and v is not None}
    content = _content(message.get(keys[1]), "tool_calls" in rest, where)
    return {"role": ROLES.get(role, role), "content": content, **rest}


def _content(content: Any, may_be_missing: bool, where: str) -> str:
    if content is None and may_be_missing:
        return ""  # a message that only calls tools
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
        if any(kind != "text" for kind in kinds):
            raise QuantkitError(f"{where}: content that is not text", value=", ".join(map(str, kinds)), allowed="text")
        return "".join(_string(part.get("text"), "text", where) for part in content)
    return _string(content, "content", where)


def _string(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise QuantkitError(f"{where}: `{field}` is not a string", value=type(value).__name__)
    return value


def _list(value: Any, field: str, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise QuantkitError(f"{where}: `{field}` is not a list of messages", value=type(value).__name__)
    return value
