"""Hold a conversation of two turns; the second computes only what the session does not hold already."""

import ggufpy

messages = [{"role": "user", "content": "Name a fruit."}]
with ggufpy.Model.from_pretrained("smollm2-135m-instruct") as model, model.session(n_ctx=2048) as session:
    for question in (None, "And one that is yellow?"):
        if question:
            messages.append({"role": "user", "content": question})
        answer = model.chat(messages, max_tokens=32, temperature=0, session=session)
        messages.append({"role": "assistant", "content": answer.text})
        cached, total = answer.usage.cached_tokens, answer.usage.prompt_tokens
        print(f"{messages[-2]['content']}\n  {answer.text}\n  ({cached} of {total} prompt tokens were cached)")
