"""Set before any test module imports torch: OpenMP threads that spin between kernels starve the other processes of a
test on a small machine."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
