"""The workers of pytest-xdist share the cores: with as many threads each as there are cores they wait for each other.

17 workers on 16 cores: no test of tests/gpu/nn done after 235 s. 26 on 32 cores, with two threads each: all after 80 s.
"""

import os

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
if WORKERS > 1:  # read when torch is imported, here and in processes that a test starts
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // WORKERS)))
