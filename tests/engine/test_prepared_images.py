"""An image is resized once by a node that makes its prompt and its rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kvferry.engine.media.encoder import MediaEncoder
from kvferry.engine.media.gemma3 import Gemma3
from kvferry.engine.media.image_family import Pixels, PreparedImages
from kvferry.engine.media.loader import load_media_encoder
from kvferry.model_files.source import resolve
from tests.engine import tiny_vision as tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def load(path: Path) -> MediaEncoder:
    found = load_media_encoder(resolve(str(path)), dtype=torch.float32, device=torch.device("cpu"))
    assert found is not None
    return found


def test_a_node_that_renders_and_encodes_resizes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save("gemma3", tmp_path)
    resized: list[Image.Image] = []
    whole = Gemma3.pixels
    monkeypatch.setattr(Gemma3, "pixels", lambda own, image: resized.append(image) or whole(own, image))
    own, other = load(tmp_path), load(tmp_path)
    (item,) = own.render(tiny.chat((tiny.picture(20, 20, 3),))).media
    with torch.inference_mode():
        rows = [own.encode([item]), own.encode([item]), other.encode([item])]
    assert len(resized) == 3, "for the prompt and the first rows; again; and on another node"
    assert torch.equal(rows[0][0], rows[1][0])
    assert torch.equal(rows[0][0], rows[2][0])


def test_resized_images_are_kept_within_bytes_and_taken_once() -> None:
    kept = PreparedImages(100)
    images = {name: Pixels(np.zeros(40, np.uint8), (number,)) for number, name in enumerate((b"a", b"b", b"c"))}
    for name, pixels in images.items():
        kept.put(name, pixels)
    kept.put(b"c", images[b"c"])
    kept.put(b"large", Pixels(np.zeros(101, np.uint8), ()))
    taken = [kept.take(name) for name in (b"a", b"b", b"c", b"c", b"large")]
    assert taken == [None, images[b"b"], images[b"c"], None, None]
