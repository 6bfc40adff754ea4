"""`python -m moontide` is the command `moontide`."""

import os
import sys


def main() -> int:
    """Run the command line; Ctrl-C before it is there gives the status 130 as well, and no traceback."""
    try:
        from moontide import cli
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        os._exit(130)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
