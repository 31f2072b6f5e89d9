"""Ask two questions at once; the event loop goes on, and a task that takes too long is cancelled.

Usage: python examples/async_chat.py [NAME_OR_PATH]
"""

import asyncio
import sys
from pathlib import Path

import ggufpy

name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
load = ggufpy.Model.load if Path(name).exists() else ggufpy.Model.from_pretrained


async def answer(model: ggufpy.Model, question: str, **params: object) -> str:
    """Answer a question as a chat does."""
    return (await model.achat([{"role": "user", "content": question}], **params)).text


async def main() -> None:
    """Hold two conversations side by side, then give one up."""
    with load(name) as model:
        questions = ["What do bees make?", "Name a colour."]
        answers = await asyncio.gather(*(answer(model, q, max_tokens=24, temperature=0) for q in questions))
        for question, text in zip(questions, answers, strict=True):
            print(f"{question}\n> {text}")
        try:
            await asyncio.wait_for(answer(model, "Count to a million.", temperature=0, ignore_eos=True), timeout=0.3)
        except asyncio.TimeoutError:
            print("That would have taken too long.")


asyncio.run(main())
