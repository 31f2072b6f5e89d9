"""Chat templates: messages → the text that a model expects.

Owns: the jinja2 environment, which is Hugging Face's, its limits, and telling what a message says from what the
template says. Does not own: which template and special tokens a model has, or token ids (`ggufpy.tokenizer`).

A template comes with a model file and is as trustworthy as that. It runs in jinja2's immutable sandbox, on copies of
the messages: it can neither reach Python's internals nor change anything. Its output and the obvious ways to fill
memory are limited, the time it takes is not: nested loops of a hostile template can keep a processor busy.
Nothing is compiled before a template is first rendered.

Control tokens. Text that a message contributes must not become control tokens, and what the template itself writes
must. The rendered text does not show which is which, so it is rendered a second time with the first and last
characters of all control tokens replaced, in everything that the caller gave, by stand-ins. If that changes nothing
else, the two texts agree place by place, and a control token in the second one can only come from the template. If the
template looks at such characters in the messages (say, it cuts a `<think>` part away), only one character in each
control token in the messages, and in the beginning of one at the end of a string, is replaced, and that text counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from ggufpy.errors import TemplateError

if TYPE_CHECKING:
    import jinja2

__all__ = ["fill_guarded", "render", "render_guarded"]

_OLDEST_JINJA = (3, 1, 6)  # older ones have known ways out of the sandbox
_MAX_OUTPUT = 1 << 26  # characters
_MAX_REPEATED = 1 << 24  # items that `*` may make, bits that `**` may make
_FIRST_STAND_IN = 0xD800  # lone surrogates: no text has them
_REASONING = ("reasoning_content", "thinking", "reasoning")


def render(
    template: str, messages: Sequence[Mapping[str, Any]], tokens: Mapping[str, str] | None = None, /, **variables: Any
) -> str:
    """Return the text that `template` makes of `messages`, as Hugging Face's apply_chat_template.

    `tokens` are the special tokens' texts by the names that templates use (bos_token …); `variables` are tools,
    add_generation_prompt and whatever else the template takes. Raises TemplateError, with the template's own words
    when it refuses the messages.
    """
    return _render(template, messages, tokens or {}, variables, lambda text: text)


def render_guarded(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    guarded: Sequence[str],
    tokens: Mapping[str, str] | None = None,
    /,
    **variables: Any,
) -> tuple[str, str]:
    """Return the text and its shadow: the same, except that it contains the `guarded` tokens only where they are meant.

    The two have the same length. Raises as `render`, and for lone surrogates in the messages.
    """
    tokens = tokens or {}
    given: list[str] = []

    def noted(text: str) -> str:
        given.append(text)
        return text

    text = _render(template, messages, tokens, variables, noted)
    _refuse_surrogates(given)
    stand_ins = {ord(char): _FIRST_STAND_IN + i for i, char in enumerate(sorted(set("".join(guarded))))}
    originals = {stand_in: char for char, stand_in in stand_ins.items()}
    edges = {edge for token in guarded for edge in (token[0], token[-1])}
    if not any(edge in said for edge in edges for said in given):
        return text, text
    without_edges = {ord(edge): stand_ins[ord(edge)] for edge in edges}
    try:
        shadow = _render(template, messages, tokens, variables, lambda text: text.translate(without_edges))
        if shadow.translate(originals) == text:
            return text, shadow
    except TemplateError:
        pass  # the template needs to see these characters
    shadow = _render(template, messages, tokens, variables, lambda text: _defused(text, guarded, stand_ins))
    return shadow.translate(originals), shadow


def fill_guarded(template: str, values: Mapping[str, str], guarded: Sequence[str]) -> tuple[str, str]:
    """Return a template with its placeholders, the keys, replaced by the values, and its shadow as `render_guarded`."""
    edges = sorted({edge for token in guarded for edge in (token[0], token[-1])})
    stand_ins = {ord(edge): _FIRST_STAND_IN + i for i, edge in enumerate(edges)}
    names = re.compile("|".join(map(re.escape, values)))
    text = names.sub(lambda found: values[found[0]], template)
    return text, names.sub(lambda found: values[found[0]].translate(stand_ins), template)


def _refuse_surrogates(given: Sequence[str]) -> None:
    for text in given:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = f"character {error.start} of {text[:40]!r}"
            raise TemplateError(f"the messages have a lone surrogate: {where}") from None


def _defused(text: str, guarded: Sequence[str], stand_ins: Mapping[int, int]) -> str:
    """Replace a character of each guarded token in `text`, and of the beginning of one at its end."""

    def broken(part: str) -> str:
        middle = len(part) // 2
        return part[:middle] + chr(stand_ins[ord(part[middle])]) + part[middle + 1 :]

    for token in guarded:
        if token in text:
            text = text.replace(token, broken(token))
    longest = max(map(len, guarded))
    for start in range(max(0, len(text) - longest + 1), len(text)):
        end = text[start:]
        if not end.isalnum() and any(token.startswith(end) for token in guarded):  # a word is not a forgery: "system"
            return text[:start] + broken(end)
    return text


def _render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tokens: Mapping[str, str],
    variables: Mapping[str, Any],
    said: Callable[[str], str],
) -> str:
    """Render with each string that the caller gave passed through `said`. The template sees copies only."""
    import jinja2

    try:
        given: dict[str, Any] = {"documents": None}
        given |= {name: _plain(value, said) for name, value in variables.items()}
        given["messages"] = _conversation(_plain(messages, said))
        pieces, size = [], 0
        for piece in _compiled(template).generate({**tokens, **given}):
            pieces.append(piece)
            size += len(piece)
            if size > _MAX_OUTPUT:
                raise OverflowError(f"it wrote more than {_MAX_OUTPUT} characters")
        return "".join(pieces)
    except TemplateError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error
    except Exception as error:  # anything at all may come out of a template
        raise TemplateError(f"chat template: {type(error).__name__}: {error}") from error


def _plain(value: Any, said: Callable[[str], str]) -> Any:
    """Copy what the caller gave. The template gets plain values only, since objects have methods that could do harm."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return said(str.__str__(value))
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, said): _plain(item, said) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, said) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), said) for field in fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic's models, which clients of chat services return
        return _plain(value.model_dump(), said)
    raise TemplateError(f"a chat is made of text, numbers, lists and mappings, found {type(value).__name__}")


def _conversation(messages: Any) -> list[dict[str, Any]]:
    """Prepare messages as Hugging Face does: absent is not None, and reasoning goes by all the names it has had."""
    if not messages or not isinstance(messages, (list, tuple)) or not all(isinstance(one, dict) for one in messages):
        raise TemplateError(f"expected a list of messages, each with a role and what it says, found {messages!r:.80}")
    prepared = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None}
        reasoning = next((message[name] for name in _REASONING if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        prepared.append(message)
    return prepared


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Make the environment that Hugging Face's templates are written for."""
    from importlib.metadata import version

    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    found = version("jinja2")
    if tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) < _OLDEST_JINJA:
        oldest = ".".join(map(str, _OLDEST_JINJA))
        raise TemplateError(f"chat templates need jinja2 {oldest} or newer, found {found}: older ones are not safe")

    class GenerationBlock(Extension):
        """Accept {% generation %}, which marks what the model wrote for training, and means nothing here."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Callable[[], str]) -> str:
            return caller()

    class PublicNamespace(Namespace):
        """Refuse names that Python keeps for itself."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # any name may be a keyword here, also "self"
            self, *rest = args
            Namespace.__init__(self)
            for name, value in dict(*rest, **kwargs).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace takes no name that begins with an underscore, found {name!r}")
            super().__setitem__(name, value)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_size(operator, left, right)
            return super().call_binop(context, operator, left, right)

    extensions = [GenerationBlock, "jinja2.ext.loopcontrols"]
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = PublicNamespace
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)  # the type itself has more to offer
    return environment


def _check_size(operator: str, left: Any, right: Any) -> None:
    """Raise OverflowError for a product or power that would fill the memory."""
    if operator == "**":
        too_large = isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_REPEATED
    else:
        sizes = [len(side) if isinstance(side, (str, bytes, list, tuple)) else side for side in (left, right)]
        repeats = any(isinstance(side, (str, bytes, list, tuple)) for side in (left, right))
        too_large = repeats and all(isinstance(n, int) for n in sizes) and sizes[0] * sizes[1] > _MAX_REPEATED
    if too_large:
        raise OverflowError(f"the result of {operator} is too large")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
