"""Cores that several processes of one machine compute on: one of them at a time.

Threads of a computation wait for each other awake, so two computations on the same cores take far longer than one after
the other. Who wants to compute takes the cores and leaves them again, in order of arrival. It is a courtesy, on which
nothing but speed depends: who waited for too long computes all the same. Three robust mutexes in memory that the
processes share, `next` for who is the next, `held` for who computes and `urgent` for one that waits and has little to
do; those of a process that dies are free again.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from ctypes import byref, c_char, c_int, c_long, c_void_p

_LIBC = ctypes.CDLL(None, use_errno=False)
_SHARED, _ROBUST, _MONOTONIC = 1, 1, 1
"""As Linux has PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST and CLOCK_MONOTONIC."""
_MUTEX_BYTES, _ATTRIBUTE_BYTES = 128, 64
"""At least what the types take."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))


def make() -> int:
    """A descriptor of the shared memory, for all that are to open it; -1 where the platform has no such mutexes."""
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


class Cores:
    """One process's view of them. A thread that takes them must be the one that leaves them."""

    def __init__(self, descriptor: int) -> None:
        self._next, self._held, self._urgent = _mutexes(mmap.mmap(descriptor, mmap.PAGESIZE))

    def take(self, within_s: float, *, urgent: bool = False) -> bool:
        """Wait for them, so long at most; urgent: whoever has them should not keep them for the whole of a turn.
        Returns whether they are taken; `leave` must follow then."""
        end = time.monotonic() + within_s
        told = urgent and _taken(self._urgent, _LIBC.pthread_mutex_trylock(self._urgent))
        try:
            return self._take(end)
        finally:
            if told:
                _LIBC.pthread_mutex_unlock(self._urgent)

    def leave(self) -> None:
        _LIBC.pthread_mutex_unlock(self._held)

    def wanted(self) -> bool:
        """Whether somebody waits for them."""
        return _locked(self._next)

    def hurried(self) -> bool:
        """Whether who waits for them has something urgent to do."""
        return _locked(self._urgent)

    def _take(self, end: float) -> bool:
        if not _lock(self._next, end):
            return False
        try:
            return _lock(self._held, end)
        finally:
            _LIBC.pthread_mutex_unlock(self._next)


def _mutexes(memory: mmap.mmap) -> tuple[c_void_p, c_void_p, c_void_p]:
    start = c_char.from_buffer(memory)
    address = ctypes.addressof(start)
    _kept.append(start)
    return c_void_p(address), c_void_p(address + _MUTEX_BYTES), c_void_p(address + 2 * _MUTEX_BYTES)


_kept: list[c_char] = []
"""What keeps mappings from being undone under the mutexes in them: they last as long as the process."""


def _lock(mutex: c_void_p, end: float) -> bool:
    until = _Timespec(int(end), int(end % 1 * 1e9))
    return _taken(mutex, _LIBC.pthread_mutex_clocklock(mutex, c_int(_MONOTONIC), byref(until)))


def _locked(mutex: c_void_p) -> bool:
    """By somebody else."""
    if not _taken(mutex, _LIBC.pthread_mutex_trylock(mutex)):
        return True
    _LIBC.pthread_mutex_unlock(mutex)
    return False


def _taken(mutex: c_void_p, result: int) -> bool:
    if result == errno.EOWNERDEAD:
        _LIBC.pthread_mutex_consistent(mutex)
    return result in (0, errno.EOWNERDEAD)
