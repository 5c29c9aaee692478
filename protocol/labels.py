"""Known label values of metrics."""

from __future__ import annotations

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
SOURCES = ("computed", "reused_prefill", "reused_decode", "fetched")
PLACEMENT_KINDS = ("remote", "local")
RUNGS = (
    "same_prefill",
    "another_prefill",
    "another_pair",
    "local_prefill",
    "another_decode",
    "wait_for_room",
    "hedge",
    "move",
)
RECOVERED_SOURCES = ("cached", "computed")
FOUND_MISSING = ("evicted", "not_arrived", "computing", "retracted", "fenced", "unknown")
"""Why a node does not have what was predicted there, as it knows: it evicted it since; a ship or a copy was to bring it
and has not landed; another request was to compute it and has not got there; it was found to be wrong; it was in a
process that this one replaced; or nothing is known of it."""
DEFLECTED = ("node_lost", "not_arrived", "fenced", "layout", "refused", "outrun")
"""Why a request was not computed where it was predicted to find its prefix, as its attempt there ended: the node was
lost; blocks did not come through to decode; another process had replaced it; layouts differed; the node refused, drains
or broke; or an attempt beside it was faster."""
MISS_REASONS = tuple(dict.fromkeys(FOUND_MISSING + DEFLECTED))
REFUSALS = ("rate", "queue", "limit")
ERROR_ANSWERS = (("429", "overloaded"), ("503", "no_nodes"), ("500", "server_error"), ("504", "deadline_exceeded"))
"""The most frequent ones; there are others."""
TOKEN_KINDS = ("prompt", "cached", "output")
ROLES = ("prefill", "decode")
NODE_STATES = ("ready", "draining", "incompatible")
PHASES = ("prefill", "decode")
BLOCK_STATES = ("free", "active", "cached", "granted")
ATTEMPT_OUTCOMES = ("done", "cancelled", "failed", "moved")
MOVE_OUTCOMES = ("moved", "stayed")
ROLE_OUTCOMES = ("done", "kept")
COPY_OUTCOMES = ("done", "refused", "failed")
COPY_WAYS = ("sent", "kept")
FETCH_OUTCOMES = ("done", "lacking", "refused", "late", "corrupt", "lost", "cancelled")
FETCH_WAYS = ("fetched", "given")
OWN_TIERS = ("host", "disk")
TIERS = (*OWN_TIERS, "remote")
TIER_OUTCOMES = ("done", "late", "failed", "refused")
TIER_WAYS = ("read", "written", "lost")
SHIP_OUTCOMES = ("done", "aborted", "failed", "corrupt")
GRANT_OUTCOMES = ("granted", "refused", "aborted")
MODEL = ("model_name",)  # the label that other servers use too
RENEWAL_OUTCOMES = ("renewed", "created", "fenced", "failed")
