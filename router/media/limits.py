"""Limits on images, audio and video: count, bytes, pixels, fetches, and prompts made at once."""

from __future__ import annotations

MAX_MEDIA = 32
"""Largest number of images, audios and videos in one request."""
MAX_MEDIA_BYTES = 16 * 2**20
"""Largest size of one of them, in bytes."""
MAX_TOTAL_BYTES = 32 * 2**20
"""Largest size of all of them together, in bytes."""
MAX_TOTAL_PIXELS = 2**27
"""Largest number of pixels of all images of a request."""
MAX_SIDE = 2**15
"""Largest width or height of an image, in pixels."""
MAX_URL_CHARS = 4096
"""Longest URL that is fetched, in characters."""
MAX_REDIRECTS = 3
"""Maximum number of redirects that are followed; each address is checked."""
FETCH_S = 10.0
"""Longest time to fetch one URL, with the wait for a place and all redirects, in seconds."""
MAX_FETCHES, FETCHES_PER_TENANT = 16, 8
"""Maximum number of fetches at once: of all tenants, and of one."""
MAX_LOADS, LOADS_PER_TENANT = 16, 8
"""Maximum number of requests whose media are loaded at once: of all tenants, and of one."""
MAX_RENDERS, RENDERS_PER_TENANT = 8, 4
"""Maximum number of prompts with media that are made at once: of all tenants, and of one."""
MAX_HELD_BYTES = 2**30
"""Largest size of the media of a model's requests, as sent and as prepared, in bytes; of one tenant half as much."""
