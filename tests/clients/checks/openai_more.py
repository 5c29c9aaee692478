"""The official Python client: embeddings, files, batches."""

from __future__ import annotations

import base64
import io
import json
import struct
import time

import openai
from harness import MODEL, URL, check, raises

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)


def lines(*bodies, url="/v1/chat/completions"):
    rows = [{"custom_id": f"row-{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    return io.BytesIO("\n".join(map(json.dumps, rows)).encode())


def ask(text, **more):
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def ended(batch):
    while batch.status not in ("completed", "failed", "cancelled", "expired"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def rows_of(file_id):
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


@check
def embeddings_have_length_one():
    answer = client.embeddings.create(model=MODEL, input=["one ferry", "two boats"], encoding_format="float")
    assert [item.index for item in answer.data] == [0, 1]
    for item in answer.data:
        assert abs(sum(value * value for value in item.embedding) - 1) < 1e-3
    assert answer.usage.prompt_tokens > 0


@check
def embeddings_in_base64_are_the_same():
    plain = client.embeddings.create(model=MODEL, input="one ferry", encoding_format="float").data[0].embedding
    coded = client.embeddings.create(model=MODEL, input="one ferry", encoding_format="base64").data[0].embedding
    values = struct.unpack(f"<{len(plain)}f", base64.b64decode(coded))
    assert max(abs(a - b) for a, b in zip(plain, values, strict=True)) < 1e-5
    chosen_by_the_client = client.embeddings.create(model=MODEL, input="one ferry").data[0].embedding
    assert len(chosen_by_the_client) == len(plain)


@check
def embeddings_take_token_ids():
    answer = client.embeddings.create(model=MODEL, input=[[504, 2240], [504]])
    assert len(answer.data) == 2
    assert answer.usage.prompt_tokens == 3


@check
def embeddings_of_nothing_are_refused():
    for wrong in ([], ""):
        with raises(openai.BadRequestError):
            client.embeddings.create(model=MODEL, input=wrong)


@check
def files_live_and_die():
    made = client.files.create(file=("rows.jsonl", lines(ask("hi"))), purpose="batch")
    assert (made.object, made.purpose, made.filename) == ("file", "batch", "rows.jsonl")
    assert made.id in [file.id for file in client.files.list()]
    assert client.files.retrieve(made.id).bytes == made.bytes > 0
    assert rows_of(made.id)[0]["custom_id"] == "row-0"
    assert client.files.delete(made.id).deleted
    with raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    with raises(openai.NotFoundError):
        client.files.content(made.id)


@check
def other_purposes_are_refused():
    with raises(openai.BadRequestError) as caught:
        client.files.create(file=("rows.jsonl", lines(ask("hi"))), purpose="fine-tune")
    assert caught[0].param == "purpose"


@check
def a_batch_runs():
    made = client.files.create(file=("rows.jsonl", lines(ask("one"), ask("two"), ask("three"))), purpose="batch")
    batch = client.batches.create(
        input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "checks"}
    )
    assert batch.status in ("validating", "in_progress", "finalizing", "completed")
    batch = ended(batch)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 3, 0)
    assert batch.metadata == {"of": "checks"}
    rows = rows_of(batch.output_file_id)
    assert sorted(row["custom_id"] for row in rows) == ["row-0", "row-1", "row-2"]
    for row in rows:
        assert row["response"]["status_code"] == 200
        assert row["error"] is None
        assert row["response"]["body"]["choices"][0]["message"]["content"]
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"


@check
def wrong_rows_go_to_the_error_file():
    made = client.files.create(file=("rows.jsonl", lines(ask("one"), ask("two", temperature=-3))), purpose="batch")
    batch = ended(
        client.batches.create(input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h")
    )
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    (row,) = rows_of(batch.error_file_id)
    assert row["custom_id"] == "row-1"
    assert row["response"]["status_code"] == 400
    assert row["response"]["body"]["error"]["param"] == "temperature"


@check
def a_file_that_is_no_batch_fails_it():
    made = client.files.create(file=("rows.jsonl", io.BytesIO(b'{"custom_id": 1}\nnonsense\n')), purpose="batch")
    batch = ended(
        client.batches.create(input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h")
    )
    assert batch.status == "failed"
    assert [error.line for error in batch.errors.data] == [1, 2]


@check
def a_batch_of_completions():
    body = {"model": MODEL, "prompt": "Once upon", "max_tokens": 3}
    made = client.files.create(file=("rows.jsonl", lines(body, url="/v1/completions")), purpose="batch")
    batch = ended(client.batches.create(input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"))
    assert rows_of(batch.output_file_id)[0]["response"]["body"]["object"] == "text_completion"


@check
def a_batch_is_cancelled():
    slow = [ask("tell me a long story", max_tokens=400, extra=i) for i in range(60)]
    made = client.files.create(file=("rows.jsonl", lines(*slow)), purpose="batch")
    batch = client.batches.create(input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    assert ended(batch).status == "cancelled"
    assert batch.id in [each.id for each in client.batches.list()]


@check
def batches_need_their_parts():
    with raises(openai.NotFoundError, openai.BadRequestError):
        client.batches.create(input_file_id="file-none", endpoint="/v1/chat/completions", completion_window="24h")
    made = client.files.create(file=("rows.jsonl", lines(ask("one"))), purpose="batch")
    with raises(openai.BadRequestError) as caught:
        client.batches.create(input_file_id=made.id, endpoint="/v1/moderations", completion_window="24h")
    assert caught[0].param == "endpoint"
    with raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")
