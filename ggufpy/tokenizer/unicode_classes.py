"""The letter, number, mark, punctuation, symbol and space classes that llama.cpp's pre-tokenizers use.

Owns: the class of every code point, `shape`, which replaces each character by one of its class so that a pattern needs
only small character sets, lower case and base letters. Does not own: the patterns (`pretokenizers.py`).

The classes are those of llama.cpp's Unicode table (unicode-data.cpp). Python's own tables, and the regex module's, are
of other Unicode versions and differ in thousands of code points, so they cannot be used.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from itertools import accumulate

__all__ = ["CLASS_SETS", "base", "category", "is_space", "lower", "shape"]

# The class of each code point from U+0080 on, as runs: L letter, N number, M mark, P punctuation, S symbol, W space,
# H Chinese letter, h other code point in the Chinese blocks, - none of them; and how many in a row (1 when absent).
_RUNS = (
    "-5W-26WPS5PS2LPS-S4N2SLP2SNLPN3PL23SL31SL458S4L12S14L5S7LSLS17M112L5SL2-2L4PL-4S2LPL3-L-L20-L83SL139SM7L166-L38"
    "-2LP6L41P2-2S3-M45PMPM2PM2PM-8L27-4L4P2-17S3P2SP2S2M11P-P3L43M21N10P4L2ML99PLM7-SM6L2M2SM4L2N10L3S2LP14-2LML30"
    "M27-2L89M11L-14N10L33M9L2SP3L-2MS2L22M4LM9LM3LM5-2P15-L25M3-2P-L11-5L24SL6-9M8L42M24-M33L54M3LM18LM7L10M2P2N10P"
    "L16M3-L8-2L2-2L22-L7-L-3L4-2MLM7-2M2-2M3L-8M-4L2-L3M2-2N10L2S2N6S2LPM-2M3-L6-4L2-2L22-L7-L2-L2-L2-2M-M5-4M2-2M3"
    "-3M-7L4-L-7N10M2L3MP-10M3-L9-L3-L22-L7-L2-L5-2MLM8-M3-M3-2L-15L2M2-2N10PS-7LM6-M3-L8-2L2-2L22-L7-L2-L5-2MLM7-2M2"
    "-2M3-7M3-4L2-L3M2-2N10SLN6-10ML-L6-3L3-L4-3L2-L-L2-3L2-3L3-3L12-4M5-3M3-M4-2L-6M-14N13S8-5M5L8-L3-L23-L16-2MLM7-"
    "M3-M4-7M2-L3-2L-2L2M2-2N10-7PN7SLM3PL8-L3-L23-L10-L5-2MLM7-M3-M4-7M2-6L2-L2M2-2N10-L2M-12M4L9-L3-L41M2LM7-M3-M4L"
    "S-4L3MN7L3M2-2N19SL6-M3-L18-3L24-L9-L-2L7-3M-4M6-M-M8-6N10-2M2P-12L48ML2M7-4SL7M8PN10P2-37L2-L-L5-L24-L-L10ML2M9"
    "L-2L5-L-M7-N10-2L4-32LS3P15SPS3M2S6N20SMSMSMP4M2L8-L36-4M20PM2L5M11-M36-S8MS6-S2P5S4P2-37L43M20LN10P6L6M4L4M3LM3"
    "L2M7L3M4L13M12LMN10M4S2L38-L-5L-2L43PL333-L4-2L7-L-L4-2L41-L4-2L33-L4-2L7-L-L4-2L15-L57-L4-2L67-2M3P9N20-3L16S10"
    "-6L86-2L6-2PL620SPL17WL26P2-3L75P3N3L8-7L18M4-9L19M3P2-9L18M2-12L13-L3-M2-12L52M32P3LP3SLM-2N10-6N10-6P11M3-MN10"
    "-6L89-7L5M2L34ML-5L70-10L31-M12-4M12-4S-3P2N10L30-2L5-11L44-4L26-6N11-3S34L23M5-2P2L53M10-M29-2MN10-6N10-6P7LP6"
    "-2M31-49M5L47M17L8-3N10P7S10M9S9P2-M3L30M13L2N10L44M14-8P4L36M20-3P5N10-3L3N10L36P2L9-7L43-2L3P8-8M3PM21L4ML6ML2"
    "M3L-5L192M64L278-2L6-2L38-2L6-2L8-L-L-L-L31-2L53-L7SLS3L3-L7S3L4-2L6-S3L13S3-2L3-L7S2-W11-5P24W2-5WP20SP13SP12W"
    "-16NL-2N6S3P2LN10S3P2-L13-3S33-15M33-15S2LS4LS2L10SLS3L5S6LSLSLSL4SL11S2L4S5L5S4LSN51L2N5S2-4S376P4S29P2S252-25"
    "S11-21N60S78N22S616P14N30S49P2S31P10S403P22S63P4S32P2S374-2S32-S105L229S6L4M3L2-5P4NP2L38-L-5L-2L56-7LP-14ML23-9"
    "L7-L7-L7-L7-L7-L7-L7-L7-M32P47LP32S2P12-34S26-S89-12S214-26S16WP3SL2NP10S2P12SN9M6PL5S2N3L2PS2-L86-2M2S2L3PL90P"
    "L4-5L43-L94-S2N4S10L32S36-11SL16S31-N10S30N8SN15S32N10S39N15S320H6592S64H20992L1165-3S55-9L46P2L269P3L16N10L2-20"
    "L47M4PM10PL31M2L70N10M2P6-8S23L9S2L103S2L64-5L2-L-L5-24L16ML3ML4ML23M5S4M-3N6S4-6L52P4-8M2L50M18-8P2N10-6M18L6P3"
    "LPL2MN10L28M8P2L23M13-11PL29-3M4L47M14P13-LN10-4P2L5ML10N10L5-L41M14-9L3ML8M2-2N10-2P4L23S3LM3L50MLM3L2M2L5M2LML"
    "-24L3P2L11M5P2L3M2-10L6-2L6-2L6-9L7-L7-L43SL14S2-4L115M8PM2-2N10-6L11172-12L23-4L49-8452H366h2H106h38L7-12L5-5LM"
    "L10SL13-L5-L-L2-L2-L108S17-16L363P2S16L64-2L54-7S-32L12S4M16P10-6M16P35-P14SPS3-PSP2-4L5-L135-4P3SP6SP4N10P2S3P2"
    "L26P3SPSL26PSPSP7L89-3L6-2L6-2L6-2L3-3S7-S7-13S2-2L12-L26-L19-L2-L15-2L14-34L123-5P3-4N45-3S9N57S17N2S3-S13-3S"
    "-47S45M-130L29-3L49-15MN27-4L32N4-9L20NL8N-5L38M5-5L30-PL36-4L8PN5-42L158-2N10-6L36-4L36-4L40-8L52-11PL11-L15-L7"
    "-L2-L11-L15-L7-L2-67L311-9L22-10L8-24L6-L42-L9-69L6-2L-L44-L2-3L-2L23-PN8L23S2N7L31-8N9-48L19-L2-5N5L22N6-3PL26"
    "-5P-64L56-4N2L2N16-2N46LM3-M2-5M4L4-L3-L29-2M3-4MN9-7P9-7L29N2PL29N3-32L8SL28M2-4N5P7-9L54-3P7L22-2N8L19-5N8L18"
    "-7P4-12N7-80L73-55L51-13L51-7N6L36M4-8N10-294N31-L42-M2P-2L2-75M3L29N10L-8L22M11N4P5-22L18M4P4-38L21N7-20L23-9M3"
    "L53M15P7-4N30ML2M2L-9M4L45M11P2-P4M-13L25-7N10-6M3L36M14-N10P4LM2L-8L35MP2L-9M3L48M14L4P4M4PM2N10LPLP3-N20-11L18"
    "-L25M12P6ML2M-62L7-L-L4-L15-L10P-6L47M12-5N10-6M4-L8-2L2-2L22-L7-L2-L5-M2LM7-2M2-2M3-2L-6M-5L5M2-2M7-3M5-139L53"
    "M18L4P5N10P2-PML3-30L48M20L2PL-8N10-166L47M7-2M9P23L4M2-34L48M17P3L-11N10-6P13-19L43M13LP-6N10-54L27-2M15-4N12P3"
    "SL7-185L44M15P-100L64N19-12L8-2L-2L8-L2-L24M6-M2-2M4LMLM2P3-9N10-70L8-2L39M7-2M7LPLM-27LM10L40M7LM4P8M-8LM11L46"
    "M16P3LP5-13L73-7P10-246L9-L37M8-M8LP5-10N29-3P2L30-2M22-M14-73L7-L2-L38M6-3M-M2-M7LM-8N10-6L6-L2-L32M5-M2-M5L-7"
    "N10-310L19M4P2-7M2LML13-L34M7-3M5P13N10-86L-15N21S29-13PL922-102N111-P5-11L196-2636L97P2-13L1072-16ML6M15-4010"
    "L583-8633L569-7L31-N10-4P2L79-N10-6L30-2M5P-10L48M7P5S4L4PS-10N10-N7-L21-5L19-688L64N23P4-101L75-4MLM55-7M4L13"
    "-64L2PLM-11M2-14L6136-8L1238-42L9-8935L4-L7-L2-L291-15L-29L3-2L-14L4-8L396-2308L107-5L13-3L9-7L10-2SM2P-4704M46"
    "-2M23-9S116-60S246-10S39-2S60M5S3M6-8M8S2M7S30M4S61-21S66M3S-122N20-12N20-12S87-9N25-135L85-L71-L2-2L-2L2-2L4-"
    "L12-L-L7-L65-L4-2L8-L7-L28-L4-L5-L-3L7-L340-2L25SL25SL31SL25SL31SL25SL31SL25SL31SL25SL8-2N50S512M55S4M50S8MS14M"
    "S2P5-15M5-M15-1104L31-6L6-213M7-M17-2M7-M2-M5-5L62-33M-112L45-3M7L7-2N10-4LS-320L30M-17L44M4N10-5S-464L28M4N10"
    "-742L7-L4-L2-L15-L197-2N9M7-41L68M7L-4N10-4P2-785N59SN3SN4-76N45SN15-194L4-L27-L2-L-2L-L10-L4-L-L-6L-4L-L-L-L3-"
    "L2-L-2L-L-L-L-L-L2-L-2L4-L7-L4-L4-L-L10-L17-5L3-L5-L17-52S2-270S44-4S100-12S15-2S15-S15-S37-10N13S161-56S29-13"
    "S44-4S9-7S2-14S6-154S984-4S17-3S13-3S119-4S95-6S12-4S-15S12-4S56-8S10-6S40-8S30-2S2-78S340-12S14-2S13-3S9-7S46-"
    "S7-8S14-4S9-7S9-7S147-S55-37N10-1030H42720-32H4154h6H222h2H5762h14H7473h15L622-2466H542h2-1504L4939-5L4192"
    "-712016M240-196112"
)

# What stands for a character of each class in a shape. ASCII characters stand for themselves, and a space from beyond
# ASCII becomes a vertical tab: a space, but neither the blank nor the line ends that patterns name.
_STAND_IN = dict(zip("LNMPSHh-W", "\xc0\xc1\xc2\xc3\xc4\xc5\xc6\xc7\x0b", strict=True))

# The inside of a character set that matches one class in a shape.
CLASS_SETS = {
    "L": "A-Za-z" + _STAND_IN["L"] + _STAND_IN["H"],
    "Lu": "A-Z" + _STAND_IN["L"] + _STAND_IN["H"],  # llama.cpp knows upper from lower case in ASCII only
    "Ll": "a-z" + _STAND_IN["L"] + _STAND_IN["H"],
    "Han": _STAND_IN["H"] + _STAND_IN["h"],
    "N": "0-9" + _STAND_IN["N"],
    "M": _STAND_IN["M"],
    "P": r"!-#%-*,-/:;?@\[-\]_{}" + _STAND_IN["P"],
    "S": "$+<=>^`|~" + _STAND_IN["S"],
}


# The "other" characters that exist: controls, marks without a shape, private use. The rest of class - is not assigned.
_CONTROLS = (
    (0x00, 0x1F), (0x7F, 0x9F), (0xAD, 0xAD), (0x600, 0x605), (0x61C, 0x61C), (0x6DD, 0x6DD), (0x70F, 0x70F),
    (0x890, 0x891), (0x8E2, 0x8E2), (0x180E, 0x180E), (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x2064),
    (0x2066, 0x206F), (0xD800, 0xF8FF), (0xFEFF, 0xFEFF), (0xFFF9, 0xFFFB), (0x110BD, 0x110BD), (0x110CD, 0x110CD),
    (0x13430, 0x1343F), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0001, 0xE0001), (0xE0020, 0xE007F),
    (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD),
)  # fmt: skip

# Lower case of letters that Python 3.10 does not know yet, as first, last and distance.
_NEW_CAPITALS = (
    (0x2C2F, 0x2C2F, 0x30), (0xA7C0, 0xA7C0, 1), (0xA7D0, 0xA7D0, 1), (0xA7D6, 0xA7D6, 1), (0xA7D8, 0xA7D8, 1),
    (0x10570, 0x1057A, 0x27), (0x1057C, 0x1058A, 0x27), (0x1058C, 0x10592, 0x27), (0x10594, 0x10595, 0x27),
)  # fmt: skip


_BEYOND_ASCII = re.compile("[^\0-\x7f]+")


class _StandIns(dict[int, str]):
    """A `str.translate` table that looks up a code point's class when it is first met."""

    def __init__(self) -> None:
        super().__init__()
        runs = re.findall(r"(\D)(\d*)", _RUNS)
        self._starts = list(accumulate((int(n or 1) for _, n in runs[:-1]), initial=0x80))
        self._stand_ins = [_STAND_IN[letter] for letter, _ in runs]

    def __missing__(self, code: int) -> str:
        found = chr(code) if code < 0x80 else self._stand_ins[bisect_right(self._starts, code) - 1]
        self[code] = found
        return found


_stand_ins: _StandIns | None = None


def shape(text: str) -> str:
    """Return `text` with each character beyond ASCII replaced by one that stands for its class."""
    global _stand_ins
    if text.isascii():
        return text
    if _stand_ins is None:
        _stand_ins = _StandIns()
    table = _stand_ins
    return _BEYOND_ASCII.sub(lambda found: found[0].translate(table), text)


def category(char: str) -> str:
    """Return the class of a character: L letter, N number, M mark, P punctuation, S symbol, W space, C control, - none.

    The few characters of class W are those of `is_space`, but for controls.
    """
    code = ord(char)
    if any(first <= code <= last for first, last in _CONTROLS):
        return "C"
    shaped = shape(char)
    if shaped in " \v":
        return "W"
    found = next((name for name in "LNMPS" if re.match(f"[{CLASS_SETS[name]}]", shaped)), None)
    return found or ("L" if shaped == _STAND_IN["H"] else "-")


def is_space(char: str) -> bool:
    """Tell whether llama.cpp counts the character as a space."""
    return char in " \t\n\v\f\r\x85" or (char > "\x7f" and shape(char) == "\v")


def lower(char: str) -> str:
    """Return the lower case of one character, always one character."""
    if (found := char.lower()[0]) != char:
        return found if category(char) != "-" else char  # not assigned: a newer Unicode than llama.cpp's
    return next((chr(ord(char) + by) for first, last, by in _NEW_CAPITALS if first <= ord(char) <= last), char)


def base(char: str) -> str:
    """Return the first character of the canonical decomposition: a letter without its accents."""
    found = unicodedata.normalize("NFD", char)[0]
    return char if found != char and category(char) == "-" else found
