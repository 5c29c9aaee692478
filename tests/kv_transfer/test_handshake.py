"""Greetings: who shares secret, wire version and settings gets the other's address and keys; all others a reason."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv_transfer.handshake import Handshake, HandshakeTerms
from kvferry.protocol.errors import Incompatible
from kvferry.protocol.wire import WireError

SETTINGS = {"checksums": "crc32"}
SECRET = HandshakeTerms(lambda: (b"s" * 32,), SETTINGS)


def pair(dialling: HandshakeTerms = SECRET, accepting: HandshakeTerms = SECRET) -> tuple[Handshake, Handshake]:
    return Handshake(dialling, True), Handshake(accepting, False)


def greet(one: Handshake, other: Handshake) -> None:
    one.read_challenge(other.challenge())
    other.read_hello(one.hello(b"one"))
    one.read_welcome(other.welcome(b"other"))


def test_those_of_one_cluster_get_each_others_address_and_keys():
    one, other = pair()
    greet(one, other)
    assert (one.peer, other.peer) == (b"other", b"one")
    inward, outward = one.keys()
    assert other.keys() == (outward, inward)
    assert inward != outward


@pytest.mark.parametrize("secret", [b"", b"t" * 32])
def test_another_secret_is_refused_by_both_sides(secret):
    other = dataclasses.replace(SECRET, secrets=lambda: (secret,))
    for one, two in (pair(other, SECRET), pair(SECRET, other)):
        with pytest.raises(Incompatible, match="cluster secret"):
            greet(one, two)
    one, honest, impostor = Handshake(SECRET, True), Handshake(SECRET, False), Handshake(other, False)
    one.read_challenge(impostor.challenge())
    with pytest.raises(Incompatible, match="cluster secret"):
        one.read_welcome(impostor.welcome(b"mine"))
    assert honest.peer == b""


def test_while_secrets_change_either_is_accepted_and_the_first_is_used():
    old, new = b"o" * 32, b"n" * 32
    steps = [(old,), (old, new), (new, old), (new,)]
    for one_has, two_has in [*pairwise(steps), *pairwise(reversed(steps))]:
        one, two = pair(
            HandshakeTerms(lambda has=one_has: has, SETTINGS), HandshakeTerms(lambda has=two_has: has, SETTINGS)
        )
        greet(one, two)
        assert one.keys() == two.keys()[::-1]
        used, _ = pair(HandshakeTerms(lambda has=one_has: has[:1], SETTINGS))
        assert used._secret == one._secret == two._secret
    one, two = pair(HandshakeTerms(lambda: (old,), SETTINGS), HandshakeTerms(lambda: (new,), SETTINGS))
    with pytest.raises(Incompatible, match="cluster secret"):
        greet(one, two)


def test_a_greeting_heard_before_is_refused():
    one, other = pair()
    one.read_challenge(other.challenge())
    heard = one.hello(b"one")
    other.read_hello(heard)
    welcome = other.welcome(b"other")
    again_one, again_other = pair()
    again_one.read_challenge(again_other.challenge())
    with pytest.raises(Incompatible):
        again_other.read_hello(heard)
    with pytest.raises(Incompatible):
        again_one.read_welcome(welcome)


def test_a_sides_own_proof_is_no_proof_of_the_other():
    one, other = pair()
    one.read_challenge(other.challenge())
    hello = one.hello(b"one")
    with pytest.raises(Incompatible):
        one.read_welcome(hello[41:])


def test_settings_that_differ_are_refused_by_name():
    for settings in ({"checksums": "off"}, {}, {"checksums": "crc32", "more": "1"}):
        one, other = pair(dataclasses.replace(SECRET, settings=settings))
        with pytest.raises(Incompatible, match=r"(checksums|more) differs: ") as refused:
            greet(one, other)
        assert refused.value.param in ("checksums", "more")


def test_another_wire_version_is_refused_before_anything_else():
    one, other = pair(dataclasses.replace(SECRET, version=99))
    with pytest.raises(Incompatible, match="wire version"):
        greet(one, other)


def test_the_secret_is_in_no_text():
    assert "ssss" not in repr(SECRET)


@given(st.binary(max_size=200))
def test_random_greetings_raise_what_they_may(data):
    one, other = pair(HandshakeTerms(), HandshakeTerms())
    for take in (one.read_challenge, other.read_hello, one.read_welcome):
        with pytest.raises((WireError, Incompatible)):
            take(data)


@given(st.binary(max_size=80))
def test_terms_that_are_none_are_refused_though_the_proof_holds(body):
    one, other = pair(HandshakeTerms(), HandshakeTerms())
    one.read_challenge(other.challenge())
    other._take_first(one._first())
    forged = one._first() + one._under_secret(b"hello", body) + body
    with pytest.raises((WireError, Incompatible)):
        other.read_hello(forged)
