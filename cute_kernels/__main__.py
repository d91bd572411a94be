"""python -m cute_kernels, and the console script cute-kernels."""

import sys

from cute_kernels.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
