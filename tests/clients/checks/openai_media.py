"""The official Python client: images and audio in chats and responses, transcriptions."""

from __future__ import annotations

import base64
import json
import os

import openai
from harness import check, raises

MODEL, PICTURES = os.environ["CHECK_SEEING_MODEL"], json.loads(os.environ["CHECK_PICTURES"])
HEARING, SOUND = os.environ["CHECK_HEARING_MODEL"], os.environ["CHECK_SOUND"]
MODALITIES = os.environ["CHECK_MODALITIES"].split(",")
client = openai.OpenAI(base_url=f"{os.environ['CHECK_SEEING_URL']}/v1", api_key="none", max_retries=0, timeout=60)


def ask(*parts, **more):
    content = [{"type": "text", "text": "What is it?"}, *parts]
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0, **more
    )


def image(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


@check
def models_say_what_they_take():
    assert set(client.models.retrieve(MODEL).input_modalities) == set(MODALITIES)
    assert client.models.retrieve(HEARING).transcription is True


@check
def images_are_seen():
    plain, one, other = ask(), ask(image(PICTURES[0])), ask(image(PICTURES[1], detail="low"))
    said = [answer.choices[0].message.content for answer in (plain, one, other)]
    assert len(set(said)) == 3
    assert ask(image(PICTURES[0], detail="auto")).choices[0].message.content == said[1]
    both = ask(image(PICTURES[0]), image(PICTURES[1]))
    assert plain.usage.prompt_tokens < one.usage.prompt_tokens < both.usage.prompt_tokens


@check
def images_are_seen_in_streams():
    chunks = list(ask(image(PICTURES[0]), stream=True))
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said == ask(image(PICTURES[0])).choices[0].message.content


@check
def sound_is_heard_where_the_model_hears():
    sound = {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}
    if "audio" in MODALITIES:
        assert ask(sound).usage.prompt_tokens > ask().usage.prompt_tokens
        return
    with raises(openai.BadRequestError) as caught:
        ask(sound)
    assert caught[0].param == "messages[0].content[1]"


@check
def responses_see_images():
    def respond(**more):
        return client.responses.create(model=MODEL, max_output_tokens=16, temperature=0, **more)

    content = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": PICTURES[0]}]
    first = respond(input=[{"role": "user", "content": content}])
    assert first.output_text
    again = respond(input="And now?", previous_response_id=first.id)
    assert again.usage.input_tokens > first.usage.input_tokens


@check
def what_is_wrong_is_named():
    for url, why in (("http://127.0.0.1/a.png", "fetches nothing"), (PICTURES[0][:-3], "base64")):
        with raises(openai.BadRequestError) as caught:
            ask(image(url))
        assert caught[0].param == "messages[0].content[1].image_url.url"
        assert why in str(caught[0])
    with raises(openai.BadRequestError) as caught:
        ask(image(PICTURES[0], detail="enormous"))
    assert caught[0].param == "messages[0].content[1].image_url.detail"


@check
def speech_is_transcribed():
    file = ("talk.wav", base64.b64decode(SOUND), "audio/wav")
    assert client.audio.transcriptions.create(model=HEARING, file=file, language="en").text
    assert client.audio.transcriptions.create(model=HEARING, file=file, response_format="text")
    assert client.audio.translations.create(model=HEARING, file=file).text


@check
def a_file_that_is_no_audio_is_refused():
    with raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(model=HEARING, file=("talk.wav", b"no audio", "audio/wav"))
    assert caught[0].param == "file"
