"""`python -m moontide` is the command `moontide`."""

import sys

from moontide.interrupts import at_once, on_interrupt


def main() -> int:
    """Run the command line; a signal while it is loaded ends it at once."""
    on_interrupt(at_once)
    from moontide import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
