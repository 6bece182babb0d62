"""Talk to a gateway with OpenAI's own SDK (run by its own environment); prints what it got."""

import json

import openai

ALIAS = "claude-haiku-local"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CHAT_TOOL = {"type": "function", "function": {
    "name": "Bash", "description": "run", "parameters": SCHEMA}}
RESPONSE_TOOL = {"type": "function", "name": "Bash", "description": "run", "parameters": SCHEMA}
client = openai.OpenAI(max_retries=0, timeout=60)


def errors_of(ask):
    """The status and the code of each refusal that a client acts on."""
    found = {}
    stranger = openai.OpenAI(api_key="sk-wrong", max_retries=0)
    for name, make in (
            ("key", lambda: ask("hi", client=stranger)), ("model", lambda: ask("hi", model="nobody")),
            ("empty", lambda: ask(None)),
            ("long", lambda: ask("word " * 60000, model="claude-tight-local"))):
        try:
            make()
        except openai.APIStatusError as error:
            found[name] = [error.status_code, error.code]
    return found


# -- Chat Completions --

def chat(text, *, client=client, model=ALIAS, messages=None, **more):
    if messages is None:
        messages = [] if text is None else [{"role": "user", "content": text}]
    return client.chat.completions.create(model=model, messages=messages, **more)


def talk_by_chat():
    said = {"text": chat("@play pong").choices[0].message.content}
    pieces, usage = [], None
    for chunk in chat("@play count", stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    said["streamed"] = "".join(pieces)
    said["usage"] = [usage.prompt_tokens, usage.completion_tokens]
    said["cut"] = chat("@play talk", max_completion_tokens=5).choices[0].finish_reason
    stopped = chat("@play count", stop=["three"]).choices[0]
    said["stopped"] = [stopped.message.content, stopped.finish_reason]

    question = {"role": "user", "content": "@play bash done"}
    called = chat("", messages=[question], tools=[CHAT_TOOL]).choices[0].message
    call = called.tool_calls[0]
    said["call"] = [call.function.name, json.loads(call.function.arguments)]
    with client.chat.completions.stream(model=ALIAS, messages=[question],
                                        tools=[CHAT_TOOL]) as stream:
        for _ in stream:
            pass
        made = stream.get_final_completion().choices[0].message.tool_calls[0].function
    said["streamed_call"] = [made.name, json.loads(made.arguments)]
    result = {"role": "tool", "tool_call_id": call.id, "content": "hi"}
    said["after_tool"] = chat("", messages=[question, called, result],
                              tools=[CHAT_TOOL]).choices[0].message.content
    said["errors"] = errors_of(chat)
    return said


# -- Responses --

def respond(text, *, client=client, model=ALIAS, **more):
    more.setdefault("input", [] if text is None else text)
    return client.responses.create(model=model, **more)


def talk_by_responses():
    plain = respond("@play pong")
    said = {"text": plain.output_text}
    with client.responses.stream(model=ALIAS, input="@play count") as stream:
        said["streamed"] = "".join(event.delta for event in stream
                                   if event.type == "response.output_text.delta")
        usage = stream.get_final_response().usage
    said["usage"] = [usage.input_tokens, usage.output_tokens]
    cut = respond("@play talk", max_output_tokens=5)
    said["cut"] = [cut.status, cut.incomplete_details.reason]

    question = {"role": "user", "content": "@play bash done"}
    called = respond("", input=[question], tools=[RESPONSE_TOOL])
    call = next(item for item in called.output if item.type == "function_call")
    said["call"] = [call.name, json.loads(call.arguments)]
    with client.responses.stream(model=ALIAS, input=[question], tools=[RESPONSE_TOOL]) as stream:
        made = next(item for item in stream.get_final_response().output
                    if item.type == "function_call")
    said["streamed_call"] = [made.name, json.loads(made.arguments)]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "hi"}
    said["after_tool"] = respond("", input=[question, *called.output, result],
                                 tools=[RESPONSE_TOOL]).output_text
    said["errors"] = errors_of(respond)
    return said


print(json.dumps({"chat": talk_by_chat(), "responses": talk_by_responses(),
                  "models": [model.id for model in client.models.list()],
                  "model": client.models.retrieve(ALIAS).id}))
