"""GrammarMasks: makes the grammar bit masks of all requests, on grammar threads or, if quick, on the engine thread.

A mask depends only on the tokens so far. As soon as a token is drawn, while the next step computes, grammar threads
make a request's next mask; it is read when that step draws. A mask that is not ready by then is late: its request draws
nothing in that step and is not scheduled until the mask is ready. Nothing else waits for it.

Most masks take a few microseconds, less than handing them to a thread, which takes a core from the step. If a request's
masks were quick so far, the engine thread makes them one after the other when the step draws: their data is in the
core's cache then, and a GPU computes meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.engine.grammar_mask import TRIALS_IF_SLOW, GrammarMask, ban_ends
from kvferry.protocol.errors import GrammarFailed, InvalidRequest, KvferryError, reason
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Grammar
from kvferry.structured_output.compile_threads import Inline, Runs, run_all
from kvferry.structured_output.interface import Compiler, Matcher, words_for

log = logging.getLogger("kvferry.engine")

WAIT_S = 0.005
"""Time that a step waits, once, for masks that are not ready when it draws, in seconds."""
SLOW_S = 0.002
"""A request whose last mask took longer on its thread is not waited for, in seconds."""
SELF_MADE_S = 0.01
"""CPU time that a step spends on masks it makes itself, or on the first of them that is slow, in seconds."""
MAX_MASK_S = 1.0
"""Limit of CPU time for one mask, in seconds."""
MAX_MASKS_S = 20.0
"""Limit of CPU time for all masks of a request, in seconds."""


class GrammarMasks:
    """Maker of grammar masks.

    compiler: None if grammars cannot be used, for the reason `unreadable`. `wake` is called on a grammar thread when a
    late mask is ready."""

    def __init__(
        self,
        compiler: Compiler | None,
        vocab_size: int,
        compiling: Runs,
        masking: Runs,
        unreadable: str = "this node does not support grammars",
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._compiler, self._unreadable = compiler, unreadable
        self._words = words_for(vocab_size)
        self._compiling, self._masking = compiling, masking
        self._made = threading.Condition()
        self._waited = False

    @classmethod
    def none(cls, unreadable: str) -> GrammarMasks:
        """Return an instance that refuses all grammars for that reason."""
        return cls(None, 0, Inline(), Inline(), unreadable)

    def open(
        self,
        grammar: Grammar,
        params: SamplingParams,
        token_ids: Sequence[int],
        prompt_len: int,
        done: Callable[[KvferryError | None], None],
    ) -> GrammarMask:
        """Return a mask for the first token after token_ids.

        It is usable once `done` was called, on a grammar thread. Raises InvalidRequest, or Overloaded if too many
        grammars are being compiled."""
        if self._compiler is None:
            raise InvalidRequest(f"the request has a grammar, but {self._unreadable}")
        mask = GrammarMask(grammar, params, token_ids, prompt_len, np.zeros(self._words, dtype=np.int32))
        mask.upto = len(token_ids) - prompt_len
        mask.after.append(lambda: done(mask.error))
        self._compiling.submit(lambda: self._make(mask))
        return mask

    def advance(self, masks: Sequence[GrammarMask]) -> None:
        """Begin to make the next masks, or leave them to `settle`: their requests have more tokens, or fewer."""
        if not masks:
            return
        idle = []
        with self._made:
            for mask in masks:
                mask.upto = len(mask.token_ids) - mask.prompt_len
                if mask.deferred:
                    continue
                mask.deferred = mask.ready and mask.is_fast
                if mask.ready and not mask.deferred:
                    idle.append(mask)
                mask.ready, mask.late = False, mask.slow
        run_all([_Making(self, mask) for mask in idle], self._masking)

    def settle(self, masks: Sequence[GrammarMask]) -> None:
        """Make the deferred masks before a step draws. Those that are not ready and will not be at once are late."""
        self._make_deferred([mask for mask in masks if mask.deferred])
        missing = [mask for mask in masks if not mask.ready and not mask.late]
        if not missing:
            return
        with self._made:
            self._waited = True
            self._made.wait_for(lambda: all(mask.ready for mask in missing), WAIT_S)
            self._waited = False
            for mask in missing:
                mask.late = not mask.ready

    def _make_deferred(self, masks: Sequence[GrammarMask]) -> None:
        """Make deferred masks here as long as that is fast; grammar threads make the rest."""
        began = time.thread_time()
        for done, mask in enumerate(masks):
            mask.deferred = False
            self._write(mask)
            mask.ready = True
            if mask.slow or time.thread_time() - began > SELF_MADE_S:
                for other in masks[done + 1 :]:
                    other.deferred = False
                run_all([_Making(self, other) for other in masks[done + 1 :]], self._masking)
                return

    def _make(self, mask: GrammarMask) -> None:
        """Make the mask on a grammar thread, until it follows all present tokens."""
        while not self._finished(mask):
            self._write(mask)
        with self._made:
            late = mask.late
            if self._waited:
                self._made.notify_all()
        calls, mask.after = mask.after, []
        for call in calls:
            call()
        if late:
            self.wake()

    def _finished(self, mask: GrammarMask) -> bool:
        """Return whether there is nothing left to do; the mask is the engine thread's then."""
        with self._made:
            mask.ready = mask.error is not None or (mask.written and mask.behind == mask.upto)
            return mask.ready

    def _write(self, mask: GrammarMask) -> None:
        began = time.thread_time()
        try:
            matcher = self._behind(mask, mask.upto)
            matcher.mask(mask.bits)
            room = mask.params.max_tokens - mask.behind
            token = matcher.closing(room) if mask.may_close(mask.behind) else None
            if token is not None:
                mask.bits[:] = 0
                mask.bits.view(np.uint32)[token // 32] = 1 << token % 32
                mask.closing = True
            ban_ends(mask)
            mask.written = True
        except KvferryError as error:
            mask.error = error
        except Exception as error:
            log.exception("computing a grammar mask failed")
            mask.error = GrammarFailed(f"the grammar's mask could not be made: {reason(error)}")
        self._account(mask, time.thread_time() - began)

    def _behind(self, mask: GrammarMask, upto: int) -> Matcher:
        """Advance the matcher to the mask's position. Raises GrammarFailed if it rejects a token."""
        if mask.matcher is None:
            assert self._compiler is not None
            mask.matcher = self._compiler.compile(mask.grammar)
        if upto < mask.behind:
            mask.matcher.rollback(mask.behind - upto)
            mask.behind = upto
        new = mask.token_ids[mask.prompt_len + mask.behind : mask.prompt_len + upto]
        taken = mask.matcher.accept(new) if new else 0
        if taken < len(new):
            place = mask.behind + taken
            raise GrammarFailed(f"the grammar does not allow the output's token {place} (id {new[taken]})")
        mask.behind = upto
        return mask.matcher

    def _account(self, mask: GrammarMask, seconds: float) -> None:
        compiled = bool(mask.after)
        mask.slow = seconds > SLOW_S and not compiled
        mask.trials = TRIALS_IF_SLOW if mask.slow else max(0, mask.trials - 1)
        mask.spent_s += seconds
        if mask.error is None and not compiled and (seconds > MAX_MASK_S or mask.spent_s > MAX_MASKS_S):
            mask.error = GrammarFailed(
                f"the grammar is too slow: its last mask took {seconds:.1f} s, all of them {mask.spent_s:.1f} s; the "
                f"limits are {MAX_MASK_S:.0f} s and {MAX_MASKS_S:.0f} s"
            )


class _Making:
    """Job that makes one mask."""

    __slots__ = ("_mask", "_masks")

    def __init__(self, masks: GrammarMasks, mask: GrammarMask) -> None:
        self._masks, self._mask = masks, mask

    def __call__(self) -> None:
        self._masks._make(self._mask)
