"""Buckets and limiters, on a clock of the tests' own."""

from __future__ import annotations

import pytest

from kvferry.router.tenants.limits import Bucket, RateLimited, TenantLimiter, shown_seconds
from kvferry.router.tenants.tenant import Tenant


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_refills_steadily_and_may_owe() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(60, 0.0)
    assert bucket.until_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.level(30.0) == pytest.approx(30.0)
    bucket.take(50, 30.0)
    assert bucket.until_s(10, 30.0) == pytest.approx(30.0)
    assert bucket.level(1000.0) == 60
    assert bucket.until_s(500, 1000.0) == 0.0


def test_no_limit_never_waits() -> None:
    bucket = Bucket(0, 0.0)
    bucket.take(1e9, 0.0)
    assert bucket.until_s(1e9, 0.0) == 0.0


def test_requests_a_minute_and_an_honest_retry_after() -> None:
    clock = Clock()
    limiter = TenantLimiter(Tenant("acme", requests_per_minute=2), clock)
    for _ in range(2):
        limiter.enter()
    with pytest.raises(RateLimited) as caught:
        limiter.enter()
    error = caught.value
    assert (error.status, error.code, error.body()["error"]["type"]) == (429, "rate_limit_exceeded", "requests")
    assert error.retry_after is not None
    clock.now += error.retry_after - 0.01
    with pytest.raises(RateLimited):
        limiter.enter()
    clock.now += 0.02
    limiter.enter()
    assert limiter.running == 3


def test_tokens_are_charged_and_settled() -> None:
    clock = Clock()
    limiter = TenantLimiter(Tenant("acme", tokens_per_minute=600), clock)
    limiter.enter()
    limiter.charge(400)
    with pytest.raises(RateLimited, match="takes 300") as caught:
        limiter.charge(300)
    assert caught.value.retry_after == pytest.approx(10.0)
    assert caught.value.body()["error"]["type"] == "tokens"
    limiter.settle(-100)
    limiter.charge(300)
    assert limiter.headers()["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(RateLimited):
        limiter.enter()
    limiter.settle(600)
    clock.now += 60
    assert limiter.headers()["x-ratelimit-remaining-tokens"] == "0"


def test_concurrent_requests_are_bounded() -> None:
    limiter = TenantLimiter(Tenant("acme", concurrent=1), Clock())
    limiter.enter()
    with pytest.raises(RateLimited, match="in progress"):
        limiter.enter()
    limiter.leave()
    limiter.enter()


def test_headers_are_those_of_the_limits_that_there_are() -> None:
    clock = Clock()
    assert TenantLimiter(Tenant("acme"), clock).headers() == {}
    limiter = TenantLimiter(Tenant("acme", requests_per_minute=6, tokens_per_minute=60000), clock)
    limiter.enter()
    assert limiter.headers() == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "5",
        "x-ratelimit-reset-requests": "10s",
        "x-ratelimit-limit-tokens": "60000",
        "x-ratelimit-remaining-tokens": "60000",
        "x-ratelimit-reset-tokens": "0ms",
    }


def test_a_new_limit_keeps_what_was_taken() -> None:
    limiter = TenantLimiter(Tenant("acme", requests_per_minute=10), Clock())
    for _ in range(4):
        limiter.enter()
    limiter.update(Tenant("acme", requests_per_minute=5))
    assert limiter.headers()["x-ratelimit-remaining-requests"] == "1"
    limiter.update(Tenant("acme"))
    for _ in range(20):
        limiter.enter()


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.12, "120ms"), (1.5, "1.5s"), (59, "59s"), (360, "6m0s"), (61.9, "1m1s")]
)
def test_durations_as_openai_writes_them(seconds: float, shown: str) -> None:
    assert shown_seconds(seconds) == shown
