"""`python -m binidx COMMAND ...`: the same as `binidx COMMAND ...`."""

import sys

from binidx.tools import main

if __name__ == "__main__":
    sys.exit(main())
