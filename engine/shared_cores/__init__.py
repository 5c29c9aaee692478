"""Sharing of CPU cores between several processes of one machine, as on a laptop's cluster: lock, turns and priority.

Everything here is off where a process has cores of its own: without `--cores-fd`, and on any device but a CPU. Then no
lock is taken, and no stream waits for a newcomer's prompt.
"""
