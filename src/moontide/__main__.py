"""`python -m moontide` is the command `moontide`."""

import sys

from moontide.interrupts import at_once, on_interrupt


def main() -> int:
    """Run the command line; Ctrl-C while it is loaded leaves at once."""
    on_interrupt(at_once)
    from moontide import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
