"""Asks the router at ROUTER for a completion of each model; exits with 1 and a reason if one fails."""

import os
import sys
import time

import httpx

TRIES, PAUSE_S = 24, 5.0
headers = {"Authorization": f"Bearer {os.environ['API_KEY']}"} if "API_KEY" in os.environ else {}
# Over TLS the Service's name is seldom in the certificate; this checks only that the cluster answers.
client = httpx.Client(base_url=os.environ["ROUTER"], headers=headers, timeout=120, verify=False)  # noqa: S501


def ask_all() -> None:
    for model in client.get("/v1/models").raise_for_status().json()["data"]:
        print(ask(model["id"]), flush=True)


def ask(model: str) -> str:
    body = {"model": model, "prompt": "The sea is", "max_tokens": 4}
    answer = client.post("/v1/completions", json=body).raise_for_status()
    choice = answer.json()["choices"][0]
    return f"{model} went on with {choice['text']!r}: {answer.headers.get('x-kvferry-route', 'no route')}"


for left in reversed(range(TRIES)):
    try:
        ask_all()
        sys.exit()
    except httpx.HTTPError as error:
        print(error, flush=True)
        refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403)
        if refused or not left:
            sys.exit(1)
        time.sleep(PAUSE_S)
