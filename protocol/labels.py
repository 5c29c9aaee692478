"""Known label values of metrics, so that every series exists from the start."""

from __future__ import annotations

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
SOURCES = ("computed", "reused_prefill", "reused_decode", "fetched")
PLACEMENT_KINDS = ("remote", "local")
RETRY_STEPS = (
    "same_prefill",
    "another_prefill",
    "another_pair",
    "local_prefill",
    "another_decode",
    "wait_for_room",
    "room_elsewhere",
    "hedge",
    "suspicion",
    "move",
    "drain_timeout",
    "displaced",
)
RECOVERED_SOURCES = ("cached", "computed")
FOUND_MISSING = ("evicted", "not_arrived", "computing", "retracted", "fenced", "unknown")
"""Reasons why predicted blocks are missing on a node, as that node knows them.

evicted: the node evicted them since. not_arrived: a ship or copy was to bring them and has not landed. computing:
another request was to compute them and has not yet. retracted: they were found to be wrong. fenced: they were in a
process that this one replaced. unknown: none of these."""
DEFLECTED = ("node_lost", "not_arrived", "fenced", "layout", "refused", "outrun")
"""Reasons why a request was not computed on the node predicted to have its prefix.

node_lost: the node was lost. not_arrived: blocks did not reach decode. fenced: another process had replaced it. layout:
the layouts differ. refused: the node refused, drains or failed. outrun: a parallel attempt was faster."""
MISS_REASONS = tuple(dict.fromkeys(FOUND_MISSING + DEFLECTED))
REFUSALS = ("rate", "queue", "limit")
ERROR_ANSWERS = (("429", "overloaded"), ("503", "no_nodes"), ("500", "server_error"), ("504", "deadline_exceeded"))
"""The most frequent error answers as (status, code); others occur."""
TARGET_OUTCOMES = ("met", "missed", "rejected")
TOKEN_KINDS = ("prompt", "cached", "output")
ROLES = ("prefill", "decode")
"""Roles of nodes that take attempts; an elastic node changes between them."""
NODE_ROLES = (*ROLES, "encode")
"""Roles of all nodes."""
NODE_STATES = ("ready", "draining", "incompatible")
PHASES = ("prefill", "decode")
BLOCK_STATES = ("free", "active", "cached", "granted")
ATTEMPT_OUTCOMES = ("done", "cancelled", "failed", "moved")
MOVE_OUTCOMES = ("moved", "stayed")
ROLE_OUTCOMES = ("done", "kept")
COPY_OUTCOMES = ("done", "refused", "failed")
COPY_WAYS = ("sent", "kept")
SESSION_RETURNS = ("kept", "partial", "lost")
IDLE_KINDS = ("paused", "shared", "copied", "closed")
FETCH_OUTCOMES = ("done", "lacking", "refused", "late", "corrupt", "lost", "cancelled")
ENCODE_OUTCOMES = ("encoded", "cached", "failed", "local")
FETCH_WAYS = ("fetched", "given")
OWN_TIERS = ("host", "disk")
TIERS = (*OWN_TIERS, "remote")
TIER_OUTCOMES = ("done", "late", "failed", "refused")
TIER_WAYS = ("read", "written", "lost")
SHIP_OUTCOMES = ("done", "aborted", "failed", "corrupt")
MEDIA_OUTCOMES = ("encoded", "cached", "failed")
GRANT_OUTCOMES = ("granted", "refused", "aborted")
MODEL = ("model_name",)  # the label that other inference servers use
RENEWAL_OUTCOMES = ("renewed", "created", "fenced", "failed")
