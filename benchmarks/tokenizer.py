"""Tokenizing, ggufpy beside llama.cpp, in one process: `python benchmarks/tokenizer.py [FILE …]`.

1 MB of English, code and Chinese, long runs of one character, and opening a vocabulary, for each file: by default those
that come with llama.cpp, one of each family, Gemma 3, and for RWKV and PLaMo-2, of which llama.cpp brings none, made
ones of the tokens of the unigram vocabulary, which is in many languages: for RWKV, as its own has, 65,536 with all
single characters among them; for PLaMo-2 the first 100,000. ggufpy's time is that of a tokenizer that has been opened
and has encoded some pages of random characters, so that its tables are made, as llama.cpp's are at loading, but no word
of the text is known; its result is a list. llama.cpp's is llama_tokenize alone, into a buffer. By turns, medians. Needs
llama-cpp-python beside ggufpy.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import statistics
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from harness import environment, markdown

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
import llama_cpp  # noqa: E402
from helpers.llama_sources import llama_models  # noqa: E402
from helpers.llama_vocabulary import LlamaVocabulary  # noqa: E402

from ggufpy import hub  # noqa: E402
from ggufpy.gguf import GGUFFile, write_gguf  # noqa: E402
from ggufpy.tokenizer import Tokenizer  # noqa: E402

FAMILIES = ["llama-bpe", "qwen2", "deepseek-llm", "llama-spm", "gemma-4", "bert-bge", "nomic-bert-moe"]
SIZE = 1_000_000  # bytes of UTF-8
RUNS = {"A": "A", "space": " ", "1": "1", "newline": "\n"}
COMMON = """
的 一 是 在 不 了 有 和 人 这 中 大 为 上 个 国 我 以 要 他 时 来 用 们 生 到 作 地 于 出 就 分 对 成 会 可 主 发 年
动 同 工 也 能 下 过 子 说 产 种 面 而 方 后 多 定 行 我们 他们 自己 没有 什么 一个 知道 现在 时候 已经 因为 所以
但是 如果 可以 工作 生活 问题 世界 中国 社会 经济 发展 学生 老师 学校 朋友 今天 明天 昨天 时间 地方 国家 政府 公司
市场 技术 科学 研究 系统 信息 计算机 语言 模型 数据 文化 历史 音乐 电影 城市 农村 北京 上海 喜欢 希望 开始 需要
认为 应该 可能 重要 不同 非常 很多 进行 通过 提高 情况
"""


def english() -> str:
    """Return the documentation of Python's own library: topics and docstrings."""
    import pydoc_data.topics

    texts = list(pydoc_data.topics.topics.values())
    for source in _sources():
        tree = ast.parse(source)
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts += [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    return _cut("\n\n".join(texts))


def code() -> str:
    """Return the source of Python's own library."""
    return _cut("".join(_sources()))


def chinese() -> str:
    """Return sentences of common words and, now and then, rarer characters, none of them with spaces."""
    rng = random.Random(0)
    rare = [bytes([high, low]).decode("gb2312") for high in range(0xB0, 0xD7) for low in range(0xA1, 0xFA)]
    words = COMMON.split() + ["".join(rng.choice(rare) for _ in range(rng.randint(1, 3))) for _ in range(3000)]
    weights = [1 / (rank + 5) for rank in range(len(words))]
    sentences, size = [], 0
    while size < SIZE:
        sentence = "".join(rng.choices(words, weights, k=rng.randint(4, 16))) + rng.choice("，，，。。？！；：\n")
        sentences.append(sentence)
        size += len(sentence.encode())
    return _cut("".join(sentences))


def _sources() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob("[a-z]*.py"))]


def _cut(text: str) -> str:
    data = text.encode()
    assert len(data) >= SIZE, f"only {len(data)} bytes"
    return data[:SIZE].decode("utf-8", "ignore")


def made(folder: Path) -> list[Path]:
    """Write the vocabularies of the families that llama.cpp brings no file of."""
    folder.mkdir(exist_ok=True)
    unigram = GGUFFile(llama_models() / "ggml-vocab-nomic-bert-moe.gguf").metadata
    tokens = [token.replace("▁", " ") for token in unigram["tokenizer.ggml.tokens"]][5:]
    words = [token.encode() for token in sorted(tokens, key=lambda token: len(token) > 1)[:65_536]]
    rwkv = {"tokens": [repr(word)[2:-1] for word in dict.fromkeys([*(bytes([byte]) for byte in range(256)), *words])]}
    parts = dict(zip(tokens[:100_000], map(float, unigram["tokenizer.ggml.scores"][5:]), strict=False))
    plamo2 = {
        "tokens": ["<|plamo:unk|>", *(f"<0x{byte:02X}>" for byte in range(256)), *parts],
        "token_type": [2] + [6] * 256 + [1] * len(parts),
        "scores": [0.0] * 257 + list(parts.values()),
    }
    paths = []
    for model, keys in {"rwkv": rwkv, "plamo2": plamo2}.items():
        metadata = {f"tokenizer.ggml.{key}": value for key, value in {"model": model, **keys}.items()}
        paths.append(folder / f"{model} (made).gguf")
        write_gguf(paths[-1], {"general.architecture": "llama", **metadata}, {})
    return paths


class Theirs:
    """llama.cpp's vocabulary, called as directly as ctypes can."""

    def __init__(self, path: Path) -> None:
        self._loaded = LlamaVocabulary(path)
        self._buffer = (llama_cpp.llama_token * (2 * SIZE))()

    def encode(self, text: str) -> float:
        """Return the seconds that llama_tokenize takes."""
        data = text.encode()
        start = perf_counter()
        self.count = llama_cpp.llama_tokenize(
            self._loaded._vocab, data, len(data), self._buffer, len(self._buffer), False, False
        )
        return perf_counter() - start

    def ids(self) -> list[int]:
        """Return what it gave."""
        return self._buffer[: self.count]

    def close(self) -> None:
        """Free it."""
        self._loaded.close()


def fresh(path: Path) -> Tokenizer:
    """Open a tokenizer and encode a word."""
    tokenizer = Tokenizer.from_file(path)
    tokenizer.encode("hello")
    return tokenizer


def seconds(work: Callable[[], Any]) -> float:
    """Return the time that some work takes."""
    start = perf_counter()
    work()
    return perf_counter() - start


def pair(path: Path, text: str, theirs: Theirs) -> tuple[float, float]:
    """Return the seconds that both take for a text that is new to ggufpy. Their ids have to be the same."""
    tokenizer, rng = fresh(path), random.Random(0)
    tokenizer.encode("".join(chr(rng.randrange(0x21, 0xD800)) for _ in range(10_000)))
    start = perf_counter()
    ids = tokenizer.encode(text, add_special=False)
    taken = (perf_counter() - start, theirs.encode(text))
    assert ids == theirs.ids(), f"{path.name}: the ids differ"
    return taken


def measure(path: Path, texts: dict[str, str], repetitions: int) -> dict[str, tuple[float, float]]:
    """Return the median seconds of both, for each text and for opening."""
    theirs = Theirs(path)
    pairs = {name: [pair(path, text, theirs) for _ in range(repetitions)] for name, text in texts.items()}
    theirs.close()
    pairs["open, first word"] = [
        (seconds(lambda: fresh(path)), seconds(lambda: LlamaVocabulary(path).close())) for _ in range(repetitions)
    ]
    return {
        name: (statistics.median(mine for mine, _ in some), statistics.median(other for _, other in some))
        for name, some in pairs.items()
    }


def main() -> None:
    """Print a table, and with --json also write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = args.files or [
            *(llama_models() / f"ggml-vocab-{name}.gguf" for name in FAMILIES),
            *made(Path(folder)),
            hub.fetch("gemma-3-270m"),
        ]
        figures = compare(files, args.repetitions)
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "figures": figures}, indent=2))


def compare(files: list[Path], repetitions: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Print a row for each file, and return its figures."""
    texts = {"English": english(), "code": code(), "Chinese": chinese()}
    texts |= {f"200,000 × {name}": char * 200_000 for name, char in RUNS.items()}
    print(
        f"Milliseconds, ggufpy / llama.cpp (times faster)\n\n{markdown(['vocabulary', *texts, 'open, first word'], [])}"
    )
    figures = {}
    for path in files:
        name = path.stem.removeprefix("ggml-vocab-")
        figures[name] = measure(path, texts, repetitions)
        cells = [f"{mine * 1e3:.0f} / {other * 1e3:.0f} ({other / mine:.1f})" for mine, other in figures[name].values()]
        print(f"| {' | '.join([name, *cells])} |", flush=True)
    return figures


if __name__ == "__main__":
    threading.stack_size(1 << 30)  # llama.cpp's regular expressions recurse once for each character
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
