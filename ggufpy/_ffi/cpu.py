"""Names the x86 CPU features that compiled code may need, and finds out which of them this CPU has.

It owns the table from a feature to its CPUID bit. A feature is named as the compiler's macro without underscores at
the ends (`__AVX512BF16__` is AVX512BF16), so that build_ggml.py can take the list from the compiler.
It knows neither ggml nor cffi: the two functions that ask the CPU are given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

__all__ = ["FEATURES", "features_found", "features_in_macros"]

_EAX, _EBX, _ECX, _EDX = range(4)
_NO_STATE, _AVX_STATE, _AVX512_STATE, _AMX_STATE = 0, 0x6, 0xE6, 0x60000  # bits of XCR0: saved by the system

# feature: CPUID leaf, subleaf, register, bit, and the register state it works on. Only what a compiler may emit unasked
# or ggml uses; a feature of the system (SGX, PKU …) must not make a build refuse a machine that can run it.
FEATURES: dict[str, tuple[int, int, int, int, int]] = {
    "SSE3": (1, 0, _ECX, 0, _NO_STATE),
    "PCLMUL": (1, 0, _ECX, 1, _NO_STATE),
    "SSSE3": (1, 0, _ECX, 9, _NO_STATE),
    "FMA": (1, 0, _ECX, 12, _AVX_STATE),
    "SSE4_1": (1, 0, _ECX, 19, _NO_STATE),
    "SSE4_2": (1, 0, _ECX, 20, _NO_STATE),
    "MOVBE": (1, 0, _ECX, 22, _NO_STATE),
    "POPCNT": (1, 0, _ECX, 23, _NO_STATE),
    "AES": (1, 0, _ECX, 25, _NO_STATE),
    "AVX": (1, 0, _ECX, 28, _AVX_STATE),
    "F16C": (1, 0, _ECX, 29, _AVX_STATE),
    "BMI": (7, 0, _EBX, 3, _NO_STATE),
    "AVX2": (7, 0, _EBX, 5, _AVX_STATE),
    "BMI2": (7, 0, _EBX, 8, _NO_STATE),
    "AVX512F": (7, 0, _EBX, 16, _AVX512_STATE),
    "AVX512DQ": (7, 0, _EBX, 17, _AVX512_STATE),
    "ADX": (7, 0, _EBX, 19, _NO_STATE),
    "AVX512IFMA": (7, 0, _EBX, 21, _AVX512_STATE),
    "AVX512CD": (7, 0, _EBX, 28, _AVX512_STATE),
    "SHA": (7, 0, _EBX, 29, _NO_STATE),
    "AVX512BW": (7, 0, _EBX, 30, _AVX512_STATE),
    "AVX512VL": (7, 0, _EBX, 31, _AVX512_STATE),
    "AVX512VBMI": (7, 0, _ECX, 1, _AVX512_STATE),
    "AVX512VBMI2": (7, 0, _ECX, 6, _AVX512_STATE),
    "GFNI": (7, 0, _ECX, 8, _NO_STATE),
    "VAES": (7, 0, _ECX, 9, _AVX_STATE),
    "VPCLMULQDQ": (7, 0, _ECX, 10, _AVX_STATE),
    "AVX512VNNI": (7, 0, _ECX, 11, _AVX512_STATE),
    "AVX512BITALG": (7, 0, _ECX, 12, _AVX512_STATE),
    "AVX512VPOPCNTDQ": (7, 0, _ECX, 14, _AVX512_STATE),
    "AVX512VP2INTERSECT": (7, 0, _EDX, 8, _AVX512_STATE),
    "AMX_BF16": (7, 0, _EDX, 22, _AMX_STATE),
    "AVX512FP16": (7, 0, _EDX, 23, _AVX512_STATE),
    "AMX_TILE": (7, 0, _EDX, 24, _AMX_STATE),
    "AMX_INT8": (7, 0, _EDX, 25, _AMX_STATE),
    "AVXVNNI": (7, 1, _EAX, 4, _AVX_STATE),
    "AVX512BF16": (7, 1, _EAX, 5, _AVX512_STATE),
    "AMX_FP16": (7, 1, _EAX, 21, _AMX_STATE),
    "AVXIFMA": (7, 1, _EAX, 23, _AVX_STATE),
    "AVXVNNIINT8": (7, 1, _EDX, 4, _AVX_STATE),
    "AVXNECONVERT": (7, 1, _EDX, 5, _AVX_STATE),
    "AMX_COMPLEX": (7, 1, _EDX, 8, _AMX_STATE),
    "AVXVNNIINT16": (7, 1, _EDX, 10, _AVX_STATE),
    "LAHF_SAHF": (0x80000001, 0, _ECX, 0, _NO_STATE),
    "LZCNT": (0x80000001, 0, _ECX, 5, _NO_STATE),
    "SSE4A": (0x80000001, 0, _ECX, 6, _NO_STATE),
    "PRFCHW": (0x80000001, 0, _ECX, 8, _NO_STATE),
    "XOP": (0x80000001, 0, _ECX, 11, _AVX_STATE),
    "FMA4": (0x80000001, 0, _ECX, 16, _AVX_STATE),
    "TBM": (0x80000001, 0, _ECX, 21, _NO_STATE),
}


def features_in_macros(macros: str) -> tuple[str, ...]:
    """Return the features that a compiler's list of predefined macros (`-dM -E`) switches on."""
    defined = set(macros.split())
    return tuple(name for name in FEATURES if f"__{name}__" in defined)


def features_found(
    names: Iterable[str], cpuid: Callable[[int, int], Sequence[int]], xcr0: Callable[[], int]
) -> tuple[str, ...]:
    """Return those of `names` that the CPU has and the operating system lets be used.

    `cpuid(leaf, subleaf)` gives EAX, EBX, ECX, EDX; `xcr0()` the states the system saves.
    """
    leaves: dict[tuple[int, int], Sequence[int]] = {}
    saved = xcr0()

    def has(name: str) -> bool:
        leaf, subleaf, register, bit, state = FEATURES[name]
        if (leaf, subleaf) not in leaves:  # an instruction that a virtual machine traps: ask once
            leaves[leaf, subleaf] = cpuid(leaf, subleaf)
        return bool(leaves[leaf, subleaf][register] >> bit & 1) and saved & state == state

    return tuple(name for name in names if name in FEATURES and has(name))
