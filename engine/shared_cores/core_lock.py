"""CoreLock: robust mutexes in shared memory that let one of a machine's processes compute on shared cores at a time.

Threads of a computation wait for each other by spinning, so two computations on the same cores take far longer than one
after the other. A process takes the cores before it computes and releases them afterwards, in order of arrival. Only
speed depends on the lock: a process that waited too long computes without it. The lock is two robust mutexes in memory
that the processes share, `next` for the next holder and `held` for the present one; the mutexes of a process that dies
are free again. Beside them is the time until which a waiting process has urgent work."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from ctypes import byref, c_char, c_int, c_long, c_longlong, c_void_p

_LIBC = ctypes.CDLL(None, use_errno=False)
_SHARED, _ROBUST, _MONOTONIC = 1, 1, 1
"""Values of PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST and CLOCK_MONOTONIC on Linux."""
_MUTEX_BYTES, _ATTRIBUTE_BYTES = 128, 64
"""Upper bounds of the sizes of pthread_mutex_t and pthread_mutexattr_t."""
_URGENT_NS = 250_000_000
"""Time for which urgent work stays announced, in nanoseconds."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))


def make() -> int:
    """Return a descriptor of the shared memory for all processes; -1 where the platform has no robust mutexes."""
    if not hasattr(os, "memfd_create") or not hasattr(_LIBC, "pthread_mutex_clocklock"):
        return -1
    descriptor = os.memfd_create("cores")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
    _LIBC.pthread_mutexattr_init(attributes)
    _LIBC.pthread_mutexattr_setpshared(attributes, _SHARED)
    _LIBC.pthread_mutexattr_setrobust(attributes, _ROBUST)
    for mutex in _mutexes(mmap.mmap(descriptor, mmap.PAGESIZE)):
        _LIBC.pthread_mutex_init(mutex, attributes)
    return descriptor


class CoreLock:
    """One process's view of the lock. The thread that takes the cores must release them."""

    def __init__(self, descriptor: int) -> None:
        memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._next, self._held = _mutexes(memory)
        self._urgent_ns = c_longlong.from_buffer(memory, 2 * _MUTEX_BYTES)

    def acquire(self, within_s: float) -> bool:
        """Wait for the cores, at most `within_s` seconds; return whether they are taken, which `release` must end."""
        end = time.monotonic() + within_s
        if not _lock(self._next, end):
            return False
        try:
            return _lock(self._held, end)
        finally:
            _LIBC.pthread_mutex_unlock(self._next)

    def release(self) -> None:
        """Release the cores."""
        _LIBC.pthread_mutex_unlock(self._held)

    def contended(self) -> bool:
        """Return whether another process waits for the cores."""
        if not _taken(self._next, _LIBC.pthread_mutex_trylock(self._next)):
            return True
        _LIBC.pthread_mutex_unlock(self._next)
        return False

    def mark_urgent(self) -> None:
        """Ask the holder not to keep the cores for a whole turn.

        The request expires soon. Thread-safe."""
        self._urgent_ns.value = time.monotonic_ns() + _URGENT_NS

    def clear_urgent(self) -> None:
        """Clear the mark of urgent work, which now has the cores."""
        self._urgent_ns.value = 0

    def is_urgent(self) -> bool:
        """Return whether another process waits for the cores with urgent work."""
        return time.monotonic_ns() < self._urgent_ns.value and self.contended()


def _mutexes(memory: mmap.mmap) -> tuple[c_void_p, c_void_p]:
    start = c_char.from_buffer(memory)
    address = ctypes.addressof(start)
    _kept.append(start)
    return c_void_p(address), c_void_p(address + _MUTEX_BYTES)


_kept: list[c_char] = []
"""Mappings of mutexes; kept until the process ends, since unmapping a mutex in use is undefined."""


def _lock(mutex: c_void_p, end: float) -> bool:
    until = _Timespec(int(end), int(end % 1 * 1e9))
    return _taken(mutex, _LIBC.pthread_mutex_clocklock(mutex, c_int(_MONOTONIC), byref(until)))


def _taken(mutex: c_void_p, result: int) -> bool:
    if result == errno.EOWNERDEAD:
        _LIBC.pthread_mutex_consistent(mutex)
    return result in (0, errno.EOWNERDEAD)
