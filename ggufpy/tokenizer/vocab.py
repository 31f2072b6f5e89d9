"""The vocabulary of a GGUF file: tokens, their kinds, special ids, and the tokens that end generation.

Owns: reading and checking the `tokenizer.ggml.*` keys, and llama.cpp's rules about token names. Does not own: finding
special tokens in a text (`specials.py`), turning text into tokens (`families.py`, `tokenizer.py`).

Opening a vocabulary builds no strings, unless it has byte tokens, which are checked. The tokens are read, as bytes,
when something first depends on them. The rules are those of llama_vocab::impl::load (llama-vocab.cpp).
"""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ggufpy.errors import TokenizerError
from ggufpy.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer

__all__ = ["TokenAttr", "Vocabulary"]

_log = logging.getLogger("ggufpy.tokenizer")

_BYTE_TOKEN = re.compile(rb"<0x[0-9A-Fa-f]{2}>")
_DNA_MARK = "\ue000".encode()  # in the name of a token for bases, which may also be a word


class TokenAttr:
    """What kind of token it is, in bits (llama.h: llama_token_attr). Plain numbers: there are hundreds of thousands."""

    UNDEFINED = 0
    UNKNOWN = 1
    UNUSED = 2
    NORMAL = 4
    CONTROL = 8
    USER_DEFINED = 16
    BYTE = 32


# By the number in tokenizer.ggml.token_type; any other is undefined.
_ATTRS = {
    1: TokenAttr.NORMAL,
    2: TokenAttr.UNKNOWN,
    3: TokenAttr.CONTROL,
    4: TokenAttr.USER_DEFINED,
    5: TokenAttr.UNUSED,
    6: TokenAttr.BYTE,
}
_HIDDEN = TokenAttr.CONTROL | TokenAttr.UNKNOWN  # matched in a text, and shown, only on request


@dataclass(frozen=True, slots=True)
class _Model:
    """Hold what `tokenizer.ggml.model` implies until the file says otherwise."""

    ids: Mapping[str, int]
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    clean_spaces: bool = False
    has_merges: bool = False
    pre: str | None = None


_GPT2 = _Model({"bos": 11, "eos": 11}, clean_spaces=True, has_merges=True)
_MODELS = {
    "gpt2": _GPT2,
    "hybriddna": _GPT2,
    "whitespace": _GPT2,
    "gemma4": _Model({}, clean_spaces=True, has_merges=True, add_bos=True, pre="gemma4"),
    "llama": _Model({"bos": 1, "eos": 2, "unk": 0}, add_bos=True, add_space_prefix=True),
    "bert": _Model({"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103}, add_bos=True, clean_spaces=True),
    "t5": _Model({"eos": 1, "unk": 2, "pad": 0}, add_eos=True),
    "rwkv": _Model({}),
    "plamo2": _Model({"bos": 1, "eos": 2, "unk": 0, "pad": 3}),
    "no_vocab": _Model({}),
    "none": _Model({}),
}

_ID_KEYS = {
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
    "unk": ("unknown_token_id",),
    "sep": ("seperator_token_id",),  # spelled so in the format
    "pad": ("padding_token_id",),
    "mask": ("mask_token_id",),
    "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",),
    "fim_rep": ("fim_rep_token_id",),
    "fim_sep": ("fim_sep_token_id",),
}

# Names that say what a token is for when the file does not. Where several are in one vocabulary llama.cpp takes any
# (the order of its hash table); here the first one counts.
_NAMED = {
    "eot": "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT]"
    " <｜end▁of▁sentence｜> <end_of_utterance>",
    "eom": "<|eom_id|>",
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
_NAMED_EOG = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>"
    " <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>"
    " <｜end▁of▁sentence｜> [e~["
)
_SEPARATING = ("jina-v1-en", "jina-v2-code", "roberta-bpe")  # pre-tokenizers of models that take pairs of texts
_HARMONY = "<|channel|> <|message|> <|start|> <|constrain|>"  # user-defined in llama.cpp, so that they are always shown


@dataclass(frozen=True, slots=True)
class _Names:
    """Hold what the names of tokens add to what the file says."""

    ids: Mapping[str, int]
    attrs: Mapping[int, int]  # overridden kinds
    eog: frozenset[int]


class Vocabulary:
    """Read the vocabulary from metadata. Raises TokenizerError for what is missing, mistyped or inconsistent."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.model = self._text("model")
        if self.model is None:
            raise TokenizerError("tokenizer.ggml.model is missing: the file has no vocabulary")
        if self.model not in _MODELS:
            raise TokenizerError(
                f"tokenizer.ggml.model: {self.model!r} is unknown, expected one of {', '.join(_MODELS)}"
            )
        facts = _MODELS[self.model]
        self.pre_name = facts.pre or self._text("pre")
        self.pre = self._read_pre() if facts.has_merges else None
        self.size = self._read_size()
        self._kinds = self._read_kinds()
        self._check_scores()
        if facts.has_merges and self.pre_name != "kimi-k2" and self._array("merges", "str") is None:
            raise TokenizerError("tokenizer.ggml.merges is missing, and this vocabulary merges by it")
        self._given_ids = self._read_ids(facts.ids)
        self.add_bos = self._flag("add_bos_token", facts.add_bos or bool(self.pre and self.pre.add_bos))
        self.add_bos = self.add_bos or bool(self.pre and self.pre.always_bos)
        self.add_eos = self._flag("add_eos_token", facts.add_eos)
        self.add_sep = self._flag("add_sep_token", self.model == "bert" or self.pre_name in _SEPARATING)
        self.add_space_prefix = self._flag("add_space_prefix", facts.add_space_prefix)
        self.clean_spaces = self.pre.clean_spaces if self.pre else facts.clean_spaces
        self.remove_extra_whitespaces = self._flag("remove_extra_whitespaces", False)
        self.lowercase = self._flag("normalizer.lowercase", self.pre.lowercase if self.pre else True)
        self.strip_accents = self._flag("normalizer.strip_accents", self.lowercase)
        self._check_byte_tokens()

    # -- reading and checking ------------------------------------------------------------------------------------

    def _get(self, name: str, kind: type, expected: str) -> Any:
        key = f"tokenizer.ggml.{name}"
        value = self._metadata.get(key)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise TokenizerError(f"{key}: expected {expected}, found {_shown(value)}")
        return value

    def _text(self, name: str) -> str | None:
        return self._get(name, str, "a string")  # type: ignore[no-any-return]

    def _flag(self, name: str, default: bool) -> bool:
        value = self._get(name, bool, "true or false")
        return default if value is None else bool(value)

    def _array(self, name: str, *types: str) -> Any:
        """Give an array, checked to be of one of the GGUF types named; None when the file has none."""
        key = f"tokenizer.ggml.{name}"
        value = self._metadata.get(key)
        if value is None:
            return None
        found = getattr(value, "type", None)  # a GGUFArray knows; a plain list is checked when it is read
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or (found and found not in types):
            raise TokenizerError(f"{key}: expected an array of {' or '.join(types)}, found {_shown(value)}")
        return value

    def _read_pre(self) -> PreTokenizer:
        if not self.pre_name:
            _log.warning("tokenizer.ggml.pre is missing: text is cut the 'default' way, which may not be the model's")
            self.pre_name = "default"
        try:
            return PRE_TOKENIZERS[self.pre_name]
        except KeyError:
            raise TokenizerError(f"tokenizer.ggml.pre: the pre-tokenizer {self.pre_name!r} is unknown") from None

    def _read_size(self) -> int:
        if self.model in ("no_vocab", "none"):
            size = self._metadata.get(f"{self._metadata.get('general.architecture')}.vocab_size", 0)
            if not isinstance(size, int):
                raise TokenizerError(f"vocab_size: expected a number, found {_shown(size)}")
            return size
        tokens = self._array("tokens", "str")
        if not tokens:
            raise TokenizerError("tokenizer.ggml.tokens: expected an array of str, found none or an empty one")
        return len(tokens)

    def _read_kinds(self) -> dict[int, int]:
        """Read which tokens are not normal ones."""
        types = self._array("token_type", "i32")
        self._check_length("token_type", types)
        return {} if types is None else {id: kind for id, kind in enumerate(_listed(types)[: self.size]) if kind != 1}

    def _check_scores(self) -> None:
        self._check_length("scores", self._array("scores", "f32", "i32"))

    def _check_length(self, name: str, values: Sequence[Any] | None) -> None:
        if values is not None and len(values) < self.size:
            raise TokenizerError(
                f"tokenizer.ggml.{name}: expected {self.size} entries, one for each token, found {len(values)}"
            )

    def _read_ids(self, defaults: Mapping[str, int]) -> dict[str, int]:
        """Read the special ids. One that is no token is left out: what the file meant by it cannot be known."""
        ids = dict(defaults)
        if self.pre and not self.pre.bos_by_default:
            del ids["bos"]
        ids = {role: id for role, id in ids.items() if id < self.size}
        for role, names in _ID_KEYS.items():
            for name in names:
                value = self._get(name, int, "a token id")
                if value is None:
                    continue
                if 0 <= value < self.size:
                    ids[role] = value
                else:
                    _log.warning("tokenizer.ggml.%s: %d is no token (there are %d); ignored", name, value, self.size)
                    ids.pop(role, None)
        return ids

    def _check_byte_tokens(self) -> None:
        for id, kind in self._kinds.items():
            if kind == 6 and not _BYTE_TOKEN.fullmatch(self.texts[id]):
                found = repr(self.texts[id][:40])
                raise TokenizerError(f"tokenizer.ggml.tokens[{id}]: expected a byte <0x00> to <0xFF>, found {found}")

    # -- tokens --------------------------------------------------------------------------------------------------

    @cached_property
    def texts(self) -> list[bytes]:
        """The tokens as they are shown: as in the file, but for the mark of DNA."""
        if self.model != "hybriddna" or b"<oov>" not in self.id_of:
            return self._names_in_file
        first = self.id_of[b"<oov>"] + 1
        names = self._names_in_file
        return names[:first] + [name if name == _DNA_MARK else name.removesuffix(_DNA_MARK) for name in names[first:]]

    @cached_property
    def _names_in_file(self) -> list[bytes]:
        if self.model in ("no_vocab", "none"):
            return [b""] * self.size
        texts = _bytes_listed(self._array("tokens", "str"), "tokenizer.ggml.tokens")
        if b"" in texts:
            texts = [text or b"[EMPTY_%d]" % id for id, text in enumerate(texts)]
        return texts

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """The id of each token."""
        names = self._names_in_file
        ids = dict(zip(names, range(self.size), strict=True))
        if len(ids) != self.size and self.model not in ("no_vocab", "none"):
            twin = next(id for id, name in enumerate(names) if ids[name] != id)
            raise TokenizerError(
                f"tokenizer.ggml.tokens: tokens {twin} and {ids[names[twin]]} are both {names[twin][:40]!r}"
            )
        return ids

    @cached_property
    def charsmap(self) -> bytes:
        """The precompiled character map of a unigram vocabulary; empty when the file has none."""
        data = self._array("precompiled_charsmap", "u8", "i8")
        if data is None:
            return b""
        try:
            return bytes(value & 0xFF for value in _listed(data))
        except TypeError:
            raise TokenizerError("tokenizer.ggml.precompiled_charsmap: expected bytes, found other items") from None

    @cached_property
    def merges(self) -> list[bytes]:
        """The merges, best first, each as the left part, a space and the right part."""
        merges = self._array("merges", "str")
        return [] if merges is None else _bytes_listed(merges, "tokenizer.ggml.merges")

    @cached_property
    def scores(self) -> list[float]:
        """How likely the tokens are, the greater the likelier; zeros when the file does not say."""
        scores = self._array("scores", "f32", "i32")
        if scores is None:
            return [0.0] * self.size
        try:
            return array("f", _listed(scores)[: self.size]).tolist()
        except TypeError:
            raise TokenizerError("tokenizer.ggml.scores: expected numbers, found other items in it") from None

    @property
    def unusual(self) -> dict[int, int]:
        """The kinds of the tokens that are not normal ones, after llama.cpp's overrides."""
        found = {id: self.attr(id) for id in self._kinds.keys() | self._names.attrs.keys()}
        return {id: attr for id, attr in sorted(found.items()) if attr != TokenAttr.NORMAL}

    def attr(self, id: int) -> int:
        """Give the kind of a token, after llama.cpp's overrides."""
        return self._names.attrs.get(id) or self.attr_in_file(id)

    def attr_in_file(self, id: int) -> int:
        """Give the kind of a token before them."""
        return _ATTRS.get(self._kinds.get(id, 1), TokenAttr.UNDEFINED)

    @cached_property
    def model_names(self) -> tuple[str, str, str]:
        """What the model is called, in lower case, its architecture and its pre-tokenizer: llama.cpp goes by these."""
        names = (self._metadata.get(f"general.{key}", "") for key in ("name", "architecture"))
        name, arch = (one if isinstance(one, str) else "" for one in names)
        return name.lower(), arch, self.pre_name or ""

    def is_hidden(self, id: int) -> bool:
        """Tell whether the token is a control or the unknown token, which `skip_special_tokens` leaves out."""
        return bool(self.attr(id) & _HIDDEN)

    # -- what names say ------------------------------------------------------------------------------------------

    @cached_property
    def _names(self) -> _Names:
        attrs: dict[int, int] = {}

        def attr(id: int) -> int:
            return attrs.get(id) or self.attr_in_file(id)

        def found(names: str) -> dict[str, int]:
            return {name: self.id_of[name.encode()] for name in names.split() if name.encode() in self.id_of}

        ids = dict(self._given_ids)
        for role, names in _NAMED.items():
            if role not in ids and (candidates := found(names)):
                ids[role] = id = next(iter(candidates.values()))
                attrs[id] = attr(id) | TokenAttr.CONTROL
        eog = {ids[role] for role in ("fim_pad", "fim_rep", "fim_sep") if role in ids}
        for id in found(_NAMED_EOG).values():
            eog.add(id)
            attrs[id] = attr(id) | TokenAttr.CONTROL
        attrs |= dict.fromkeys(found(_HARMONY).values(), TokenAttr.USER_DEFINED)
        eog |= {ids[role] for role in ("eos", "eot", "eom") if role in ids}
        self._drop_inner_ends(eog, attrs)
        return _Names(ids, attrs, frozenset(eog))

    def _drop_inner_ends(self, eog: set[int], attrs: dict[int, int]) -> None:
        """Leave out the names that do not end generation next to others: a message's end, or a plain `</s>`."""
        ends = {self.texts[id]: id for id in eog}
        call = b"<|call|>" in ends or b"<|calls|>" in ends
        if b"<|end|>" in ends and call and (b"<|return|>" in ends or b"<|flush|>" in ends):
            eog.discard(ends[b"<|end|>"])
            attrs[ends[b"<|end|>"]] = TokenAttr.USER_DEFINED
        if b"</s>" in ends and (b"<|tool_response>" in ends or b"<|plamo:eos|>" in ends):
            eog.discard(ends[b"</s>"])
            attrs[ends[b"</s>"]] = TokenAttr.NORMAL

    @property
    def around(self) -> tuple[list[str], list[str]]:
        """The roles of the tokens that a text begins and ends with, in their order."""
        if self.model == "bert":
            return ["bos"], ["sep"]
        if self.model in ("rwkv", "plamo2"):  # llama.cpp adds none, whatever the file says
            return [], []
        return ["bos"] * self.add_bos, ["eos"] * self.add_eos

    @property
    def ids(self) -> Mapping[str, int]:
        """The special ids by role (bos, eos, eot, eom, unk, sep, pad, mask, fim_pre …); absent ones are not in it."""
        return self._names.ids

    @property
    def given_ids(self) -> Mapping[str, int]:
        """The same without those that only the name of a token tells: asking for these reads no token."""
        return self._given_ids

    @property
    def eog(self) -> frozenset[int]:
        """The tokens that end generation: exactly llama.cpp's set, which it mostly makes from names."""
        return self._names.eog


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]}"


def _listed(values: Any) -> list[Any]:
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _bytes_listed(values: Any, key: str) -> list[bytes]:
    """List strings as bytes: a GGUFArray gives them without decoding."""
    if hasattr(values, "rawlist"):
        return values.rawlist()  # type: ignore[no-any-return]
    try:
        return [text.encode("utf-8", "surrogateescape") for text in values]
    except AttributeError:
        raise TokenizerError(f"{key}: expected an array of str, found other items in it") from None
