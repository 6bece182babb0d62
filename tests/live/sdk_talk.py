"""Talk to a gateway with Anthropic's own SDK (run by its own environment); prints what it got."""

import json

import anthropic

ALIAS = "claude-haiku-local"
BASH = {"name": "Bash", "description": "run", "input_schema": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}
client = anthropic.Anthropic(max_retries=0, timeout=60)


def ask(text="@play pong", **more):
    more.setdefault("messages", [{"role": "user", "content": text}])
    return client.messages.create(model=more.pop("model", ALIAS),
                                  max_tokens=more.pop("max_tokens", 100), **more)


def status_of(action):
    try:
        action()
    except anthropic.APIStatusError as error:
        assert error.body["type"] == "error", error.body
        return error.status_code
    return 0


said = {}
plain = ask()
said["text"], said["stop"] = plain.content[0].text, plain.stop_reason
with client.messages.stream(model=ALIAS, max_tokens=100,
                            messages=[{"role": "user", "content": "@play count"}]) as stream:
    said["streamed"] = "".join(stream.text_stream)
    usage = stream.get_final_message().usage
    said["stream_usage"] = [usage.input_tokens, usage.output_tokens]
stopped = ask("@play count", stop_sequences=["three"])
said["stopped"] = [stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence]
said["cut"] = ask("@play talk", max_tokens=5).stop_reason
question = {"role": "user", "content": "@play bash done"}
call = ask(messages=[question], tools=[BASH])
block = call.content[-1]
said["call"] = [block.name, block.input, call.stop_reason]
answer = {"role": "user", "content": [
    {"type": "tool_result", "tool_use_id": block.id, "content": "hi"}]}
said["after_tool"] = ask(messages=[
    question, {"role": "assistant", "content": call.content}, answer], tools=[BASH]).content[0].text
said["models"] = [model.id for model in client.models.list()]
said["tokens"] = client.messages.count_tokens(
    model=ALIAS, messages=[{"role": "user", "content": "how many tokens are these"}]).input_tokens
said["errors"] = {
    "key": status_of(lambda: anthropic.Anthropic(api_key="sk-wrong", max_retries=0).messages.create(
        model=ALIAS, max_tokens=5, messages=[question])),
    "model": status_of(lambda: ask(model="claude-nobody")),
    "empty": status_of(lambda: ask(messages=[])),
    "long": status_of(lambda: ask("word " * 60000, model="claude-tight-local")),
}
print(json.dumps(said))
