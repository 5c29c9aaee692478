"""Local tier of one node, used by the host memory and disk tiers: reads and writes of KV blocks on two threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic

from kvferry.kv_transfer.tiers.catalog import G
from kvferry.kv_transfer.tiers.group_store import Backing, Changed, Store
from kvferry.kv_transfer.tiers.read_rates import FIRST_RATE, ReadRates
from kvferry.protocol.errors import KvferryError, TransferFailed, reason

log = logging.getLogger("kvferry.tiers")


class CallThread:
    """Thread with a bounded queue of calls: at most `most` wait or run. Thread-safe.

    ended: called on the thread when it ends."""

    def __init__(self, name: str, most: int, ended: Callable[[], None] = lambda: None) -> None:
        self._room = threading.Semaphore(most)
        self._calls: SimpleQueue[tuple[Callable[[], None], bool]] = SimpleQueue()
        self._closed, self._ended = False, ended
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], None]) -> bool:
        """Queue a call; return False, without queueing, if the queue is full or closed."""
        if self._closed or not self._room.acquire(blocking=False):
            return False
        self._calls.put((call, True))
        return True

    def add(self, call: Callable[[], None]) -> None:
        """Queue a call, even if the queue is full."""
        self._calls.put((call, False))

    def close(self) -> None:
        """Drop waiting calls, and end the thread after the running one."""
        self._closed = True
        self.add(lambda: None)

    def _run(self) -> None:
        while not self._closed:
            call, counted = self._calls.get()
            if self._closed:
                break
            try:
                call()
            except Exception:
                log.exception("a call on %s failed", threading.current_thread().name)
            finally:
                if counted:
                    self._room.release()
        self._ended()


WRITES, READS = 16, 16
"""Maximum number of chains that wait to be written, and to be read.

Beyond that, nothing is written, and the blocks to read are computed instead."""


@dataclass(slots=True, eq=False)
class Write:
    """Queued or running write. wrong: its blocks are wrong and must not be found."""

    hashes: list[bytes]
    parent: bytes
    blocks: list[Any]
    done: Callable[[int], None]
    wrong: bool = False


class LocalTier(Generic[G]):
    """Blocks of one fingerprint in groups, at most `size` bytes. Thread-safe; reads and writes have a thread each.

    name      name of the tier, in metrics and thread names
    changed   called on any thread with the rows added and removed, in order; must not call back into the tier
    """

    def __init__(
        self,
        name: str,
        backing: Backing[G],
        size: int,
        block_bytes: int,
        ended: Callable[[], None] = lambda: None,
        rate: float = FIRST_RATE,
    ) -> None:
        """Open the tier and start its threads. Raises OSError.

        ended: called once nothing uses the backing any more. rate: expected rate of a read in bytes per second, until
        one was measured."""
        self.name, self._backing, self._ended_all = name, backing, ended
        self.changed: Changed = lambda stored, removed: None
        self._store = Store(backing, size, lambda stored, removed: self.changed(stored, removed))
        self._coming: dict[bytes, Write] = {}
        self._pace, self._open, self._ends = ReadRates(block_bytes, rate=rate), 2, threading.Lock()
        self._reader = CallThread(f"kv-{name}-read", READS, self._ended)
        self._writer = CallThread(f"kv-{name}-write", WRITES, self._written)

    def close(self) -> None:
        """Begin nothing more; `ended` is called when the tier's threads have ended."""
        self._reader.close()
        self._writer.close()

    @property
    def used(self) -> int:
        """Return the bytes of all groups."""
        return self._store.catalog.used

    @property
    def block_s(self) -> float:
        """Return the recent read time per block, in seconds; 0 while the tier does not answer."""
        return 0.0 if self._pace.hangs else self._pace.seconds(1)

    def hashes(self) -> list[bytes]:
        """Return the hashes of all blocks in the tier."""
        return self._store.catalog.hashes()

    def rows(self) -> list[bytes]:
        """Return the rows of blocks whose chain is here from its beginning."""
        return self._store.catalog.rows()

    def __contains__(self, block_hash: object) -> bool:
        """Return whether the block is here or queued for writing."""
        return block_hash in self._store.catalog or block_hash in self._coming

    def run(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks that are here."""
        return next((index for index, each in enumerate(hashes) if each not in self._store.catalog), len(hashes))

    def seconds(self, blocks: int) -> float:
        """Return the expected time to read this many blocks after the queued reads, in seconds."""
        return self._pace.seconds(blocks + self._pace.waiting)

    def write(self, hashes: Sequence[bytes], parent: bytes, blocks: Sequence[Any], done: Callable[[int], None]) -> bool:
        """Queue a write of consecutive blocks of a chain; return False, without queueing, if the queue is full.

        parent: hash of the block before them, which is here; empty at the beginning of a chain. The blocks must not
        change until `done` is called, on a thread of this tier, with the number of blocks written."""
        write = Write(list(hashes), parent, list(blocks), done)
        with self._store.lock:
            if not self._writer.submit(lambda: self._write(write)):
                return False
            self._coming.update(dict.fromkeys(write.hashes, write))
            return True

    def read(self, hashes: Sequence[bytes], blocks: Sequence[Any], done: Callable[[KvferryError | None], None]) -> bool:
        """Queue a read into these blocks; return False, without queueing, if the queue is full.

        The blocks belong to the tier until `done` is called, on a thread of the tier, with None or an error."""
        wanted, into = list(hashes), list(blocks)
        self._pace.enqueue(len(wanted))
        taken = self._reader.submit(lambda: self._read(wanted, into, done))
        if not taken:
            self._pace.enqueue(-len(wanted))
        return taken

    def drop(self, hashes: Collection[bytes]) -> None:
        """Forget these blocks and those behind them, since their content is wrong."""
        with self._store.lock:
            groups, wrong = self._store.catalog.with_descendants(hashes), set(hashes)
            wrong.update(each for group in groups for each in group.hashes)
            for write in dict.fromkeys(self._coming.values()):  # queue order: a chain's write comes after its parent's
                if not wrong.isdisjoint((write.parent, *write.hashes)):
                    write.wrong = True
                    wrong.update(write.hashes)
            self._store.leave(groups)
        self._writer.add(self._store.remove_evicted)

    # On the tier's own threads.

    def _write(self, write: Write) -> None:
        written, parent = 0, write.parent
        try:
            for at in range(0, len(write.hashes), self._backing.most):
                part = slice(at, at + self._backing.most)
                if not self._store.put(write.hashes[part], parent, write.blocks[part], lambda: not write.wrong):
                    break
                written, parent = written + len(write.hashes[part]), write.hashes[part][-1]
        except Exception as error:
            self._store.warnings.warning("blocks could not be written to %s: %s", self._backing, reason(error))
        finally:
            with self._store.lock:
                for each in write.hashes:
                    if self._coming.get(each) is write:
                        del self._coming[each]
            write.done(written)

    def _read(self, hashes: list[bytes], blocks: list[Any], done: Callable[[KvferryError | None], None]) -> None:
        error: KvferryError | None = None
        began = time.monotonic()
        self._pace.begun()
        try:
            at = 0
            while at < len(hashes):
                at += self._store.get(hashes[at:], blocks[at:])
        except Exception as caught:
            error = caught if isinstance(caught, KvferryError) else TransferFailed(reason(caught))
            self._store.warnings.warning("blocks could not be read from %s: %s", self._backing, error)
            self._writer.add(self._store.remove_evicted)
        finally:
            self._pace.ended(len(hashes), time.monotonic() - began if error is None else 0.0)
            done(error)

    def _written(self) -> None:
        self._store.remove_evicted()
        self._ended()

    def _ended(self) -> None:
        with self._ends:
            self._open -= 1
            if not self._open:
                self._ended_all()
