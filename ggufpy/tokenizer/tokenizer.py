"""`Tokenizer`: text ↔ token ids, and messages → prompt.

Owns: the order of things in a text (begin and end tokens, special tokens, text between them), decoding and its options.
Does not own: reading the vocabulary (`vocab.py`), finding special tokens (`specials.py`), a family's way with plain
text (`families.py`), templates (`ggufpy.chat`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from os import PathLike
from typing import Any
from weakref import WeakMethod

from ggufpy.errors import TemplateError, TokenizerError
from ggufpy.gguf import GGUFFile
from ggufpy.tokenizer.decoding import DecodeStream, clean_spaces
from ggufpy.tokenizer.families import Encoder, encoder, reader
from ggufpy.tokenizer.offsets import Token, places
from ggufpy.tokenizer.specials import Specials
from ggufpy.tokenizer.vocab import TokenAttr, Vocabulary

__all__ = ["Tokenizer"]

_TEMPLATE_KEY = "tokenizer.chat_template"
_TEMPLATE_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unk",
    "sep_token": "sep",
    "pad_token": "pad",
    "mask_token": "mask",
}


class Tokenizer:
    """Encode and decode text with the vocabulary of a GGUF file, with llama.cpp's results.

    `encode` equals llama_tokenize, `decode` equals llama_detokenize(remove_special=False, unparse_special=True).
    A file that has no tokens opens too; asking it for text raises TokenizerError. A tokenizer is immutable and may be
    shared between threads.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._vocab = Vocabulary(metadata)
        self._encoder: Encoder | None = None
        self._pieces = _Pieces(self._piece_of)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Open the vocabulary in `metadata` (GGUF keys, arrays as sequences). Raises TokenizerError if it is faulty."""
        return cls(metadata)

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> Tokenizer:
        """Open the vocabulary of a GGUF file, which needs no tensors. Raises GGUFError, TokenizerError or OSError."""
        return cls(GGUFFile(path).metadata)  # the metadata keeps what it still needs of the file mapped

    def __repr__(self) -> str:
        return f"<Tokenizer {self._vocab.model} {self._vocab.pre_name or ''} with {self.n_vocab} tokens>"

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def n_vocab(self) -> int:
        """How many tokens there are. A model's logits may have more columns, which are no tokens."""
        return self._vocab.size

    @property
    def add_bos(self) -> bool:
        """Whether `add_special` puts the begin token in front."""
        return self._vocab.add_bos

    @property
    def add_eos(self) -> bool:
        """Whether `add_special` puts the end token behind."""
        return self._vocab.add_eos

    @property
    def add_sep(self) -> bool:
        """Whether the separator token stands between the two texts of a pair (`scoring.encode_rank`)."""
        return self._vocab.add_sep

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text."""
        return self._vocab.given_ids.get("bos")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._vocab.given_ids.get("eos")

    @property
    def sep_token_id(self) -> int | None:
        """The token that separates two texts."""
        return self._vocab.given_ids.get("sep")

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a turn of a chat."""
        return self._vocab.ids.get("eot")

    @property
    def special_ids(self) -> dict[str, int]:
        """All special ids by role: bos, eos, eot, eom, unk, sep, pad, mask, fim_pre, fim_suf, fim_mid, fim_pad, …"""
        return dict(self._vocab.ids)

    @property
    def fim_token_ids(self) -> tuple[int, int, int] | None:
        """The fill-in-the-middle tokens that come before the prefix, the suffix and the middle; None unless all are."""
        prefix, suffix, middle = (self._vocab.ids.get(role) for role in ("fim_pre", "fim_suf", "fim_mid"))
        return None if prefix is None or suffix is None or middle is None else (prefix, suffix, middle)

    @property
    def eog_token_ids(self) -> frozenset[int]:
        """The tokens that end generation: llama.cpp's set (llama_vocab_is_eog).

        llama.cpp makes it from the file's ids and from names, and so do we, also where the name means something else:
        in Gemma 3, 212 is `</s>`, the closing HTML tag, and stops generation there as here.
        """
        return self._vocab.eog

    # -- encoding ------------------------------------------------------------------------------------------------

    def encode(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text.

        `add_special` adds the begin and end tokens that the file asks for. `parse_special` takes the names of control
        tokens in the text for these tokens; without it they are text (user-defined tokens are matched either way).
        Bytes need not be UTF-8: each bad one is read as U+FFFD, as llama.cpp does. NUL is a character like any other.
        Raises TokenizerError for a str with a lone surrogate, with its index.
        """
        checked = _checked(text)
        return self._encode(checked, checked, add_special, parse_special)

    def _encode(self, text: str, shadow: str, add_special: bool, parse_special: bool) -> list[int]:
        model = self._family()
        before, after = self._vocab.around if add_special else ([], [])
        ids = list(map(self._required, before))
        for start, end, id in self._specials.split(text, shadow, parse_special=parse_special):
            found = model.encode(text[start:end]) if id is None else [id]
            if ids:
                ids += found
            else:
                ids = found  # not copied: it may be long
        ids += map(self._required, after)
        return ids

    def encode_batch(
        self, texts: Iterable[str | bytes], *, add_special: bool = True, parse_special: bool = False
    ) -> list[list[int]]:
        """Return the token ids of several texts, each as `encode` gives them."""
        return [self.encode(text, add_special=add_special, parse_special=parse_special) for text in texts]

    def tokens_with_offsets(
        self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False
    ) -> list[Token]:
        """Return the tokens that `encode` gives with their bytes and their places: characters of a str, else bytes.

        The places of the parts of a character are that character's. What a vocabulary normalizes is found again, so
        `text[start:end]` may differ from the token's bytes; tokens that were added have an empty place.
        """
        checked = _checked(text)
        before, after = self._vocab.around if add_special else ([], [])
        tokens = [Token(id, self._pieces[id], 0, 0) for id in map(self._required, before)]
        for start, end, id in self._specials.split(checked, checked, parse_special=parse_special):
            if id is None:
                tokens += self._tokens_in(checked, start, end)
            else:
                tokens.append(Token(id, self._pieces[id], start, end))
        tokens += [Token(id, self._pieces[id], len(checked), len(checked)) for id in map(self._required, after)]
        return tokens if isinstance(text, str) else _in_bytes(checked, tokens)

    def _tokens_in(self, text: str, start: int, end: int) -> list[Token]:
        """Return the tokens of a part of the text without special tokens."""
        vocab, part = self._vocab, text[start:end]
        ids = self._family().encode(part)
        is_unknown = {id: bool(vocab.attr(id) & TokenAttr.UNKNOWN) or id == vocab.given_ids.get("unk") for id in ids}
        pieces = [None if is_unknown[id] else self._pieces[id] for id in ids]
        if vocab.model == "bert":  # the space in its tokens only says that a word begins
            pieces = [piece and piece.removeprefix(b" ") for piece in pieces]
        found = places(self._family().seen(part), pieces)
        return [
            Token(id, self._pieces[id], start + first, start + last)
            for id, (first, last) in zip(ids, found, strict=True)
        ]

    @cached_property
    def _specials(self) -> Specials:
        return Specials(self._vocab)

    def _required(self, role: str) -> int:
        id = self._vocab.given_ids.get(role)
        if id is None:
            raise TokenizerError(f"a text begins or ends with the {role} token, but the file has no {role}_token_id")
        return id

    def _family(self) -> Encoder:
        if self._encoder is None:
            self._encoder = encoder(self._vocab)
        return self._encoder

    # -- decoding ------------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD.

        `skip_special_tokens` leaves out control tokens. Raises TokenizerError for an id that is no token.
        """
        pieces = list(map(self._piece_getter(skip_special_tokens), ids))
        if pieces and self._vocab.add_space_prefix:
            pieces[0] = pieces[0].removeprefix(b" ")
        text = b"".join(pieces).decode("utf-8", "replace")
        return clean_spaces(text) if self._vocab.clean_spaces else text

    def decode_stream(self, *, skip_special_tokens: bool = False, continues: bool = False) -> DecodeStream:
        """Return a decoder for tokens that come one by one; what it gives, joined, is what `decode` gives for all.

        Some vocabularies put a space before a text, which `decode` takes off again. `continues` says that the tokens go
        on after others, so that a space before the first of them is a space in the text.
        """
        vocab = self._vocab
        return DecodeStream(
            self._piece_getter(skip_special_tokens),
            clean=vocab.clean_spaces,
            strip_space=vocab.add_space_prefix and not continues,
        )

    def token_to_piece(self, id: int) -> bytes:
        """Return the bytes that a token stands for (llama_token_to_piece with special=True).

        Raises TokenizerError for what is no token's id.
        """
        try:
            return self._pieces[operator.index(id)]
        except TypeError:
            raise TokenizerError(f"expected a token id, got {id!r:.60}") from None

    def _piece_getter(self, skip_special_tokens: bool) -> Callable[[int], bytes]:
        self._family()
        if not skip_special_tokens:
            return self.token_to_piece
        return lambda id: b"" if (piece := self.token_to_piece(id)) and self._vocab.is_hidden(id) else piece

    def _piece_of(self, id: int) -> bytes:
        if not 0 <= id < self.n_vocab:
            raise TokenizerError(f"token {id!r:.60}: expected an id from 0 to {self.n_vocab - 1}")
        return reader(self._vocab)(self._vocab.texts[id], self._vocab.attr(id))

    # -- chat ----------------------------------------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        """The file's chat template; None when it has none, or an empty one."""
        return self._metadata.get(_TEMPLATE_KEY) or None

    @property
    def chat_templates(self) -> dict[str, str]:
        """All chat templates of the file by name; the plain one is called "default"."""
        named = {
            key.removeprefix(f"{_TEMPLATE_KEY}."): value
            for key, value in self._metadata.items()
            if key.startswith(f"{_TEMPLATE_KEY}.")
        }
        if self.chat_template:
            named["default"] = self.chat_template
        return {name: template for name, template in named.items() if isinstance(template, str) and template}

    def apply_chat_template(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str | list[int]:
        """Return the prompt that the chat template makes of `messages`: its text, or with `tokenize` its token ids.

        The text is what Hugging Face's apply_chat_template gives. The ids are those of the text with its control tokens
        taken for what they are, except in what the messages, tools and `kwargs` say: there they are text, so that no
        message can forge a role or an end of turn. They begin with exactly one bos token if the vocabulary adds one.
        `chat_template` is a template or the name of one in the file. Raises TemplateError when there is no template,
        or when it is broken or refuses the messages (then with its own words).
        """
        from ggufpy.chat import render, render_guarded  # only those who chat need it

        template = self.choose_chat_template(chat_template, with_tools=tools is not None)
        names = {name: self._vocab.given_ids.get(role) for name, role in _TEMPLATE_TOKENS.items()}
        tokens = {name: self._special_text(id) for name, id in names.items() if id is not None}
        variables = {"tools": tools, "add_generation_prompt": add_generation_prompt, **kwargs}
        if not tokenize:
            return render(template, messages, tokens, **variables)
        guarded = [special.text for special in self._specials.tokens if special.guarded]
        text, shadow = render_guarded(template, messages, guarded, tokens, **variables)
        ids = self._encode(_checked(text), shadow, add_special=False, parse_special=True)
        if "bos" in self._vocab.around[0] and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self._required("bos"))
        return ids

    def fill(self, template: str, values: Mapping[str, str]) -> list[int]:
        """Return the token ids of a template whose placeholders, the keys, are replaced by texts, the values.

        Control tokens are recognized in the template, and nowhere else: a text cannot forge one.
        """
        from ggufpy.chat import fill_guarded

        guarded = [special.text for special in self._specials.tokens if special.guarded]
        text, shadow = fill_guarded(template, {name: _checked(value) for name, value in values.items()}, guarded)
        return self._encode(_checked(text), shadow, add_special=False, parse_special=True)

    def _special_text(self, id: int) -> str:
        return self._vocab.texts[id].decode("utf-8", "replace")

    def choose_chat_template(self, asked: str | None = None, *, with_tools: bool = False) -> str:
        """Return the template named, or given, as `asked`; else the file's own. Raises TemplateError without one."""
        templates = self.chat_templates
        if asked:
            return templates.get(asked, asked)
        if with_tools and "tool_use" in templates:
            return templates["tool_use"]
        if "default" in templates:
            return templates["default"]
        others = f" by default, only {', '.join(map(repr, templates))}" if templates else ""
        raise TemplateError(
            f"the file has no chat template{others}: pass one as chat_template=, or give the model plain text"
        )


def _in_bytes(text: str, tokens: list[Token]) -> list[Token]:
    """Count the places in bytes of the text."""
    sizes = map(len, (char.encode("utf-8", "surrogateescape") for char in text))
    at = list(accumulate(sizes, initial=0))
    return [Token(token.id, token.piece, at[token.start], at[token.end]) for token in tokens]


class _Pieces(dict[int, bytes]):
    """Remember the bytes of the tokens met."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        super().__init__()
        self._make = WeakMethod(make)  # weak: who makes them holds this

    def __missing__(self, id: int) -> bytes:
        make = self._make()
        assert make is not None
        self[id] = piece = make(id)
        return piece


def _checked(text: str | bytes) -> str:
    """Give the text as str; bytes that are not UTF-8 become surrogate escapes, which each family reads."""
    if isinstance(text, (bytes, bytearray, memoryview)):
        return bytes(text).decode("utf-8", "surrogateescape")
    if not isinstance(text, str):
        raise TokenizerError(f"expected str or bytes, found {type(text).__name__}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"U+{ord(text[error.start]):04X}"
            raise TokenizerError(f"character {error.start} is a lone surrogate ({found}), which no text has") from None
    return text
