"""Chats with pictures that need care: their texts, their files, and what is refused by name."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from kvferry.engine.media import loader
from kvferry.engine.media.encoder import MediaEncoder
from kvferry.engine.media.loader import load_media_encoder
from kvferry.engine.media.pictures import picture
from kvferry.model_files.multimodal import MEDIA_SERVED
from kvferry.model_files.source import resolve
from kvferry.protocol import media
from kvferry.protocol.errors import ConfigError, InvalidRequest
from tests.engine import tiny_vision as tiny
from tests.engine.tiny_vision import part, tokenizer, url
from tests.render_requests import render_request
from tests.router.media.pictures import chunk, png

CPU = torch.device("cpu")
SMALL = tiny.picture(20, 20, 3)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3")
    tiny.save("gemma3", path)
    return path


@pytest.fixture(scope="module")
def encoder(checkpoint: Path) -> MediaEncoder:
    return load(checkpoint)


def load(path: Path) -> MediaEncoder:
    found = load_media_encoder(resolve(str(path)), dtype=torch.float32, device=CPU)
    assert found is not None
    return found


def rendered(encoder: MediaEncoder, messages: list[dict[str, Any]], **given: Any) -> str:
    """The prompt's text, each image as one token."""
    prompt = encoder.render(render_request(messages, **given))
    text: str = tokenizer().decode(prompt.token_ids, skip_special_tokens=False)
    return text.replace("<image_soft_token>" * 16, "<image_soft_token>")


def asked(*content: str | Image.Image) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part(each) for each in content]}]


SHOWN = "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"


def test_placeholders_in_names_of_the_client_stay_text(checkpoint: Path, tmp_path: Path) -> None:
    """Such as those of a tool's parameters."""
    for file in checkpoint.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text("{{ tools | tojson }}<start_of_image>")
    found = rendered(load(tmp_path), asked(SMALL), tools=[{"<start_of_image>": 1}])
    assert found == f'[{{"<start_of_image>": 1}}]{SHOWN}'


def test_placeholders_in_a_text_of_the_client_stay_text(encoder: MediaEncoder) -> None:
    found = rendered(encoder, asked("What is <start_of_image>?", SMALL, "<image_soft_token>"))
    assert found == f"user: What is <start_of_image>?{SHOWN}<image_soft_token>\n"
    prompt = encoder.render(render_request(asked("<start_of_image>", SMALL)))
    (item,) = prompt.media
    assert prompt.token_ids[item.offset : item.offset + item.length] == (tiny.IDS["<image_soft_token>"],) * 16


def test_a_conversation_and_its_continuation(encoder: MediaEncoder) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        *asked(SMALL, "A ferry?"),
        {"role": "assistant", "content": "It is"},
    ]
    wanted = f"system: Be brief.\nuser: {SHOWN}A ferry?\nassistant: It is"
    assert rendered(encoder, messages) == f"{wanted}\n"
    assert rendered(encoder, messages, continue_final_message=True) == wanted
    with pytest.raises(InvalidRequest, match="no content to continue"):
        rendered(encoder, asked(SMALL), continue_final_message=True)


def test_what_the_template_gets_of_tools_and_calls(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{{ tools | tojson }}{{ flavour }}{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "{{ call.function.arguments.port }}{% endfor %}{{ m.reasoning_content }}{% for p in m.content %}"
        "{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )  # fmt: skip
    call = {"id": "1", "type": "function", "function": {"name": "sail", "arguments": '{"port": "Kiel"}'}}
    messages = [*asked(SMALL), {"role": "assistant", "content": "text", "tool_calls": [call], "reasoning": "Hm."}]
    found = rendered(load(tmp_path), messages, tools=[{"a": 1}], chat_template_kwargs={"flavour": "salt"})
    assert found == f'<s>[{{"a": 1}}]salt{SHOWN}KielHm.text', "this template shows content only as a list of parts"


def test_a_template_that_the_router_was_given(encoder: MediaEncoder) -> None:
    given = "Given: {% for p in messages[0].content %}{{ p.text or '<start_of_image>' }}{% endfor %}"
    for template, start in ((given, "Given: "), ("", "user: "), (given + "!", "Given: ")):
        prompt = encoder.render(tiny.chat((SMALL, "Hi"), template))
        assert len(prompt.media) == 1
        assert tokenizer().decode(prompt.token_ids, skip_special_tokens=False).startswith(start)
    with pytest.raises(InvalidRequest, match="the chat template does not parse"):
        encoder.render(tiny.chat((SMALL, "Hi"), "{% if %}"))


@pytest.mark.parametrize(
    ("template", "words"),
    [("{{ messages | length }}", "shows 0 of 1 images"), ("{{ raise_exception('no') }}", "refused the messages: no")],
)
def test_a_template_that_shows_no_images(checkpoint: Path, tmp_path: Path, template: str, words: str) -> None:
    for file in checkpoint.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    alone = load_media_encoder(resolve(str(tmp_path)), dtype=torch.float32, device=CPU)
    assert alone is None, "a base model has no template, and takes text alone"
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidRequest, match=words):
        rendered(load(tmp_path), asked(SMALL))


def opened(image: Image.Image, form: str, **how: Any) -> Image.Image:
    return picture(base64.b64decode(url(image, form, **how).partition(",")[2]), "x")


def test_formats_orientation_transparency_and_the_first_frame() -> None:
    upright = Image.new("RGB", (8, 4), (200, 30, 30))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    assert opened(upright, "JPEG", exif=exif).size == (4, 8)
    assert opened(upright, "WEBP", lossless=True).getpixel((0, 0)) == (200, 30, 30)
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert opened(clear, "PNG").getpixel((0, 0)) == (255, 255, 255)
    assert opened(clear.convert("P"), "PNG", transparency=0).mode == "RGB"
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("blue", "red")]
    first = opened(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert first.getpixel((0, 0)) == (0, 0, 255)
    assert opened(Image.new("L", (4, 4), 77), "PNG").getpixel((0, 0)) == (77, 77, 77)


def truncated() -> str:
    whole = base64.b64decode(url(tiny.picture(64, 64)).partition(",")[2])
    return "data:image/png;base64," + base64.b64encode(whole[: len(whole) // 2]).decode()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("data:image/png;base64,AAAA", "not a picture in PNG, JPEG, WebP or GIF"),
        (url(SMALL, "BMP"), "not a picture in PNG"),
        (truncated(), "is damaged"),
    ],
)  # fmt: skip
def test_files_that_are_no_pictures(encoder: MediaEncoder, wrong: str, words: str) -> None:
    content = [part("text"), {"type": "image_url", "image_url": {"url": wrong}}]
    with pytest.raises(InvalidRequest, match=words) as caught:
        rendered(encoder, [*asked("Hi"), {"role": "user", "content": content}])
    assert caught.value.param == "messages[1].content[1]"


def test_a_picture_of_too_many_pixels_is_not_decoded(encoder: MediaEncoder) -> None:
    file = BytesIO()
    Image.new("1", (8192, media.MAX_PIXELS // 8192 + 1)).save(file, "PNG")
    with pytest.raises(InvalidRequest, match="more than 33554432 pixels"):
        picture(file.getvalue(), "x")


@pytest.mark.parametrize(("text", "words"), [("zTXt", "text chunks"), ("eXIf", "EXIF header is longer than 65536")])
def test_what_is_not_pixels_is_bounded(recwarn: pytest.WarningsRecorder, text: str, words: str) -> None:
    if text == "zTXt":
        extra = chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(2**20 - 1))) * 5
    else:
        entries = b"".join(struct.pack(">HHII", tag, 7, 2**16, 8) for tag in range(1, 6000))
        extra = chunk(b"eXIf", b"MM\0*\0\0\0\x08" + struct.pack(">H", 5999) + entries)
    with pytest.raises(InvalidRequest, match=words):
        picture(png(9, 9)[:33] + extra + png(9, 9)[33:], "x")
    assert not recwarn.list


def test_each_medium_has_a_file(encoder: MediaEncoder) -> None:
    request = tiny.chat((SMALL, "Hi"))
    for files in ((), request.files * 2):
        with pytest.raises(InvalidRequest, match=f"has 1 images and audios, and {len(files)} files came"):
            encoder.render(replace(request, files=files))


def test_other_media(encoder: MediaEncoder) -> None:
    content = [{"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}]
    with pytest.raises(InvalidRequest, match="shows 0 of 1 images, audios"):
        rendered(encoder, [{"role": "user", "content": content}])


def test_rows_and_hashes_depend_on_the_picture_alone(encoder: MediaEncoder) -> None:
    other = tiny.picture(33, 20, 5)
    first = encoder.render(tiny.chat(("One", SMALL, "and", other)))
    again = encoder.render(tiny.chat((other, "another")))
    assert first.media[1].hash == again.media[0].hash != first.media[0].hash
    with torch.inference_mode():
        assert torch.equal(encoder.encode(first.media)[1], encoder.encode(again.media)[0])
    assert encoder.rope_positions(first.token_ids, first.media) is None


def test_a_checkpoint_without_a_tensor_of_its_tower(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    tensors = load_file(checkpoint / "model.safetensors")
    (dropped,) = (name for name in tensors if name.endswith("mm_input_projection_weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != dropped}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lack the tensor .*mm_input_projection_weight"):
        load(tmp_path)


def test_a_tower_in_codes(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    tensors = load_file(checkpoint / "model.safetensors")
    codes = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items() if name.endswith("fc1.weight")}
    save_file(tensors | codes, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"fc1.weight is quantised"):
        load(tmp_path)


def test_families_are_those_that_model_files_name() -> None:
    assert set(loader._FAMILIES) == set(MEDIA_SERVED)


def test_models_of_text_have_no_encoder(tmp_path: Path) -> None:
    assert load_media_encoder(resolve("smollm2"), dtype=torch.float32, device=CPU) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 5}))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert load_media_encoder(resolve(str(tmp_path)), dtype=torch.float32, device=CPU) is None
