"""Conversations to prompts: chat templates, and the tokens of what they render.

Knows the shape of messages (OpenAI's) and the conventions of templates (transformers'); `template_sandbox` runs them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import jinja2
from jinja2 import nodes

from quire.errors import InvalidParameter, RequestError, UnsupportedFeature, shown
from quire.tokenizer import template_sandbox
from quire.tokenizer.conversation import (
    Copier,
    Json,
    Message,
    at,
    checked_messages,
    each_of,
    kind_of,
    named,
    text_of_parts,
    unfit,
)
from quire.tokenizer.digest import is_template
from quire.tokenizer.special_text import marked, turn_marks
from quire.tokenizer.template_budget import Budget, BudgetExceeded
from quire.tokenizer.template_sandbox import TemplateRefusal
from quire.tokenizer.tokenizer import MARK_END, MARK_START, Tokenizer, without_marks

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RESERVED = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "template",
    "tokenizer",
    "protect",
    "self",
)
"""Names that have a meaning of their own, in templates or in the functions here."""
MAX_OUTPUT_CHARACTERS = 16_000_000
MAX_RENDER_SECONDS = 2.0
MAX_REFUSAL_CHARACTERS = 2_000
"""Of what a template says when it refuses a conversation: it may quote it."""
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What a template can raise; RuntimeError includes endless recursion."""
UNKNOWN = "qvxunknown_"
"""Begins the names of fields that no template has."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ContentFormat(StrEnum):
    """What a template expects as the content of a message."""

    STRING = "string"
    """A string; parts are joined by line breaks."""
    PARTS = "openai"
    """A list of parts with types; a string becomes a single part unless the template also takes strings."""


class ChatTemplate:
    """A compiled chat template.

    Raises: InvalidParameter(parameter="chat_template") for a template that jinja cannot compile.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        max_output_characters: int = MAX_OUTPUT_CHARACTERS,
        max_seconds: float = MAX_RENDER_SECONDS,
    ) -> None:
        named = {"bos_token": bos_token, "eos_token": eos_token}
        self.source = source
        self.variables = {**(special_tokens or {}), **{name: text for name, text in named.items() if text is not None}}
        """What every rendering sees beside the messages: bos_token, eos_token and the like."""
        self._limits = (max_output_characters, max_seconds)
        try:
            self._tree = template_sandbox.parse(source)
            self._template = template_sandbox.compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise _bad_template(f"line {error.lineno}: {error.message}") from error
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise _bad_template(f"it is nested too deeply ({type(error).__name__})") from error

    @cached_property
    def content_format(self) -> ContentFormat:
        """String, or parts where the template loops over the content of a message."""
        return ContentFormat.PARTS if _loops_over_content(self._tree) else ContentFormat.STRING

    @cached_property
    def names(self) -> frozenset[str]:
        """The variables that the template reads: what `template_kwargs` can have an effect on."""
        return template_sandbox.variables(self._tree)

    def reads(self, name: str, level: str) -> bool:
        """Whether the template may read a field of a `message`, a `call` or its `function`: it has the name, or writes
        the object as a whole."""
        return name in self._fields or level in self._written_whole

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        protect: Collection[str] = (),
        **template_kwargs: object,
    ) -> str:
        """The prompt for a conversation.

        Strings in `protect` (special tokens) are marked wherever they stand in messages, tools, documents and
        template_kwargs, in values and in keys, so that `encode_chat` takes them for the text they are; `without_marks`
        gives the text to show.

        Raises: InvalidParameter naming the message and field, or for what the template itself refuses;
        UnsupportedFeature for content other than text.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidParameter(
                "Cannot set both add_generation_prompt and continue_final_message: either the model starts a new"
                " message or it continues the last one. Set one of them to False.",
                parameter="continue_final_message",
            )
        copier = Copier()
        with named("messages"):
            conversation = each_of(checked_messages(messages), lambda message: self._message(message, copier))
        variables: dict[str, Json] = {
            "messages": conversation,
            "tools": copier.objects(tools, "tools"),
            "documents": copier.objects(documents, "documents"),
            **self._extra_variables(template_kwargs, copier),
        }
        variables = {name: marked(value, protect) for name, value in variables.items()}
        final = _tag_final(cast("list[Message]", variables["messages"])) if continue_final_message else None
        text = self._run({**self.variables, **variables, "add_generation_prompt": add_generation_prompt})
        return text if final is None else _cut_at_tag(text, final)

    def _run(self, variables: Mapping[str, object]) -> str:
        budget = Budget(max_characters=self._limits[0], max_seconds=self._limits[1])
        try:
            return template_sandbox.render(self._template, variables, budget)
        except TemplateRefusal as error:
            raise InvalidParameter(
                f"the chat template refuses this conversation: {_short(error.message or '', MAX_REFUSAL_CHARACTERS)}",
                parameter="messages",
            ) from error
        except BudgetExceeded as error:
            raise InvalidParameter(
                f"the chat template was stopped: {error.message}. Shorten the conversation, or correct the template.",
                parameter="messages",
            ) from error
        except FAILURES as error:
            problem = f"{type(error).__name__}: {_short(str(error).rstrip('.'))}"
            raise InvalidParameter(
                f"the chat template failed on this conversation: {problem}. Check that the messages have the roles and"
                " fields that the template reads, or pass another chat_template.",
                parameter="messages",
            ) from error

    def _message(self, message: object, copier: Copier) -> Message:
        """A checked copy of a message, in the form the template expects."""
        plain = copier.mapping(message)
        role = plain.get("role")
        if not isinstance(role, str) or (role not in ROLES and role not in self._constants):
            raise unfit(f" must be one of {', '.join(ROLES)}, got {shown(role)}", "role")
        result: Message = {name: value for name, value in plain.items() if value is not None}
        if "content" in result or role != "assistant":
            with at("content"):
                result["content"] = self._content(result.get("content"))
        if "tool_calls" in result:
            with at("tool_calls"):
                result["tool_calls"] = copier.tool_calls(result["tool_calls"])
        reasoning = next((result[name] for name in REASONING_FIELDS if name in result), None)
        if reasoning is not None:
            return {"thinking": reasoning, **result, "reasoning_content": reasoning}
        return result

    def _content(self, content: Json) -> Json:
        if isinstance(content, str):
            takes_strings = self.content_format is ContentFormat.STRING or self._tests_for_strings
            return content if takes_strings else [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise unfit(f" must be a string or a list of content parts, got {kind_of(content)}")
        parts = text_of_parts(content)
        if self.content_format is ContentFormat.STRING:
            return "\n".join(parts)
        return [{"type": "text", "text": part} for part in parts]

    def _extra_variables(self, given: Mapping[str, object], copier: Copier) -> dict[str, Json]:
        return checked_template_kwargs(copier.variables(given, "chat_template_kwargs"), (*RESERVED, *self.variables))

    @cached_property
    def _constants(self) -> frozenset[str]:
        """Strings the template compares with: roles of its own (`ipython`, `critic`) are among them."""
        return frozenset(node.value for node in self._tree.find_all(nodes.Const) if isinstance(node.value, str))

    @cached_property
    def _fields(self) -> frozenset[str]:
        return self._constants | {node.attr for node in self._tree.find_all(nodes.Getattr)}

    @cached_property
    def _written_whole(self) -> frozenset[str]:
        """The objects of which fields are seen that nobody knows."""
        field = {level: {UNKNOWN + level: "x"} for level in ("message", "call", "function")}
        function = {"name": "f", "arguments": {}, **field["function"]}
        call = {"id": "call00000", "type": "function", "function": function, **field["call"]}
        called = {"role": "assistant", "content": "", "tool_calls": [call], **field["message"]}
        try:
            text = self.render([{"role": "user", "content": "a"}, called])
        except RequestError:
            return frozenset()
        return frozenset(level for level in field if UNKNOWN + level in text)

    @cached_property
    def _tests_for_strings(self) -> bool:
        return any(test.name in ("string", "iterable", "sequence") for test in self._tree.find_all(nodes.Test))


def checked_template_kwargs(given: object, reserved: Collection[str] = RESERVED) -> dict[str, Any]:
    """The variables a caller adds for a template, none of which may take the place of others.

    Raises: InvalidParameter.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidParameter(
            f"chat_template_kwargs must be an object with names as keys, got {shown(given)}",
            parameter="chat_template_kwargs",
        )
    taken = [name for name in given if name in reserved]
    if taken:
        raise InvalidParameter(
            f"chat_template_kwargs may not set: {_short(', '.join(taken))}."
            " Use the parameter of that name, if there is one.",
            parameter="chat_template_kwargs",
        )
    return dict(given)


def has_chat_template(tokenizer: Tokenizer | None, source: str | None = None) -> bool:
    """Whether `load_chat_template` would find one."""
    return tokenizer is not None and (source is not None or tokenizer.chat_template is not None)


def load_chat_template(tokenizer: Tokenizer, source: str | None = None, *, with_tools: bool = False) -> ChatTemplate:
    """The template to use with a tokenizer: the model's own, or `source`.

    `source` is a template, a path to one, or the name of one of the model's templates.

    Raises: UnsupportedFeature when there is none; InvalidParameter for one that cannot be read or compiled.
    """
    templates = tokenizer.chat_templates
    if source is not None:
        text: str | None = templates[source] if source in templates else _template_text(source)
    else:
        text = templates.get("tool_use", tokenizer.chat_template) if with_tools else tokenizer.chat_template
    if text is None:
        names = f" (it has templates named {', '.join(sorted(templates))})" if templates else ""
        raise UnsupportedFeature(
            f"This model has no chat template{names}. Pass chat_template (--chat-template), or use generate() and"
            " /v1/completions with a prompt in the model's own format.",
            parameter="chat_template",
        )
    return ChatTemplate(text, special_tokens=tokenizer.named_tokens)


def _template_text(source: str) -> str:
    """A template as it stands, or from the file it names."""
    if is_template(source):
        return source
    try:
        if Path(source).exists() and not Path(source).is_file():  # a pipe would be waited for
            raise ValueError("it is no regular file")
        return Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidParameter(
            f"chat_template {source[:200]!r} is neither a template nor a file that can be read ({error}). Pass a Jinja"
            " template, or the path of one.",
            parameter="chat_template",
        ) from error


def chat_prompt(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, object]] | None = None,
    documents: Sequence[Mapping[str, object]] | None = None,
    **template_kwargs: object,
) -> tuple[str, list[int]]:
    """(text, token ids) of a conversation, in which special tokens that the caller typed are text.

    Raises: as `ChatTemplate.render`.
    """
    rendered = template.render(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        documents=documents,
        protect=tokenizer.special_tokens,
        **template_kwargs,
    )
    return without_marks(rendered), encode_chat(tokenizer, rendered)


def encode_chat(tokenizer: Tokenizer, rendered: str) -> list[int]:
    """The token ids of a rendered conversation.

    The template writes BOS and all other special tokens itself, so none is added. Special tokens that `render` marked
    as the caller's are text; only those of the template are special.

    Raises: InvalidParameter for an unpaired surrogate.
    """
    if MARK_START not in rendered and MARK_END not in rendered:
        return tokenizer.encode(rendered, add_special_tokens=False)
    return tokenizer.encode_marked(turn_marks(rendered, tokenizer.special_tokens))


def _tag_final(messages: list[Message]) -> str:
    """Mark the end of the last message's text, and return that text. Mutates messages."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + CONTINUE_TAG
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            part["text"] = text + CONTINUE_TAG
            return text
    where = f"messages[{len(messages) - 1}].content"
    raise InvalidParameter(
        f"{where} has no text to continue. Send another message after it, such as the result of its call, or leave out "
        "continue_final_message if it is set.",
        parameter=where,
    )


def _cut_at_tag(text: str, final: str) -> str:
    """The prompt up to the end of the final message; if the template trims messages, so is this one."""
    tag = CONTINUE_TAG.strip()
    if tag not in text or final.strip() not in text:
        raise InvalidParameter(
            "the chat template leaves the final message out or changes it, so there is nothing to continue. Send"
            " another message after it, or leave out continue_final_message if it is set.",
            parameter="continue_final_message",
        )
    start = text.rindex(tag)
    return text[:start] if text.startswith(CONTINUE_TAG, start) else text[:start].rstrip()


def _short(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _bad_template(problem: str) -> RequestError:
    return InvalidParameter(
        f"the chat template cannot be compiled: {problem}. Correct it, or pass another chat_template.",
        parameter="chat_template",
    )


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template loops over the content of a message, directly or through variables and macros.

    Names are followed without regard to scope: two passes over assignments, loops and macro calls find chains that
    real templates have.
    """
    aliases: set[str] = set()
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for _ in range(2):
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, aliases):
                aliases.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            if macro is not None:
                pairs = zip(macro.args, call.args, strict=False)
                aliases.update(parameter.name for parameter, given in pairs if _is_content(given, aliases))
    return any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, aliases: set[str]) -> bool:
    """Whether an expression is the content of a message: `x.content`, `x['content']`, an alias, or one filtered."""
    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter):
        return node.node is not None and _is_content(node.node, aliases)
    return False
