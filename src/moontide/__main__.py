"""`python -m moontide` is the command `moontide`."""

import sys

from moontide.cli import main

if __name__ == "__main__":
    sys.exit(main())
