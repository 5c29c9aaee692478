"""CPU cores that several processes of one machine share, as a laptop's cluster does.

Everything here is off where a process has cores of its own: without `--cores-fd`, and on any device but a CPU. Then no
lock is taken, and no stream waits for a newcomer's prompt.
"""
